"""Which keys each query of a flat token row may see: the one place where packing and caching differ.

Legend: T flat tokens of a forward, B sequences, Q queries of a sequence, S keys of a sequence (both padded in a bucket).
Everything but attention works on flat [T, ...] tensors, so padding costs nothing outside it. Attention asks the layout for
buckets of sequences of similar length; in each it gets padded queries [B, Q, ...], the keys they may see [B, S, ...] and the
mask. `PackedLayout` is whole documents (training, scoring). The engine's paged cache is another layout: it writes the new
keys and returns old and new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Bucket(Protocol):
    mask_BQS: Tensor
    """bool [B, Q, S]: causal, within the sequence, and real. A padded query sees its first key, so no row is empty."""
    key_positions_BS: Tensor
    """int64 [B, S]: the position of each key in its sequence."""

    def queries(self, x_T: Tensor) -> Tensor:
        """[T, ...] → [B, Q, ...], zeros where padded."""
        ...

    def keys(self, layer: int, name: str, x_T: Tensor) -> Tensor:
        """Store the new rows under (layer, name) where there is a cache; all rows the queries may see, [B, S, ...]."""
        ...


class Layout(Protocol):
    buckets: Sequence[Bucket]

    def merge(self, parts_BQ: Sequence[Tensor]) -> Tensor:
        """One padded [B, Q, ...] per bucket → [T, ...], the inverse of `queries`."""
        ...


class PackedBucket:
    def __init__(self, index_BQ: Tensor, real_BQ: Tensor):
        self.index_BQ, self.real_BQ = index_BQ, real_BQ
        n = index_BQ.shape[1]
        causal = torch.ones(n, n, dtype=torch.bool, device=index_BQ.device).tril()
        self.mask_BQS = (causal & real_BQ[:, None, :]) | (~real_BQ[:, :, None] & (torch.arange(n, device=index_BQ.device) == 0))
        self.key_positions_BS = torch.arange(n, device=index_BQ.device).expand(index_BQ.shape)

    def queries(self, x_T: Tensor) -> Tensor:
        out = x_T.index_select(0, self.index_BQ.flatten()).unflatten(0, self.index_BQ.shape)
        return out * self.real_BQ.view(*self.real_BQ.shape, *[1] * (x_T.dim() - 1)).to(out.dtype)

    def keys(self, layer: int, name: str, x_T: Tensor) -> Tensor:
        return self.queries(x_T)


class PackedLayout:
    """Documents end to end, each attending to itself alone. `lengths` int [D] on the CPU; documents in buckets by length."""

    def __init__(self, lengths: Tensor | Sequence[int], device: torch.device | str = "cpu", *, waste: float = 1.5):
        ns = [int(n) for n in lengths]
        starts = torch.tensor([0, *ns]).cumsum(0)[:-1].tolist()
        groups: list[list[int]] = []
        for d in sorted((d for d in range(len(ns)) if ns[d]), key=lambda d: ns[d]):
            # A document joins the bucket while padding to it costs at most `waste` times the shortest member.
            if groups and ns[d] <= max(16, waste * ns[groups[-1][0]]):
                groups[-1].append(d)
            else:
                groups.append([d])
        self.buckets = []
        order = []
        for docs in groups:
            width = max(ns[d] for d in docs)
            ar = torch.arange(width)
            real = torch.stack([ar < ns[d] for d in docs])
            index = torch.stack([starts[d] + ar.clamp(max=ns[d] - 1) for d in docs])
            order.append(index[real])
            self.buckets.append(PackedBucket(index.to(device), real.to(device)))
        flat = torch.cat(order) if order else torch.zeros(0, dtype=torch.long)
        self._inverse_T = torch.empty_like(flat).scatter_(0, flat, torch.arange(len(flat))).to(device)

    def merge(self, parts_BQ: Sequence[Tensor]) -> Tensor:
        return torch.cat([p[b.real_BQ] for p, b in zip(parts_BQ, self.buckets, strict=True)]).index_select(0, self._inverse_T)
