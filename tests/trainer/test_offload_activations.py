"""Activations that wait on the host: the same bits, in order, a bounded number on the device, and no weights among them."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from prl.config.mesh import resolve
from prl.distributed.mesh import lay_out
from prl.models.offload import Stage
from prl.samples import MicroBatch, pack
from prl.trainer.state import TrainState
from prl.trainer.step import Stepper, inputs
from tests.distributed.ranks import Ranks
from tests.trainer import helpers
from tests.trainer.helpers import rollouts
from tests.trainer.test_recompute import glm_5, glm_45, trained

BLOCKS = 5
DEEP = helpers.ARCHITECTURE | {"num_hidden_layers": BLOCKS}


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("make", [glm_5, glm_45])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_every_bit_stays(make: Any, dtype: str, recompute: str) -> None:
    assert trained(make(dtype, offload_activations=1, recompute=recompute), True) == trained(make(dtype), True)


class Spy:
    """Events of one micro-batch, and which device storages of each block are alive."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.storages: dict[int, list[StorageWeakRef]] = {}
        self.most = self.bytes = 0
        self.weights: set[int] = set()

    def alive(self) -> set[int]:
        return {block for block, refs in self.storages.items() if any(not r.expired() for r in refs)}

    def __call__(self, what: str, stage: Stage) -> None:
        self.events.append((what, stage.block))
        assert self.weights.isdisjoint(stage.held.keys()), "a weight moves"
        if what in ("out", "in"):
            held = [h.device for h in stage.held.values() if h.device is not None]
            self.storages[stage.block] = [StorageWeakRef(s) for s in held]
            self.bytes += sum(s.nbytes() for s in held)
        self.most = max(self.most, len(self.alive()))


def micro_batches() -> list[MicroBatch]:
    return pack(rollouts(1, 12), step=1, budget=10_000, ranks=1)[0].micro_batches


def observed(in_flight: int, dtype: str, **trainer: Any) -> tuple[Spy, Stepper]:
    c = helpers.config(dtype, offload_activations=in_flight, **trainer)
    c = c.model_copy(update={"model": c.model.model_copy(update={"architecture": DEEP})})
    state = TrainState(c, c.trainer.optim, helpers.ALONE)
    spy = Spy()
    assert state.activations is not None
    state.activations.log = spy
    stepper = Stepper(state, c.trainer, 3)
    (mb,) = micro_batches()
    x = inputs(mb, helpers.ALONE.device, replay=False, replay_selections=False)
    with state.computing() as policy:
        spy.weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
        logprobs, entropy, _ = policy(x.forward, x.rows_M, x.labels_M, x.temperature_M)
        gc.collect()
        spy.events.append(("backward", len(spy.alive())))
        (logprobs.sum() + entropy.sum()).backward()
    return spy, stepper


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_order_and_bound(in_flight: int) -> None:
    spy, _ = observed(in_flight, "float32")
    last, n = BLOCKS - 1, in_flight
    forward = [("out", 0)]
    for b in range(1, BLOCKS):
        forward += [("out", b)] + [("free", b - n)] * (b >= n)
    backward: list[tuple[str, int]] = []
    for b in range(last, -1, -1):
        backward += [("free", b + 1)] * (b < last)
        backward += [("in", b - n)] * (b >= n)
        backward += [("use", b)]
    assert spy.events == [*forward, ("backward", n), *backward]
    assert spy.most == n + 1
    gc.collect()
    assert not spy.alive()


def test_weights_stay_where_they_are() -> None:
    """With blocks computed again their inputs are all that moves."""
    observed(1, "bfloat16")
    for dtype in ("float32", "bfloat16"):
        spy, stepper = observed(1, dtype, recompute="full")
        (mb,) = micro_batches()
        inputs_ = len(mb.sample.tokens) * helpers.ARCHITECTURE["hidden_size"] * getattr(torch, dtype).itemsize
        assert spy.bytes == inputs_ * (BLOCKS + BLOCKS - 1)  # all go out, and all but the last come back


def on_ranks(rank: int, settings: list[dict[str, Any]]) -> list[dict[str, bytes]]:
    out = []
    for setting in settings:
        c = helpers.config("bfloat16", ranks=2, mesh={"ep": 2}, **setting)
        mesh = lay_out(resolve(c.trainer, helpers.EXPERTS), rank, torch.device("cpu"))
        state = TrainState(c, c.trainer.optim, mesh)
        if state.activations is not None:

            def log(what: str, stage: Stage, state: TrainState = state) -> None:
                if what == "out":
                    gathered = {
                        t.untyped_storage().data_ptr()
                        for p in state.policy.modules()
                        if hasattr(p, "_get_fsdp_state")
                        for t in p.parameters(recurse=False)
                        if type(t) is torch.nn.Parameter
                    }
                    assert not gathered & {*stage.held.keys()}

            state.activations.log = log
        stepper = Stepper(state, c.trainer, 3)
        for step in (1, 2):
            stepper(pack(rollouts(step, 6), step=step, budget=48, ranks=2)[rank])
        out.append({n: p.to_local().detach().numpy().tobytes() for n, p in state.params.items()})
    return out


def test_ranks_keep_every_bit(ranks: Ranks) -> None:
    settings: list[dict[str, Any]] = [{}, {"offload_activations": 1}, {"offload_activations": 2, "recompute": "full"}]
    for first, *others in ranks.run(2, on_ranks, settings):
        assert all(o == first for o in others)
