"""Which keys each query of a flat token row may see: the one place where packing and caching differ.

Legend: T flat tokens of a forward, B sequences, Q queries of a sequence, S keys of a sequence (both padded in a bucket).
Everything but attention works on flat [T, ...] tensors, so padding costs nothing outside it. Attention asks the layout for
buckets of sequences of similar length; in each it gets padded queries [B, Q, ...], the keys they may see [B, S, ...] and the
mask. `PackedLayout` is whole documents (training, scoring). The engine's paged cache is another layout: it writes the new
keys and returns old and new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Bucket(Protocol):
    mask_BQS: Tensor
    """bool [B, Q, S]: causal, within the sequence, and real. A padded query sees its first key, so no row is empty."""
    key_positions_BS: Tensor
    """int64 [B, S]: the position of each key in its sequence, ascending over real keys."""

    def queries(self, x_T: Tensor) -> Tensor:
        """[T, ...] → [B, Q, ...], any finite values where padded."""
        ...

    def keys(self, layer: int, name: str, x_T: Tensor) -> Tensor:
        """Store the new rows under (layer, name) where there is a cache; all rows the queries may see, [B, S, ...], any
        finite values where padded."""
        ...


class Layout(Protocol):
    @property
    def buckets(self) -> Sequence[Bucket]: ...

    def merge(self, parts_BQ: Sequence[Tensor]) -> Tensor:
        """One padded [B, Q, ...] per bucket → [T, ...], the inverse of `queries`."""
        ...


class PackedBucket:
    """Whole documents padded to the longest. A padded place repeats the document's last token.

    `slots_N` are the places b·Q + q of the real tokens in the flattened bucket, `tokens_N` the flat tokens they hold.
    """

    def __init__(self, starts: Tensor, lengths: Tensor, device: torch.device | str):
        width = int(lengths.max())
        place_Q = torch.arange(width)
        real_BQ = place_Q < lengths[:, None]
        index_BQ = starts[:, None] + torch.minimum(place_Q, lengths[:, None] - 1)
        self.shape = tuple(real_BQ.shape)
        self.slots_N = real_BQ.flatten().nonzero()[:, 0].to(device)
        self.padded_N = (~real_BQ).flatten().nonzero()[:, 0].to(device)
        self.index_P = index_BQ.flatten().to(device)
        self.tokens_N = self.index_P[self.slots_N]
        self.key_positions_BS = place_Q.to(device).expand(self.shape)
        causal_QS = place_Q[:, None] >= place_Q
        mask_BQS = (causal_QS & real_BQ[:, None, :]) | (~real_BQ[:, :, None] & (place_Q == 0))
        self.mask_BQS = mask_BQS.to(device)

    def queries(self, x_T: Tensor) -> Tensor:
        return _Pad.apply(x_T, self)

    def keys(self, layer: int, name: str, x_T: Tensor) -> Tensor:
        return _Pad.apply(x_T, self)


class _Pad(torch.autograd.Function):
    """Flat rows into a bucket. Backward is a copy, since padded places get no gradient and real ones are distinct."""

    @staticmethod
    def forward(ctx: Any, x_T: Tensor, bucket: PackedBucket) -> Tensor:
        ctx.bucket, ctx.n = bucket, len(x_T)
        return x_T.index_select(0, bucket.index_P).unflatten(0, bucket.shape)

    @staticmethod
    def backward(ctx: Any, grad_BQ: Tensor) -> tuple[Tensor, None]:
        bucket: PackedBucket = ctx.bucket
        grad_N = grad_BQ.flatten(0, 1).index_select(0, bucket.slots_N)
        return grad_N.new_zeros(ctx.n, *grad_N.shape[1:]).index_copy_(0, bucket.tokens_N, grad_N), None


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
    """Documents end to end, each attending to itself alone. `lengths` int [D] on the CPU; documents in buckets by length."""

    def __init__(self, lengths: Tensor | Sequence[int], device: torch.device | str = "cpu", *, waste: float = 1.5):
        lengths_D = torch.as_tensor(lengths, dtype=torch.long)
        starts_D = lengths_D.cumsum(0) - lengths_D
        order = lengths_D.argsort(stable=True)
        order = order[lengths_D[order] > 0]
        # A document joins the bucket while padding to it costs at most `waste` times the shortest member.
        bounds = [0]
        sizes = lengths_D[order].tolist()
        for i, n in enumerate(sizes):
            if n > max(16, waste * sizes[bounds[-1]]):
                bounds.append(i)
        groups = order.tensor_split(bounds[1:]) if sizes else ()
        self.buckets = [PackedBucket(starts_D[docs], lengths_D[docs], device) for docs in groups]
        self.slots_T = torch.empty(int(lengths_D.sum()), dtype=torch.long, device=device)
        first = 0
        for bucket in self.buckets:
            self.slots_T[bucket.tokens_N] = bucket.slots_N + first
            first += len(bucket.index_P)

    def merge(self, parts_BQ: Sequence[Tensor]) -> Tensor:
        return _Merge.apply(self, *parts_BQ)
