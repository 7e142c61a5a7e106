"""A checkpoint of any mesh goes on on any other: the same bits, the same next step."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from prl.config.mesh import resolve
from prl.config.schema import RunConfig
from prl.distributed.mesh import Mesh, lay_out
from prl.distributed.sharded import full
from prl.layers.moe import Experts
from prl.samples import pack
from prl.trainer.state import TrainState
from prl.trainer.step import Stepper
from prl.trainer.store import open_state
from prl.transport.run_dir import RunDir
from tests.distributed.ranks import Ranks
from tests.trainer.helpers import ALONE, ARCHITECTURE, EXPERTS, config, rollouts, saver_of
from tests.trainer.test_fp8 import WIDE

MESHES: dict[str, dict[str, Any]] = {
    "1": {"ranks": 1},
    "2": {"ranks": 2, "mesh": {"ep": 1}},
    "4, ep 2": {"ranks": 4, "mesh": {"ep": 2}},
    "4, replicate 2": {"ranks": 4, "mesh": {"replicate": 2, "ep": 1}},
    "4, cp 2": {"ranks": 4, "mesh": {"cp": 2, "ep": 4}},
    "8": {"ranks": 8, "mesh": {"ep": 4}},
}
TRAININGS: dict[str, tuple[str, dict[str, Any], float]] = {
    "adamw": ("float32", {"optim": {"kind": "adamw", "lr": 1e-3, "eps": 1e-6}}, 1e-5),
    "sgd": ("float64", {"optim": {"kind": "sgd", "lr": 1e-3}}, 1e-10),
    "muon": ("float64", {"optim": {"kind": "muon", "lr": 1e-3}, "offload": "optimizer"}, 1e-10),
    "lora": (
        "float64",
        {"optim": {"lr": 1e-3, "state_dtype": "bfloat16"}, "offload": "parameters", "lora": {"rank": 3}},
        1e-10,
    ),
    "fp8": ("bfloat16", {"optim": {"lr": 1e-3}, "precision": "fp8"}, 1e-6),
}
"""Type, more of the section trainer, and by how much the next step's loss, a mean of terms of order 1, may differ from one
process's that rounds the sums of the experts of each rank as the mesh does (`Apart`)."""


def config_of(training: str, mesh: str) -> RunConfig:
    dtype, trainer, _ = TRAININGS[training]
    tree = config(dtype, bias_update=0.01, **trainer, **MESHES[mesh]).model_dump()
    if training == "fp8":
        tree["model"]["architecture"] = ARCHITECTURE | WIDE
    return RunConfig.model_validate(tree)


class Apart:
    """All experts are here, but the sums over each of `ranks` equal parts are rounded to the tokens' type, then added."""

    def __init__(self, ranks: int):
        self.each = EXPERTS // ranks

    def __call__(self, compute: Any, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        parts = [
            compute(x_TD, torch.where(ids_TK // self.each == r, ids_TK, -1), weights_TK) for r in range(EXPERTS // self.each)
        ]
        return sum(p.to(torch.promote_types(p.dtype, torch.float32)) for p in parts).to(x_TD.dtype)


def digests(state: TrainState) -> dict[str, str]:
    """Of every whole tensor of weights and optimizer."""
    kept = {n: full(t).contiguous() for n, t in state.saved().items() if not n.startswith("random.")}
    return {n: hashlib.sha256(t.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest() for n, t in kept.items()}


def go_on(state: TrainState, c: RunConfig, saver: Any = None) -> dict[str, Any]:
    """The state as it is, and after its third step; the step is taken while the state is saved, if it is."""
    mesh, before, noise = state.mesh, digests(state), hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
    if saver is not None:
        saver.start(state)
    batch = pack(rollouts(3), step=3, budget=40, ranks=mesh.shape.data)[mesh.stream]
    loss = Stepper(state, c.trainer, 100)(batch).loss
    if saver is not None:
        saver.wait()
    return {"before": before, "noise": noise, "loss": loss, "after": digests(state)}


Told = dict[tuple[str, int], dict[str, Any]]


def hop(rank: int, training: str, name: str, root: str, sources: list[str], save: bool) -> Told:
    """Go on from the checkpoints of other meshes; with `save` first train two steps and save this mesh's own.

    By source and expert ranks: one process goes on as each number of them would.
    """
    c = config_of(training, name)
    shape = resolve(c.trainer, EXPERTS)
    mesh: Mesh = lay_out(shape, rank, torch.device("cpu")) if shape.world > 1 else ALONE
    out = {}
    if save:
        torch.manual_seed(rank)
        run = RunDir(Path(root) / name)
        state = TrainState(c, c.trainer.optim, mesh)
        stepper = Stepper(state, c.trainer, 100)
        for step in (1, 2):
            stepper(pack(rollouts(step), step=step, budget=40, ranks=shape.data)[mesh.stream])
        out["saved", shape.expert] = go_on(state, c, saver_of(run, c, mesh))
    for source in sources:
        for expert in (1, 2, 4) if mesh is ALONE else (shape.expert,):
            torch.manual_seed(1000 + rank)  # what was random before must not matter
            state = open_state(RunDir(Path(root) / source), c, c.trainer.optim, mesh, None)
            for module in state.model.modules():
                if isinstance(module, Experts) and mesh is ALONE:
                    module.dispatcher = Apart(expert)
            out[source, expert] = go_on(state, c)
    return out


def check(training: str, told: dict[str, list[Told]]) -> None:
    """`told[mesh][rank]` of `hop`."""
    bound = TRAININGS[training][2]
    saved = {n: (expert, report) for n, ranks in told.items() for (s, expert), report in ranks[0].items() if s == "saved"}
    for name, ranks in told.items():
        for source, expert in ranks[0]:
            if source == "saved":
                continue
            alone = told["1"][0][source, expert]["loss"]
            for rank, report in enumerate(r[source, expert] for r in ranks):
                assert report["before"] == saved[source][1]["before"], (source, name)
                assert abs(report["loss"] - alone) <= bound, (source, name, expert)
                if rank < len(told[source]):
                    noise = told[source][rank]["saved", saved[source][0]]["noise"]
                    assert report["noise"] == noise, (source, name, rank)
                if name == source and expert == saved[name][0]:
                    assert all(report[k] == saved[name][1][k] for k in ("loss", "after")), "uninterrupted"


@pytest.mark.parametrize("training", TRAININGS)
def test_a_checkpoint_goes_on_on_another_mesh(training: str, ranks: Ranks, tmp_path: Path) -> None:
    """Two ranks' and four ranks' on each of the others and on their own."""
    names = ["2", "4, ep 2"]
    told = {
        n: ranks.run(MESHES[n]["ranks"], hop, training, n, str(tmp_path), names[: i + 1], True) for i, n in enumerate(names)
    }
    told["1"] = ranks.run(1, hop, training, "1", str(tmp_path), names, False)
    check(training, told)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("training", TRAININGS)
def test_a_checkpoint_of_any_mesh_goes_on_on_any_other(training: str, ranks: Ranks, tmp_path: Path) -> None:
    told = {n: ranks.run(m["ranks"], hop, training, n, str(tmp_path), [], True, timeout_s=300) for n, m in MESHES.items()}
    for name, mesh in MESHES.items():
        more = ranks.run(mesh["ranks"], hop, training, name, str(tmp_path), list(MESHES), False, timeout_s=300)
        told[name] = [mine | other for mine, other in zip(told[name], more, strict=True)]
    check(training, told)
