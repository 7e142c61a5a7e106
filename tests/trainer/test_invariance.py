"""Loss, gradients and parameters do not depend on how many ranks share the work, nor on how."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from prl.config.mesh import MeshShape, resolve
from prl.distributed.mesh import lay_out
from prl.samples import Rollout, pack
from prl.trainer.state import TrainState
from prl.trainer.step import Stepper
from tests.distributed.ranks import Ranks
from tests.trainer.helpers import ALONE, state_of
from tests.trainer.invariance import EXPERTS, KEPT, Case, sample, train, worst
from tests.trainer.sweep import sweep
from tests.trainer.test_fp8 import fp8_config, reversed_words

BOUND = {"float64": 1e-10, "float32": 1e-5}
SGD, ADAMW = {"kind": "sgd"}, {"kind": "adamw", "eps": 1e-6}
MUON = {"kind": "muon", "eps": 1e-6, "weight_decay": 0.1}
GSPO = {"kind": "gspo", "normalise": "sequence"}
CASES = {
    "dp": Case(2, {"ep": 1}),
    "dp×ep": Case(4, {"ep": 2}),
    "all ep": Case(4, {"ep": 4}, routes="crowd"),
    "replicate×shard×ep": Case(4, {"replicate": 2, "ep": 2}, routes="shun"),
    "unpacked, clipped": Case(4, {"ep": 2}, pack_tokens=28, clip=0.05),
    "a rank without work": Case(4, {"ep": 2}, rollouts=2),
    "sgd": Case(2, {"ep": 2}, optim=SGD),
    "parts computed again": Case(4, {"ep": 2}, {"recompute": "selective"}),
    "chunks": Case(4, {"ep": 4, "dispatch_chunks": 3}, rollouts=2),
    "deepep": Case(4, {"ep": 2, "dispatcher": "deepep"}, routes="crowd"),
    "deepep, chunks": Case(4, {"ep": 4, "dispatcher": "deepep", "dispatch_chunks": 2}, {"recompute": "full"}, routes="shun"),
    "cp": Case(2, {"cp": 2, "ep": 1}),
    "dp×cp": Case(4, {"cp": 2, "ep": 1}, clip=0.05),
    "dp×ep×cp": Case(4, {"cp": 2, "ep": 2}, pack_tokens=28),
    "cp of fewer tokens, gspo": Case(4, {"cp": 4, "ep": 4}, rollouts=2, pack_tokens=28, loss=GSPO),
    "ulysses": Case(4, {"cp": 4, "ep": 2}, architecture="glm_4.5"),
    # Rollouts whose loss does not nearly cancel: float32 on one process then keeps the bound to float64 too.
    "ring": Case(4, {"cp": 2}, architecture="qwen3, three heads", rollouts=9),
    "eight": Case(8, {"replicate": 2, "ep": 4}, {"recompute": "full"}),
    # B is zero at first and then AdamW's update alone, which makes a gradient's rounding larger by up to 1 / eps.
    "lora": Case(4, {"ep": 2}, lora={"rank": 3}, clip=0.05, optim=ADAMW | {"eps": 1e-3}),
    "muon": Case(4, {"cp": 2, "ep": 2}, optim=MUON, clip=0.05),
    "muon, whole experts": Case(2, {"ep": 1}, optim=MUON),
    "muon, copies": Case(4, {"replicate": 2, "ep": 1}, optim=MUON),
}


EXPERT_PARALLEL = {
    f"{world} ranks, ep {ep}, {dispatcher}, {chunks} chunks, {routes}": Case(
        world, {"ep": ep, "dispatcher": dispatcher, "dispatch_chunks": chunks}, routes=routes
    )
    for world, ep in ((2, 2), (4, 2), (4, 4), (8, 2), (8, 4), (8, 8))
    for dispatcher in ("all_to_all", "deepep")
    for chunks in (1, 3)
    for routes in ("random", "crowd", "shun")
}
ADAPTERS = Case(8, lora={"rank": 3}, clip=0.05, optim=ADAMW | {"eps": 1e-3})  # eps as above
EIGHT = {
    "8 ranks, lora": replace(ADAPTERS, mesh={"ep": 4}, routes="crowd"),
    "8 ranks, lora, all": replace(ADAPTERS, mesh={"replicate": 2, "cp": 2, "ep": 2}, trainer={"recompute": "full"}),
    "8 ranks, lora, chunks": replace(ADAPTERS, mesh={"ep": 8, "dispatch_chunks": 3}, trainer={"offload": "parameters"}),
    "8 ranks, lora, muon": replace(ADAPTERS, mesh={"cp": 2, "ep": 4}, optim=MUON | {"eps": 1e-3}),
    "8 ranks, muon": Case(8, {"cp": 2, "ep": 4}, optim=MUON, clip=0.05),
    "8 ranks, muon, copies": Case(8, {"replicate": 2, "ep": 4}, {"offload": "optimizer"}, optim=MUON),
}
LONG = EXPERT_PARALLEL | EIGHT | sweep()
alone: dict[str, dict[str, np.ndarray]] = {}
"""What one process makes of a case, by the case."""


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_a_mesh_trains_as_one_process_does(name: str, dtype: str, ranks: Ranks) -> None:
    check(replace(CASES[name], dtype=dtype), ranks)


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", LONG, ids=str)
def test_every_two_settings_meet(name: str, dtype: str, ranks: Ranks) -> None:
    check(replace(LONG[name], dtype=dtype), ranks)


def check(case: Case, ranks: Ranks) -> None:
    key = repr(single := case.alone())
    if key not in alone:
        alone[key] = ranks.run(1, train, single)[0]
    difference, where = worst(ranks.run(case.ranks, train, case)[0], alone[key])
    assert difference <= BOUND[case.dtype], (difference, where)


def test_ranks_of_long_and_of_short_rows_gather_the_same_weights(ranks: Ranks) -> None:
    """In bfloat16 some weights are sharded apart, in float32; the indexer needs its own for long rows alone."""
    for lengths in ((KEPT - 2, 28), (28, KEPT - 2)):
        ranks.run(2, forward, lengths, timeout_s=30)


def forward(rank: int, lengths: tuple[int, int]) -> None:
    config = Case(2, dtype="bfloat16").config()
    mesh = lay_out(resolve(config.trainer, EXPERTS), rank, torch.device("cpu"))
    state = TrainState(config, config.trainer.optim, mesh)
    rng = np.random.default_rng(0)
    rollout = Rollout("", "", "", 0, 0, samples=[sample(rng, lengths[rank], "random")])
    batch = pack([rollout], step=1, budget=64, ranks=1)[0]
    assert np.isfinite(Stepper(state, config.trainer, 1)(batch).loss)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_fsdp_on_one_rank_trains_the_same_bits(precision: str, ranks: Ranks) -> None:
    """As one GPU does: sharding over a single rank changes no bit."""
    apart, sharded = ranks.run(1, losses_of_one, precision)[0]
    assert sharded == apart


def losses_of_one(_: int, precision: str) -> list[list[float]]:
    c = fp8_config(precision, optim={"lr": 3e-3})
    found = []
    for mesh in (ALONE, None):
        if mesh is None:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            mesh = lay_out(MeshShape(), 0, torch.device("cpu"))
        stepper = Stepper(state_of(c, mesh), c.trainer, 4)
        rng = np.random.default_rng(0)
        found.append([stepper(pack(reversed_words(rng, 8), step=i, budget=4096, ranks=1)[0]).loss for i in range(1, 5)])
    return found
