"""Context parallelism: who holds which tokens, which keys they see, and that attention over shared rows is plain attention."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from prl.distributed.context import Shard, gather, gather_some, to_heads, to_tokens, zigzag
from prl.layers import context, layout
from prl.layers.attention import attend
from prl.layers.layout import PackedLayout, Span
from tests.distributed.ranks import Ranks

ROWS = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@dataclass
class Group:
    """What a shard asks of a process group."""

    place: int
    ranks: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.place


def padded(lengths: list[int], multiple: int) -> list[int]:
    return lengths + [1] * (-sum(lengths) % multiple)


@given(st.integers(1, 8), st.integers(1, 9))
def test_the_split_holds_every_token_once_and_levels_causal_work(ranks: int, chunk: int) -> None:
    n = 2 * ranks * chunk
    places_RL = zigzag(n, ranks)
    assert sorted(places_RL.flatten().tolist()) == list(range(n))
    assert (places_RL.diff() > 0).all()
    assert len(set((places_RL + 1).sum(1).tolist())) == 1, "each rank has equally many query-key pairs of one document"


@given(ROWS, st.sampled_from([1, 2, 3, 4]), st.sampled_from([12, 200, 1 << 22]))
@settings(max_examples=60, deadline=None)
def test_each_query_of_a_shard_sees_its_documents_keys_up_to_itself(lengths: list[int], ranks: int, bound: int) -> None:
    """Also where a boundary of documents lies inside a shard, and where documents are cut into pieces."""
    lengths = padded(lengths, 2 * ranks)
    token_T = torch.arange(sum(lengths))
    start_T = torch.repeat_interleave(torch.tensor(lengths).cumsum(0) - torch.tensor(lengths), torch.tensor(lengths))
    for place in range(ranks):
        shard = Shard(Group(place, ranks), sum(lengths))  # type: ignore[arg-type]
        with mock.patch.object(layout, "BOUND", bound):
            packed = PackedLayout(lengths, shard=shard)
        queries = packed.split(shard.here_L)
        assert torch.equal(packed.merge(queries), shard.here_L)
        for bucket, token_BQ in zip(packed.buckets, queries, strict=True):
            mask_BQS, key_BS = bucket.mask_BQS, bucket.keys(token_T)
            assert mask_BQS.shape == (*token_BQ.shape, key_BS.shape[1]) and mask_BQS.any(-1).all()
            assert mask_BQS.numel() <= bound or mask_BQS.shape[:2] == (1, 1)
            real = torch.zeros(token_BQ.shape, dtype=torch.bool).flatten().index_fill(0, bucket.slots_N, True)
            for b, q in real.view(token_BQ.shape).nonzero().tolist():
                token = int(token_BQ[b, q])
                assert key_BS[b][mask_BQS[b, q]].tolist() == list(range(int(start_T[token]), token + 1))
                assert bucket.key_positions_BS[b, int(mask_BQS[b, q].sum()) - 1] == token - start_T[token]


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 5000))
@settings(max_examples=200, deadline=None)
def test_a_span_is_cut_into_few_pieces_within_the_bound(n: int, before: int, bound: int) -> None:
    span = Span(7, n, 11, before + n)
    pieces = list(span.pieces(bound))
    assert [q for p in pieces for q in range(p.query, p.query + p.n_queries)] == list(range(7, 7 + n))
    for p in pieces:
        assert p.key == 11 and p.n_keys - before == p.query - 7 + p.n_queries
        assert p.n_queries * p.n_keys <= bound or p.n_queries == 1
    for p in pieces[:-1]:
        assert (p.n_queries + 1) * (p.n_keys + 1) > bound


def shared(rank: int) -> None:
    """Values and gradients of what travels between the ranks, against one process that has it all."""
    group = dist.group.WORLD
    assert group is not None
    ranks, n = group.size(), 4 * group.size()
    shard = Shard(group, n)
    g = torch.Generator().manual_seed(0)
    x_THC = torch.randn(n, 2 * ranks, 3, dtype=torch.float64, generator=g)
    slope_RT = torch.randn(ranks, n, 2 * ranks, 3, dtype=torch.float64, generator=g)
    here, mine = shard.here_L, slice(2 * rank, 2 * rank + 2)
    x_LHC = x_THC[here].requires_grad_()

    out = gather(x_LHC, shard)
    assert torch.equal(out, x_THC)
    (grad,) = torch.autograd.grad(out, x_LHC, slope_RT[rank])
    expected = slope_RT[0]
    for slope in slope_RT[1:]:
        expected = expected + slope
    assert torch.equal(grad, expected[here]), "each rank's gradients, added in the order of places"
    half = x_LHC.detach().bfloat16().requires_grad_()
    (grad,) = torch.autograd.grad(gather(half, shard), half, slope_RT[rank].bfloat16())
    assert torch.equal(grad, slope_RT.bfloat16().float().sum(0)[here].bfloat16()), "added in float32"

    heads = to_heads(x_LHC, shard)
    assert torch.equal(heads, x_THC[:, mine])
    (grad,) = torch.autograd.grad(heads, x_LHC, slope_RT[0][:, mine])
    assert torch.equal(grad, slope_RT[0][here])
    some = x_THC[:, mine].clone().requires_grad_()
    tokens = to_tokens(some, shard)
    assert torch.equal(tokens, x_LHC)
    (grad,) = torch.autograd.grad(tokens, some, slope_RT[0][here])
    assert torch.equal(grad, slope_RT[0][:, mine])

    counts = [(2 * r + 1) % 4 for r in range(ranks)]  # 1, 3, 1, 3
    order = torch.randperm(sum(counts), generator=g)
    rows = torch.full((4, 2), float(rank)).requires_grad_()
    out = gather_some(rows, counts, order, group)
    assert out[:, 0].tolist() == torch.arange(ranks).repeat_interleave(torch.tensor(counts))[order].tolist()
    slopes = torch.arange(2.0 * sum(counts)).view(-1, 2)
    (grad,) = torch.autograd.grad(out, rows, slopes)
    inverse, first = order.argsort(), sum(counts[:rank])
    assert torch.equal(grad[: counts[rank]], slopes[inverse[first : first + counts[rank]]]), "its own part, added to nothing"
    assert not grad[counts[rank] :].any()


def test_what_travels_between_ranks_and_back(ranks: Ranks) -> None:
    ranks.run(4, shared)


def attention(rank: int, core: str, heads: int, key_heads: int, lengths: list[int], dtype: torch.dtype) -> list[np.ndarray]:
    """Errors of output and gradients, as parts of their maximum, against plain attention over the whole row in float64."""
    group = dist.group.WORLD
    assert group is not None
    lengths = padded(lengths, 2 * group.size())
    shard = Shard(group, sum(lengths))
    g = torch.Generator().manual_seed(1)
    whole = [torch.randn(sum(lengths), h, 8, dtype=torch.float64, generator=g).to(dtype) for h in (heads, key_heads, key_heads)]
    slope = torch.randn(sum(lengths), heads, 8, dtype=torch.float64, generator=g).to(dtype)
    exact = [x.double().requires_grad_() for x in whole]
    expected_T = attend(0, *exact, PackedLayout(lengths))
    expected = [expected_T, *torch.autograd.grad(expected_T, exact, slope.double())]
    parts = [x[shard.here_L].requires_grad_() for x in whole]
    function = {"ulysses": context.ulysses, "ring": context.ring, "plain": attend}[core]
    with mock.patch.object(context, "TILE", 5), mock.patch.object(layout, "BOUND", 200):
        out = function(0, *parts, PackedLayout(lengths, shard=shard))
    with mock.patch.object(context, "TILE", 5):
        got = [out, *torch.autograd.grad(out, parts, slope[shard.here_L])]
    assert all(x.dtype == dtype for x in got)
    return [
        ((x.double() - e[shard.here_L]).abs().max() / e.abs().max()).detach().numpy()
        for x, e in zip(got, expected, strict=True)
    ]


def errors(rank: int, cases: list[tuple[str, int, int, list[int], torch.dtype]]) -> list[list[float]]:
    return [[float(e) for e in attention(rank, *case)] for case in cases]


BOUNDS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1.2e-2}
ROW = [9, 1, 30, 2, 17]


@pytest.mark.parametrize("world", [2, 4])
def test_attention_over_a_shared_row_is_plain_attention(world: int, ranks: Ranks) -> None:
    cases = [
        ("ulysses", 4, 2, ROW, torch.float64),  # on four ranks each key head is on two
        ("ulysses", 8, 4, [3], torch.float64),  # fewer tokens than ranks
        ("ring", 3, 3, ROW, torch.float64),
        ("ring", 3, 1, [64], torch.float64),
        ("ring", 4, 2, [3], torch.float64),
        ("plain", 3, 1, ROW, torch.float64),
        ("ulysses", 4, 2, ROW, torch.float32),
        ("ring", 6, 2, ROW, torch.float32),
        ("ring", 6, 2, ROW, torch.bfloat16),
    ]
    for found in ranks.run(world, errors, cases):
        for case, error in zip(cases, found, strict=True):
            assert max(error) < BOUNDS[case[-1]], (case, error)


def test_what_is_chosen() -> None:
    assert context.core(4, 96, 8) is context.ulysses
    assert context.core(8, 32, 2) is context.ulysses, "key heads are copied"
    assert context.core(2, 3, 1) is context.ring
    assert context.core(4, 12, 6) is context.ring, "a rank's heads would share key heads unevenly"
