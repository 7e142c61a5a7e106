"""Which keys each query of a flat token row may see: the one place where packing, caching and context parallelism differ.

Legend: T flat tokens of a forward, B sequences, Q queries of a sequence, S keys of a sequence (both padded in a bucket),
G the rows that keys are chosen from.
Everything but attention works on flat [T, ...] tensors, so padding costs nothing outside it. Attention asks the layout for
buckets of sequences of similar length; in each it gets padded queries [B, Q, ...], the keys they may see [B, S, ...] and the
mask. `PackedLayout` is whole documents (training, scoring), or this rank's part of them. The engine's paged cache is another
layout: it writes the new keys and returns old and new ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from math import isqrt
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from prl.distributed.context import Shard, gather, runs

BOUND = 1 << 22
"""Most query-key pairs B·Q·S of a bucket, and so of its mask and its index scores; a longer document is cut into queries."""


class Bucket(Protocol):
    @property
    def mask_BQS(self) -> Tensor:
        """bool [B, Q, S]: causal, within the sequence, and real. A padded query sees its first key, so no row is empty."""
        ...

    @property
    def key_positions_BS(self) -> Tensor:
        """int64 [B, S]: the position of each key in its sequence, ascending over real keys."""
        ...

    def keys(self, rows_G: Tensor) -> Tensor:
        """Of `Layout.keys` those that the queries may see: [B, S, ...], any finite values where padded."""
        ...


class Layout(Protocol):
    @property
    def buckets(self) -> Sequence[Bucket]: ...

    def split(self, x_T: Tensor) -> Sequence[Tensor]:
        """[T, ...] → the queries of each bucket, [B, Q, ...], any finite values where padded."""
        ...

    def keys(self, layer: int, name: str, x_T: Tensor) -> Tensor:
        """Every row that a query may see, [G, ...], given the new ones; stored under (layer, name) where there is a cache."""
        ...

    def merge(self, parts_BQ: Sequence[Tensor]) -> Tensor:
        """One padded [B, Q, ...] per bucket → [T, ...], the inverse of `split`."""
        ...


class Span(NamedTuple):
    """Queries that lie together, and the keys that the last of them sees."""

    query: int
    """The first, among this rank's tokens."""
    n_queries: int
    key: int
    """The first, among all tokens."""
    n_keys: int

    @property
    def whole(self) -> bool:
        return self.n_queries == self.n_keys

    def pieces(self, bound: int) -> Iterator[Span]:
        """Cut, in the order of queries, so that each has at most `bound` query-key pairs, or one query."""
        before = self.n_keys - self.n_queries
        done = 0
        while done < self.n_queries:
            start = before + done
            n = min(max((isqrt(start * start + 4 * bound) - start) // 2, 1), self.n_queries - done)  # n (start + n) <= bound
            yield Span(self.query + done, n, self.key, start + n)
            done += n


class PackedBucket:
    """Spans padded to the longest. A padded place repeats the span's last token. Several spans are whole documents.

    `slots_N` are the places b·Q + q of the real queries in the flattened bucket, `tokens_N` the flat tokens they hold.
    """

    def __init__(self, spans: Sequence[Span], device: torch.device | str):
        queries_B, n_queries_B, keys_B, n_keys_B = torch.tensor(spans).T
        place_Q = torch.arange(int(n_queries_B.max()))
        real_BQ = place_Q < n_queries_B[:, None]
        within_BQ = torch.minimum(place_Q, n_queries_B[:, None] - 1)
        self.shape = tuple(real_BQ.shape)
        self.slots_N = real_BQ.flatten().nonzero()[:, 0].to(device)
        self.padded_N = (~real_BQ).flatten().nonzero()[:, 0].to(device)
        self.index_P = (queries_B[:, None] + within_BQ).flatten().to(device)
        self.tokens_N = self.index_P[self.slots_N]
        self.seen_BQ = torch.where(real_BQ, (n_keys_B - n_queries_B)[:, None] + place_Q + 1, 1).to(device)
        """How many of the keys each query sees."""
        self.key_positions_BS = torch.arange(int(n_keys_B.max()), device=device).expand(len(spans), -1)
        self.single = spans[0] if len(spans) == 1 else None
        if self.single is None:  # the keys of whole documents are as many as their queries, and padded alike
            self.keys_P = (keys_B[:, None] + within_BQ).flatten().to(device)
            self.keys_N = self.keys_P[self.slots_N]

    @property
    def mask_BQS(self) -> Tensor:
        """Made anew each time: those of all buckets of a long document would be large."""
        return self.key_positions_BS[0] < self.seen_BQ[..., None]

    def keys(self, rows_G: Tensor) -> Tensor:
        if self.single is not None:
            return rows_G.narrow(0, self.single.key, self.single.n_keys)[None]
        return _Keys.apply(rows_G, self)


class _Keys(torch.autograd.Function):
    """Backward is a copy, since padded places get no gradient and the documents of a bucket are distinct."""

    @staticmethod
    def forward(ctx: Any, rows_G: Tensor, bucket: PackedBucket) -> Tensor:
        ctx.bucket, ctx.n = bucket, len(rows_G)
        return rows_G.index_select(0, bucket.keys_P).unflatten(0, bucket.shape)

    @staticmethod
    def backward(ctx: Any, grad_BS: Tensor) -> tuple[Tensor, None]:
        bucket: PackedBucket = ctx.bucket
        grad_N = grad_BS.flatten(0, 1).index_select(0, bucket.slots_N)
        return grad_N.new_zeros(ctx.n, *grad_N.shape[1:]).index_copy_(0, bucket.keys_N, grad_N), None


class _Split(torch.autograd.Function):
    """Backward is a merge, since padded places get no gradient."""

    @staticmethod
    def forward(ctx: Any, x_T: Tensor, layout: PackedLayout) -> tuple[Tensor, ...]:
        ctx.layout = layout
        return tuple(x_T.index_select(0, b.index_P).unflatten(0, b.shape) for b in layout.buckets)

    @staticmethod
    def backward(ctx: Any, *grads_BQ: Tensor) -> tuple[Tensor, None]:
        return torch.cat([g.flatten(0, 1) for g in grads_BQ]).index_select(0, ctx.layout.slots_T), None


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: PackedLayout, *parts_BQ: Tensor) -> Tensor:
        ctx.layout = layout
        return torch.cat([p.flatten(0, 1) for p in parts_BQ]).index_select(0, layout.slots_T)

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        out: list[Tensor | None] = [None]
        for bucket in ctx.layout.buckets:
            grad_P = grad_T.index_select(0, bucket.index_P).index_fill_(0, bucket.padded_N, 0)
            out.append(grad_P.unflatten(0, bucket.shape))
        return tuple(out)


class PackedLayout:
    """Documents end to end, each attending to itself alone. `lengths` int [D] on the CPU.

    With `shard` the flat tokens are this rank's of them, and keys come from all ranks. Whole documents are in buckets by
    length; of one that is cut, by the shard or by `BOUND`, each piece is a bucket.
    """

    def __init__(
        self,
        lengths: Tensor | Sequence[int],
        device: torch.device | str = "cpu",
        *,
        shard: Shard | None = None,
        waste: float = 1.5,
    ):
        self.lengths, self.device, self.shard = torch.as_tensor(lengths, dtype=torch.long), device, shard
        whole: list[Span] = []
        pieces: list[Span] = []
        for span in self.spans():
            if span.whole and span.n_keys**2 <= BOUND:
                whole.append(span)
            else:
                pieces.extend(span.pieces(BOUND))
        # A document joins the bucket while padding to it costs at most `waste` times the shortest member.
        groups: list[list[Span]] = []
        for span in sorted(whole, key=lambda s: s.n_keys):
            n = span.n_keys
            if not groups or n > max(16, waste * groups[-1][0].n_keys) or (len(groups[-1]) + 1) * n * n > BOUND:
                groups.append([])
            groups[-1].append(span)
        self.buckets = [PackedBucket(spans, device) for spans in (*groups, *([p] for p in pieces))]
        self.slots_T = torch.empty(sum(len(b.tokens_N) for b in self.buckets), dtype=torch.long, device=device)
        first = 0
        for bucket in self.buckets:
            self.slots_T[bucket.tokens_N] = bucket.slots_N + first
            first += len(bucket.index_P)

    def spans(self) -> Iterator[Span]:
        """What this rank has of each document, in the order of its tokens; twice where it has a beginning and an end."""
        ends = self.lengths.cumsum(0).tolist()
        query = 0
        for low, high in [(0, sum(self.lengths.tolist()))] if self.shard is None else runs(self.shard.here_L):
            for end, n in zip(ends, self.lengths.tolist(), strict=True):
                start = end - n
                if (first := max(start, low)) < (last := min(end, high)):
                    yield Span(query + first - low, last - first, start, last - start)
            query += high - low

    @cached_property
    def row(self) -> PackedLayout:
        """Of the whole row."""
        return self if self.shard is None else PackedLayout(self.lengths, self.device)

    def split(self, x_T: Tensor) -> Sequence[Tensor]:
        return _Split.apply(x_T, self)

    def keys(self, layer: int, name: str, x_T: Tensor) -> Tensor:
        return x_T if self.shard is None else gather(x_T, self.shard)

    def merge(self, parts_BQ: Sequence[Tensor]) -> Tensor:
        return _Merge.apply(self, *parts_BQ)
