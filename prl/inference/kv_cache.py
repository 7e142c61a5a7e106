"""The paged KV cache: blocks with reference counts, reuse of whole prefixes by hash, and the layout that attention reads it by.

Legend: T flat rows of a forward, B sequences of a bucket, Q queries of a sequence, S keys of a sequence, N blocks of a
sequence. A slot is the place of one token: block × block_size + place in the block. Block 0 is never given out: it holds
zeros for padded keys, so what one request computes can never reach another through padding.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
import xxhash
from torch import Tensor


class BlockPool:
    """Who holds which block. Invariant: a block is either free (reference count 0, in `_free`) or held by someone.

    A free block keeps its content and its hash until it is given out again, the longest-free first, as in vLLM.
    """

    def __init__(self, n_blocks: int):
        self.n_blocks = n_blocks
        self._free: OrderedDict[int, None] = OrderedDict((b, None) for b in range(1, n_blocks + 1))
        self._references = [0] * (n_blocks + 1)
        self._by_hash: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix; nothing is held yet."""
        found = []
        for h in hashes:
            if (block := self._by_hash.get(h)) is None:
                break
            found.append(block)
        return found

    def take(self, shared: Sequence[int], fresh: int) -> list[int] | None:
        """Hold `shared` and `fresh` new blocks: all of them, or None where they do not fit."""
        if sum(self._references[b] == 0 for b in shared) + fresh > len(self._free):
            return None
        for block in shared:
            self._references[block] += 1
            self._free.pop(block, None)
        new = [self._free.popitem(last=False)[0] for _ in range(fresh)]
        for block in new:
            self._references[block] = 1
            if (h := self._hash_of.pop(block, None)) is not None:
                del self._by_hash[h]
        return [*shared, *new]

    def register(self, block: int, block_hash: bytes) -> None:
        """Let later requests find a held block whose rows are all computed, or are within this very forward."""
        if block_hash not in self._by_hash and block not in self._hash_of:
            self._by_hash[block_hash] = block
            self._hash_of[block] = block_hash

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of a sequence's blocks. Its tail becomes free first: a prefix is of use to more requests."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None

    def forget(self) -> None:
        """Drop every hash: no later request reads what is there now."""
        self._by_hash.clear()
        self._hash_of.clear()


