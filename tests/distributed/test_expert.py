"""Tokens on their way to their experts: who gets what in which order, what comes back, and what happens meanwhile.

Every case runs on real ranks with both dispatchers: over the process group, and over a stand-in for DeepEP.
"""

from __future__ import annotations

import functools
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from prl.config.mesh import resolve
from prl.distributed.deepep import DeepEP, DispatcherError
from prl.distributed.expert import AllToAll, Dispatcher
from prl.distributed.mesh import lay_out
from prl.kernels.experts import experts
from prl.kernels.numerics import sqnr_db
from prl.samples import pack
from prl.trainer.step import inputs
from tests.distributed import deep_ep
from tests.distributed.ranks import Ranks
from tests.trainer import helpers

KINDS = ("all_to_all", "deepep")
WORLD, E, K, D = 4, 8, 3, 8
TOKENS = (5, 0, 7, 3)
"""Of each rank; nobody sends anything to rank 3."""


def dispatcher(kind: str, n_experts: int = E, width: int = D, **options: Any) -> Dispatcher:
    assert dist.group.WORLD is not None
    if kind == "all_to_all":
        return AllToAll(dist.group.WORLD, n_experts, **options)
    deep_ep.install()
    return DeepEP(dist.group.WORLD, n_experts, width, torch.device("cpu"), **options)


def tokens_of(rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x, ids, weights, the gradient of what comes back): some slots empty, one token without any expert."""
    g = torch.Generator().manual_seed(rank)
    t = TOKENS[rank]
    x = torch.randn(t, D, generator=g, dtype=torch.float64).to(dtype)
    ids = torch.stack([torch.randperm(6, generator=g)[:K] for _ in range(t)]) if t else torch.zeros(0, K, dtype=torch.int64)
    ids[torch.rand(t, K, generator=g) < 0.2] = -1
    ids[1:2] = -1
    weights = torch.rand(t, K, generator=g, dtype=torch.float64).to(torch.promote_types(dtype, torch.float32))
    return x, ids, weights, torch.randn(t, D, generator=g, dtype=torch.float64).to(dtype)


def sums(x: Tensor, local_ids: Tensor, weights: Tensor, rank: int) -> Tensor:
    """What rank's "experts" make: of each token a multiple that tells apart ranks, experts and slots."""
    factor = torch.where(local_ids < 0, 0, (3 * rank + local_ids + 1) * weights).sum(1, keepdim=True)
    return x * factor.to(x.dtype)


def travel(rank: int, kind: str, dtype: torch.dtype, chunks: int) -> dict[str, np.ndarray]:
    x, ids, weights, grad = tokens_of(rank, dtype)
    x.requires_grad_()
    weights.requires_grad_()
    received: list[list[Tensor]] = []

    def compute(x: Tensor, ids: Tensor, weights: Tensor, codes: Any, slots: int) -> Tensor:
        assert slots == (ids >= 0).sum()
        received.append([x.detach(), ids, torch.where(ids < 0, 0, weights.detach())])
        return sums(x, ids, weights, rank)

    out = dispatcher(kind, chunks=chunks)(compute, x, ids, weights)
    assert out.grad_fn is not None and len(received) == chunks
    out.backward(grad)
    assert x.grad is not None and weights.grad is not None
    tensors = [*(torch.cat(parts) for parts in zip(*received, strict=True)), out.detach(), x.grad, weights.grad]
    names = ("x", "ids", "weights", "out", "d_x", "d_weights")
    return {n: t.double().numpy() for n, t in zip(names, tensors, strict=True)}


def both(rank: int, dtype: torch.dtype, chunks: int) -> list[dict[str, np.ndarray]]:
    return [travel(rank, kind, dtype, chunks) for kind in KINDS]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("chunks", [1, 3])
