"""The simplest layout with a cache: every token attends to what its sequence has stored before, Q ≠ S."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Cache:
    """Rows of all sequences by (layer, name), [B, room, ...]; padded with large finite values, which must not matter."""

    def __init__(self, n: int, room: int = 128):
        self.n, self.room = n, room
        self.rows: dict[tuple[int, str], Tensor] = {}
        self.filled = torch.zeros(n, dtype=torch.long)

    def store(self, layer: int, name: str, like: Tensor) -> Tensor:
        if (layer, name) not in self.rows:
            self.rows[layer, name] = torch.full((self.n, self.room, *like.shape[1:]), 1e4, dtype=like.dtype)
        return self.rows[layer, name]


class CachedLayout:
    """The next `counts[b]` tokens of each sequence, which come flat in the order of the sequences. One bucket."""

    def __init__(self, cache: Cache, counts: Sequence[int]):
        self.cache, self.buckets = cache, [self]
        counts_B = torch.tensor(counts)
        self.sequence_T = torch.arange(len(counts)).repeat_interleave(counts_B)
        self.offset_T = torch.cat([torch.arange(n) for n in counts])
        self.place_T = cache.filled[self.sequence_T] + self.offset_T
        s = int((cache.filled + counts_B).max())
        self.key_positions_BS = torch.arange(s).expand(len(counts), s)
        position_BQ = torch.zeros(len(counts), max(counts), dtype=torch.long)
        position_BQ[self.sequence_T, self.offset_T] = self.place_T
        self.mask_BQS = self.key_positions_BS[:, None] <= position_BQ[..., None]
        self.s = s
        cache.filled += counts_B

    def queries(self, x_T: Tensor) -> Tensor:
        out = x_T.new_zeros(self.mask_BQS.shape[0], self.mask_BQS.shape[1], *x_T.shape[1:])
        out[self.sequence_T, self.offset_T] = x_T
        return out

    def keys(self, layer: int, name: str, x_T: Tensor) -> Tensor:
        store = self.cache.store(layer, name, x_T)
        store[self.sequence_T, self.place_T] = x_T
        return store[:, : self.s]

    def merge(self, parts_BQ: Sequence[Tensor]) -> Tensor:
        return parts_BQ[0][self.sequence_T, self.offset_T]