def block_hashes(salt: str, tokens: np.ndarray, block_size: int, known: Sequence[bytes] = ()) -> list[bytes]:
    """One hash per whole block of `tokens`, each over the salt and all tokens up to the block's end; `known` come first."""
    hashes = list(known)
    parent = hashes[-1] if hashes else xxhash.xxh3_128_digest(salt.encode())
    raw = np.ascontiguousarray(tokens, np.int32)
    for i in range(len(hashes), len(raw) // block_size):
        parent = xxhash.xxh3_128_digest(parent + raw[i * block_size : (i + 1) * block_size].tobytes())
        hashes.append(parent)
    return hashes


class PagedCache:
    """The tensors: one store [slots, *width] per (layer, name), of the type that the model hands in."""

    def __init__(self, spec: Sequence[tuple[int, str, tuple[int, ...]]], n_blocks: int, block_size: int):
        self.widths = {(layer, name): width for layer, name, width in spec}
        self.slots = (n_blocks + 1) * block_size
        self._stores: dict[tuple[int, str], Tensor] = {}

    def write(self, layer: int, name: str, slots_T: Tensor, x_T: Tensor) -> Tensor:
        """Put the rows into their slots and return the store."""
        store = self._stores.get((layer, name))
        if store is None:
            width = self.widths.get((layer, name))
            if width is None or tuple(x_T.shape[1:]) != tuple(width):
                raise ValueError(f"KV cache: ({layer}, {name!r}) has rows {tuple(x_T.shape[1:])}, cache_spec() says {width}")
            store = self._stores[layer, name] = torch.zeros(self.slots, *width, dtype=x_T.dtype, device=x_T.device)
        return store.index_copy_(0, slots_T, x_T)


WASTE, SMALL = 2.0, 4096


def plan_buckets(queries_B: np.ndarray, keys_B: np.ndarray) -> list[np.ndarray]:
    """Group sequences of similar size: indices per bucket. Deterministic.

    In order of (queries, keys), a sequence joins the bucket while the padded query-key pairs stay below `WASTE` times the
    real ones, or below `SMALL`, where one more bucket costs more than the padding.
    """
    order = np.lexsort((keys_B, queries_B))
    pairs = queries_B * keys_B
    if pairs.size and len(order) * queries_B.max() * keys_B.max() <= max(SMALL, WASTE * pairs.sum()):
        return [order]
    buckets: list[list[int]] = []
    q = s = useful = 0
    for i in order.tolist():
        q_new, s_new = max(q, int(queries_B[i])), max(s, int(keys_B[i]))
        useful += int(pairs[i])
        if not buckets or (len(buckets[-1]) + 1) * q_new * s_new > max(SMALL, WASTE * useful):
            buckets.append([])
            q_new, s_new, useful = int(queries_B[i]), int(keys_B[i]), int(pairs[i])
        buckets[-1].append(i)
        q, s = q_new, s_new
    return [np.array(b) for b in buckets]


class CachedBucket:
    """Rows `first` to `last` of the forward: B sequences of up to Q new tokens each, over the keys in the cache."""

    def __init__(self, layout: CachedLayout, first: int, starts_B: np.ndarray, counts_B: np.ndarray, table_BN: np.ndarray):
        device, size = layout.device, layout.block_size
        keys_B = starts_B + counts_B
        n, q, s = len(starts_B), int(counts_B.max()), int(keys_B.max())
        self._rows, self._shape = slice(first, first + int(counts_B.sum())), (n, q)
        places = np.arange(s)
        slots_BS = (table_BN[:, : -(-s // size), None] * size + np.arange(size)).reshape(n, -1)[:, :s]
        slots_BS = np.where(places < keys_B[:, None], slots_BS, 0)
        self._slots = torch.from_numpy(slots_BS.reshape(-1)).to(device)
        steps = np.arange(q)
        real_BQ = steps < counts_B[:, None]
        mask_BQS = places <= np.where(real_BQ, starts_B[:, None] + steps, 0)[:, :, None]
        self.mask_BQS = torch.from_numpy(mask_BQS).to(device)
        self.key_positions_BS = torch.from_numpy(places).to(device).expand(n, s)
        # Where every sequence has the same number of queries there is nothing to pad: split and merge are views.
        self._real = None if real_BQ.all() else torch.from_numpy(np.flatnonzero(real_BQ)).to(device)

    def queries(self, x_T: Tensor) -> Tensor:
        x = x_T[self._rows]
        if self._real is not None:
            n, q = self._shape
            x = x.new_zeros(n * q, *x.shape[1:]).index_copy_(0, self._real, x)
        return x.unflatten(0, self._shape)

    def keys(self, rows_G: Tensor) -> Tensor:
        return rows_G.index_select(0, self._slots).unflatten(0, (self._shape[0], -1))

    def rows(self, part_BQ: Tensor) -> Tensor:
        x = part_BQ.flatten(0, 1)
        return x if self._real is None else x.index_select(0, self._real)


class CachedLayout:
    """The `Layout` of one engine step. `order` is the order in which the sequences' rows lie in the forward.

    starts_B rows are in the cache already, counts_B new ones follow; table_BN are the blocks of each sequence.
    """

    def __init__(
        self,
        cache: PagedCache,
        block_size: int,
        starts_B: np.ndarray,
        counts_B: np.ndarray,
        table_BN: np.ndarray,
        device: torch.device | str = "cpu",
    ):
        self.block_size, self.device = block_size, device
        plan = plan_buckets(counts_B, starts_B + counts_B)
        self.order = np.concatenate(plan)
        counts = counts_B[self.order]
        sequence_T = np.repeat(self.order, counts)
        offsets_T = np.arange(len(sequence_T)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.sequence_T, self.positions_T = sequence_T, starts_B[sequence_T] + offsets_T
        self.slots_T = table_BN[sequence_T, self.positions_T // block_size] * block_size + self.positions_T % block_size
        self._cache, self._slots = cache, torch.from_numpy(self.slots_T).to(device)
        self.buckets = []
        first = 0
        for members in plan:
            self.buckets.append(CachedBucket(self, first, starts_B[members], counts_B[members], table_BN[members]))
            first += int(counts_B[members].sum())

    def split(self, x_T: Tensor) -> Sequence[Tensor]:
        return [b.queries(x_T) for b in self.buckets]

    def keys(self, layer: int, name: str, x_T: Tensor) -> Tensor:
        """The store with this forward's rows in it: all are written before the first bucket reads, since a sequence may share
        blocks that another bucket fills in this forward."""
        return self._cache.write(layer, name, self._slots, x_T)

    def merge(self, parts_BQ: Sequence[Tensor]) -> Tensor:
        rows = [b.rows(p) for b, p in zip(self.buckets, parts_BQ, strict=True)]
        return rows[0] if len(rows) == 1 else torch.cat(rows)
