"""A checkpoint of any mesh goes on on any other: the same bits, the same next step."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from prl.config.mesh import resolve
from prl.config.schema import RunConfig
from prl.distributed.mesh import Mesh, lay_out
from prl.distributed.sharded import full
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
    "fp8": ("bfloat16", {"optim": {"lr": 1e-3}, "precision": "fp8"}, torch.finfo(torch.bfloat16).eps),
}
"""Type, more of the section trainer, and by how much the next step's loss, a mean of terms of order 1, may differ elsewhere."""


def config_of(training: str, mesh: str) -> RunConfig:
    dtype, trainer, _ = TRAININGS[training]
    tree = config(dtype, bias_update=0.01, **trainer, **MESHES[mesh]).model_dump()
    if training == "fp8":
        tree["model"]["architecture"] = ARCHITECTURE | WIDE
    return RunConfig.model_validate(tree)


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


def hop(rank: int, training: str, name: str, root: str, sources: list[str], save: bool) -> dict[str, dict[str, Any]]:
    """Go on from the checkpoints of other meshes; with `save` first train two steps and save this mesh's own."""
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
        out["saved"] = go_on(state, c, saver_of(run, c, mesh))
    for source in sources:
        out[source] = go_on(open_state(RunDir(Path(root) / source), c, c.trainer.optim, mesh, None), c)
    return out


def check(training: str, told: dict[str, list[dict[str, Any]]]) -> None:
    """`told[mesh][rank]` of `hop`."""
    bound = TRAININGS[training][2]
    for name, ranks in told.items():
        for source in ranks[0].keys() - {"saved"}:
            expected = told[source][0]["saved"]
            for rank, report in enumerate(r[source] for r in ranks):
                assert report["before"] == expected["before"], (source, name)
                assert abs(report["loss"] - expected["loss"]) <= bound, (source, name)
                if rank < len(told[source]):
                    assert report["noise"] == told[source][rank]["saved"]["noise"], (source, name, rank)
                if name == source:
                    assert report["loss"] == expected["loss"] and report["after"] == expected["after"], "uninterrupted"


@pytest.mark.parametrize("training", TRAININGS)
def test_a_checkpoint_goes_on_on_another_mesh(training: str, ranks: Ranks, tmp_path: Path) -> None:
    """Two ranks' and four ranks' on each of the others and on their own."""
    names = ["2", "4, ep 2"]
    told = {
        n: ranks.run(MESHES[n]["ranks"], hop, training, n, str(tmp_path), names[: i + 1], True) for i, n in enumerate(names)
    }
    check(training, told)
    one = ranks.run(1, hop, training, "1", str(tmp_path), names, False)
    check(training, told | {"1": one})


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("training", TRAININGS)
def test_a_checkpoint_of_any_mesh_goes_on_on_any_other(training: str, ranks: Ranks, tmp_path: Path) -> None:
    told = {n: ranks.run(m["ranks"], hop, training, n, str(tmp_path), [], True, timeout_s=300) for n, m in MESHES.items()}
    for name, mesh in MESHES.items():
        more = ranks.run(mesh["ranks"], hop, training, name, str(tmp_path), list(MESHES), False, timeout_s=300)
        told[name] = [mine | other for mine, other in zip(told[name], more, strict=True)]
    check(training, told)