def test_tokens_arrive_and_return_as_specified(dtype: torch.dtype, chunks: int, ranks: Ranks) -> None:
    """Order by source rank then token, each token once a rank, local ids, empty slots; sums in rank order, rounded once."""
    found = ranks.run(WORLD, both, dtype, chunks)
    sent = [[t.tensor_split(chunks) for t in tokens_of(r, dtype)] for r in range(WORLD)]
    for r in range(WORLD):
        expected: list[list[Tensor]] = [[], [], []]
        for c in range(chunks):
            for source in range(WORLD):
                x, ids, weights, _ = (t[c] for t in sent[source])
                here = (ids >= 2 * r) & (ids < 2 * r + 2)
                rows = here.any(1)
                local = torch.where(here, ids - 2 * r, -1)[rows]
                for kept, value in zip(expected, (x[rows], local, torch.where(here, weights, 0)[rows]), strict=True):
                    kept.append(value)
        for name, parts in zip(("x", "ids", "weights"), expected, strict=True):
            for kind in range(2):
                assert np.array_equal(found[r][kind][name], torch.cat(parts).double().numpy()), (name, KINDS[kind], r)
        x, ids, weights, grad = tokens_of(r, dtype)
        x.requires_grad_()
        weights.requires_grad_()
        wide = torch.promote_types(dtype, torch.float32)
        total, d_x = torch.zeros(len(x), D, dtype=wide), torch.zeros(len(x), D, dtype=wide)
        d_weights = torch.zeros_like(weights)
        for owner in range(WORLD):
            here = (ids >= 2 * owner) & (ids < 2 * owner + 2)
            part = sums(x, torch.where(here, ids - 2 * owner, -1), weights, owner)
            d_part, dw_part = torch.autograd.grad(part, (x, weights), grad)
            total, d_x, d_weights = total + part.detach(), d_x + d_part, d_weights + dw_part
        for name, value in (("out", total.to(dtype)), ("d_x", d_x.to(dtype)), ("d_weights", d_weights)):
            for kind in range(2):
                assert np.array_equal(found[r][kind][name], value.double().numpy()), (name, KINDS[kind], r)
    assert all(len(found[3][kind]["x"]) == 0 for kind in range(2)), "the case has a rank that gets nothing"


def count_exchanges(rank: int) -> tuple[list[int], list[str]]:
    """([exchanges forward, backward], calls of DeepEP's buffer) of one dispatch and combine."""
    counts = []
    for kind in KINDS:
        x, ids, weights, grad = tokens_of(rank, torch.float32)
        x.requires_grad_()
        weights.requires_grad_()
        deep_ep.Buffer.calls = []
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as forward:
            out = dispatcher(kind)(lambda x, i, w, *_: sums(x, i, w, rank), x, ids, weights)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as backward:
            out.backward(grad)
        for profile in (forward, backward):
            counts.append(sum(e.count for e in profile.key_averages() if e.key == "c10d::alltoall_base_"))
    return counts[:2], deep_ep.Buffer.calls


def test_the_layout_is_exchanged_once_and_not_in_backward(ranks: Ranks) -> None:
    for exchanges, calls in ranks.run(2, count_exchanges):
        assert exchanges == [4, 3], "counts, tokens, ids with weights, sums; then gradients of all but the counts"
        assert calls == ["layout", "dispatch", "combine", "dispatch again", "combine"]


class Meet(torch.autograd.Function):
    """Calls back in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Any, backward: Any) -> Tensor:
        forward()
        ctx.meet = backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.meet()
        return grad, None, None


def meet(rank: int, kind: str, chunks: int, folder: str) -> list[str]:
    """Rank 0 does not leave its experts' chunk c before rank 1 has the next one, which rank 0 must have sent before."""
    store, events = dist.FileStore(f"{folder}/{kind}", 2), []
    count = iter(range(chunks))

    def compute(x: Tensor, ids: Tensor, weights: Tensor, *_: Any) -> Tensor:
        c = next(count)

        def at(way: str, following: int) -> None:
            events.append(f"{way} {c}")
            if rank == 1:
                store.set(f"{way} {c}", "arrived")
            elif 0 <= following < chunks:
                store.wait([f"{way} {following}"], timedelta(seconds=20))

        return Meet.apply(sums(x, ids, weights, rank), lambda: at("forward", c + 1), lambda: at("backward", c - 1))

    x, ids, weights, grad = (t.repeat(2, 1) for t in tokens_of(2, torch.float32))
    x.requires_grad_()
    dispatcher(kind, chunks=chunks)(compute, x, ids, weights).backward(grad)
    return events


