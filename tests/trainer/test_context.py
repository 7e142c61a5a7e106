"""Ranks that share rows: what a step measures, and its sharpest cases, are one process's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from prl.config.mesh import MeshShape, resolve
from prl.distributed.mesh import Mesh, lay_out
from prl.layers import attention, context, dsa, layout
from prl.samples import pack
from prl.trainer.state import TrainState
from prl.trainer.step import Stepper
from tests.distributed.ranks import Ranks
from tests.trainer.invariance import EXPERTS, Case, rollouts, train, worst


def measure(rank: int, case: Case) -> tuple[dict[str, Any], float]:
    """Metrics of a step that replays nothing, and the loss of an evaluation after it."""
    config = case.config()
    trainer = config.trainer.model_copy(update={"router_replay": False, "replay_selections": False})
    shape = resolve(trainer, EXPERTS)
    device = torch.device("cpu")
    mesh = lay_out(shape, rank, device) if case.ranks > 1 else Mesh(0, 1, device, MeshShape())
    stepper = Stepper(TrainState(config, trainer.optim, mesh), trainer, 1)
    batch = pack(rollouts(1, case.rollouts, case.routes), step=1, budget=case.pack_tokens, ranks=shape.data)[mesh.stream]
    metrics = stepper(batch).metrics
    for noise in ("time", "tokens_per_s", "rss_mb"):
        del metrics[noise]
    return metrics, stepper.evaluate(batch)


@pytest.mark.parametrize("mesh", [{"cp": 2, "ep": 2}, {"cp": 4, "ep": 1}], ids=str)
def test_what_a_step_measures_counts_every_token_once(mesh: dict[str, int], ranks: Ranks) -> None:
    """The model's own routes and selections; counts, flips, quantiles and the experts' loads of the whole batch."""
    case = Case(loss={"kind": "grpo", "options": {"sequence_high": 2.0}})
    ((expected, loss),) = ranks.run(1, measure, case)
    assert expected["selection_flip_fraction"] > 0.1 and 0 < expected["loss_masked_sequence"] < 1
    for got, got_loss in ranks.run(4, measure, replace(case, ranks=4, mesh=mesh)):
        assert got.keys() == expected.keys()
        for name in ("mismatch", "mismatch_own", "drift_hints"):
            assert got.pop(name) == pytest.approx(expected[name], abs=1e-10), name
        for name, value in got.items():
            assert value == (pytest.approx(expected[name], abs=1e-10) if isinstance(value, float) else expected[name]), name
        assert got_loss == pytest.approx(loss, abs=1e-10)


def train_cut(rank: int, case: Case) -> dict[str, np.ndarray]:
    """`train` where documents of more than a few tokens are cut, attended to by index, and computed again in backward."""
    with (
        mock.patch.object(layout, "BOUND", 60),
        mock.patch.object(dsa, "SPARSE", 0),
        mock.patch.object(attention, "KEEP", 10),
        mock.patch.object(context, "TILE", 5),
    ):
        return train(rank, case)


SHARP = {
    "latent": Case(2, {"cp": 2, "ep": 2}),
    "ulysses": Case(2, {"cp": 2, "ep": 1}, architecture="glm_4.5"),
    "ring": Case(2, {"cp": 2, "ep": 1}, architecture="qwen3, three heads"),
}


@pytest.mark.parametrize("name", SHARP)
def test_cut_documents_train_as_whole_ones_do(name: str, ranks: Ranks) -> None:
    case = SHARP[name]
    (expected,) = ranks.run(1, train, case.alone())
    assert worst(ranks.run(1, train_cut, case.alone())[0], expected)[0] < 1e-10
    assert worst(ranks.run(2, train_cut, case)[0], expected)[0] < 1e-10


LONG = {
    f"{name}, {dtype}": replace(case, dtype=dtype)
    for dtype in ("float64", "float32")
    for name, case in {
        "cp of two": Case(2, {"cp": 2, "ep": 2}, pack_tokens=28),
        "cp of four, clipped": Case(4, {"cp": 4, "ep": 1}, clip=0.05),
        "cp of eight, gspo": Case(8, {"cp": 8, "ep": 8}, routes="shun", loss={"kind": "gspo", "normalise": "sequence"}),
        "dp×cp": Case(8, {"cp": 2, "ep": 1}, {"recompute": "full"}),
        "dp×ep×cp": Case(8, {"cp": 2, "ep": 4}, routes="crowd"),
        "dp×ep×cp, deepep": Case(8, {"cp": 4, "ep": 4, "dispatcher": "deepep", "dispatch_chunks": 2}),
        "replicate×shard×ep×cp": Case(8, {"replicate": 2, "cp": 2, "ep": 2}, {"recompute": "selective"}),
        "a stream without work": Case(8, {"cp": 2, "ep": 2}, rollouts=2, pack_tokens=28),
        "ulysses, eight": Case(8, {"cp": 4, "ep": 4}, {"recompute": "full"}, architecture="glm_4.5", pack_tokens=28),
        "ring, eight": Case(8, {"cp": 8, "ep": 2}, architecture="qwen3, three heads", rollouts=9),
    }.items()
}


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_every_mesh_with_context_ranks_trains_as_one_process_does(name: str, ranks: Ranks) -> None:
    case = LONG[name]
    difference, where = worst(ranks.run(case.ranks, train, case)[0], ranks.run(1, train, case.alone())[0])
    assert difference <= {"float64": 1e-10, "float32": 1e-5}[case.dtype], (difference, where)
