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


class Bucket:
    def __init__(self, key_positions_BS: Tensor, position_BQ: Tensor):
        self.key_positions_BS = key_positions_BS
        self.mask_BQS = key_positions_BS[:, None] <= position_BQ[..., None]

    def keys(self, rows_G: Tensor) -> Tensor:
        return rows_G[:, : self.key_positions_BS.shape[1]]


class CachedLayout:
    """The next `counts[b]` tokens of each sequence, which come flat in the order of the sequences. One bucket."""

    def __init__(self, cache: Cache, counts: Sequence[int]):
        self.cache = cache
        counts_B = torch.tensor(counts)
        self.sequence_T = torch.arange(len(counts)).repeat_interleave(counts_B)
        self.offset_T = torch.cat([torch.arange(n) for n in counts])
        self.place_T = cache.filled[self.sequence_T] + self.offset_T
        s = int((cache.filled + counts_B).max())
        self.shape = len(counts), max(counts)
        position_BQ = torch.zeros(self.shape, dtype=torch.long)
        position_BQ[self.sequence_T, self.offset_T] = self.place_T
        self.buckets = [Bucket(torch.arange(s).expand(len(counts), s), position_BQ)]
        cache.filled += counts_B

    def split(self, x_T: Tensor) -> list[Tensor]:
        out = x_T.new_zeros(*self.shape, *x_T.shape[1:])
        out[self.sequence_T, self.offset_T] = x_T
        return [out]

    def keys(self, layer: int, name: str, x_T: Tensor) -> Tensor:
        store = self.cache.store(layer, name, x_T)
        store[self.sequence_T, self.place_T] = x_T
        return store

    def merge(self, parts_BQ: Sequence[Tensor]) -> Tensor:
        return parts_BQ[0][self.sequence_T, self.offset_T]