@pytest.mark.parametrize(("kind", "chunks"), [("all_to_all", 3), ("deepep", 2)])  # DeepEP's host waits for counts as it sends
def test_a_chunk_is_on_its_way_while_the_experts_work_on_another(kind: str, chunks: int, ranks: Ranks, tmp_path: Path) -> None:
    expected = [f"forward {c}" for c in range(chunks)] + [f"backward {c}" for c in reversed(range(chunks))]
    assert ranks.run(2, meet, kind, chunks, str(tmp_path)) == [expected, expected]


def layer(rank: int, kind: str, precision: Any, **options: Any) -> list[Tensor]:
    """Output, gradients of tokens, weights and experts of real experts; the same tokens for every setting."""
    world, n, width, inner = dist.get_world_size(), 300, 256, 128
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(n, width, generator=g).bfloat16().requires_grad_()
    ids = torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(n)])
    weights = torch.rand(n, K, generator=g).requires_grad_()
    grad = torch.randn(n, width, generator=g).bfloat16()
    gate_up = (torch.randn(E // world, 2 * inner, width, generator=g) / width**0.5).bfloat16().requires_grad_()
    down = (torch.randn(E // world, width, inner, generator=g) / inner**0.5).bfloat16().requires_grad_()

    def compute(x: Tensor, ids: Tensor, weights: Tensor, codes: Any, slots: int) -> Tensor:
        return experts(x, ids, weights, gate_up, down, precision=precision, codes=codes, slots=slots)

    out = dispatcher(kind, width=width, **options)(compute, x, ids, weights)
    out.backward(grad)
    grads = [t.grad for t in (x, weights, gate_up, down)]
    assert all(g is not None for g in grads)
    return [out.detach(), *grads]  # type: ignore[list-item]


def compare(rank: int) -> dict[str, Any]:
    """Which of [output, gradients of tokens, weights, gate and up, down] are equal, or how far they are apart."""

    def equal(a: list[Tensor], b: list[Tensor]) -> list[bool]:
        return [torch.equal(x, y) for x, y in zip(a, b, strict=True)]

    def quality(a: list[Tensor], b: list[Tensor]) -> list[float]:
        return [sqnr_db(x.float(), y.float()) for x, y in zip(a, b, strict=True)]

    plain, fp8 = layer(rank, "all_to_all", "bf16"), layer(rank, "all_to_all", "fp8")
    sent, deep = (layer(rank, kind, "fp8", fp8=True) for kind in KINDS)
    return {
        "kinds": equal(plain, layer(rank, "deepep", "bf16")),
        "kinds fp8": equal(sent, deep),
        "chunks": equal(plain, layer(rank, "all_to_all", "bf16", chunks=3)),
        "chunks fp8": equal(sent, layer(rank, "deepep", "fp8", fp8=True, chunks=3)),
        "fp8": equal(fp8, sent),
        "against fp8": quality(sent[3:4], fp8[3:4]),
        "against bf16": quality(sent, plain),
    }


def test_experts_get_the_same_bits_however_tokens_travel(ranks: Ranks) -> None:
    for found in ranks.run(2, compare):
        assert all(found["kinds"]) and all(found["kinds fp8"])
        assert all(found["chunks"][:3]) and all(found["chunks fp8"][:3]), "only sums over rows may be rounded otherwise"
        # FP8 codes are those that the experts would have made: only the columns are quantised from what has arrived.
        assert found["fp8"] == [True, True, True, False, True]
        assert found["against fp8"][0] >= 25, found
        assert min(found["against bf16"]) >= 23, found


def recompute(rank: int, kind: str) -> tuple[list[bool], int, int]:
    """Gradients equal to those without recomputation, and exchanges in backward with and without keeping the ops' results."""
    kept = {
        torch.ops._c10d_functional.all_to_all_single.default,
        torch.ops.prl.deepep_dispatch.default,
        torch.ops.prl.deepep_combine.default,
    }

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    send = dispatcher(kind)

    def block(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return send(lambda x, i, w, *_: sums(x.sin(), i, w, rank).sin(), x.sin(), ids, weights).sin()

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    results, exchanges = [], []
    for run in (block, functools.partial(checkpoint, block, use_reentrant=False, context_fn=contexts)):
        x, ids, weights, grad = tokens_of(rank, torch.float32)
        x.requires_grad_()
        weights.requires_grad_()
        out = run(x, ids, weights)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            out.backward(grad)
        exchanges.append(sum(e.count for e in profile.key_averages() if e.key == "c10d::alltoall_base_"))
        results.append([out.detach(), x.grad, weights.grad])
    return [torch.equal(a, b) for a, b in zip(*results, strict=True)], *exchanges


@pytest.mark.parametrize("kind", KINDS)
def test_what_selective_recomputation_keeps_is_not_sent_again(kind: str, ranks: Ranks) -> None:
    for same, plain, again in ranks.run(2, recompute, kind):
        assert all(same) and plain == again > 0


def gathers(rank: int) -> list[tuple[list[str], list[str]]]:
    """Without and with recomputation: units whose gathering starts, and dispatches, in forward and in backward."""
    return [gathers_in(rank, recompute) for recompute in ("none", "full")]


def gathers_in(rank: int, recompute: str) -> tuple[list[str], list[str]]:
    c = helpers.config("bfloat16", ranks=4, mesh={"ep": 2}, recompute=recompute)
    state = helpers.state_of(c, lay_out(resolve(c.trainer, helpers.EXPERTS), rank, torch.device("cpu")))
    events: list[str] = []
    unshard, plans = FSDPParamGroup.unshard, AllToAll.plans

    def started(self: Any, *args: Any) -> None:
        before = self._all_gather_result
        unshard(self, *args)
        if self._all_gather_result is not before:
            events.append(self._module_fqn.removeprefix("model.model.layers."))

    def dispatched(self: Any, *args: Any) -> Any:
        events.append("dispatch")
        return plans(self, *args)

    batch = pack(helpers.rollouts(1, 4), step=1, budget=256, ranks=4)[rank]
    x = inputs(batch.micro_batches[0], torch.device("cpu"), replay=True, replay_selections=False)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(FSDPParamGroup, "unshard", started)
        m.setattr(AllToAll, "plans", dispatched)
        out = state.policy(x.forward, x.rows_M, x.labels_M, x.temperature_M)[0]
        forward = events[:]
        events.clear()
        out.sum().backward()
    return forward, events


def test_weights_are_under_way_before_a_dispatch_waits(ranks: Ranks) -> None:
    """A block starts all that it holds and its neighbour; nothing is gathered twice, also where blocks are computed again."""
    forward = ["", "0", "1", "1.mlp.experts", "2", "dispatch", "2.mlp.experts", "dispatch"]
    backward = ["", "2", "2.mlp.experts", "1", "1.mlp.experts", "0"]
    again = ["", "2", "2.mlp.experts", "1", "dispatch", "1.mlp.experts", "0", "dispatch"]
    for found in ranks.run(4, gathers):
        assert found == [(forward, backward), (forward, again)]


def test_deepep_is_refused_by_name_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = None
    with pytest.raises(
        DispatcherError, match="dispatcher: deepep moves tokens between GPUs, this rank is on cpu: set all_to_all"
    ):
        DeepEP(group, 8, 128, torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    with pytest.raises(DispatcherError, match="needs the module deep_ep, which cannot be imported"):
        DeepEP(group, 8, 128, torch.device("cuda"))
