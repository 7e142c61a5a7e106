"""Blocks, hashes and the cached layout."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prl.inference.kv_cache import SMALL, WASTE, BlockPool, CachedLayout, PagedCache, block_hashes, plan_buckets

ACTIONS = st.tuples(st.sampled_from(["take", "take", "release", "register"]), st.integers(0, 2), st.integers(1, 3))


@settings(max_examples=300, deadline=None)
@given(st.lists(ACTIONS, min_size=8, max_size=40))
def test_a_block_is_free_or_held_and_never_given_twice(actions: list[tuple[str, int, int]]) -> None:
    pool = BlockPool(4)
    held: list[list[int]] = []
    content: dict[int, bytes] = {}
    for kind, which, n in actions:
        if kind == "take":
            hashes = [bytes([which, i]) for i in range(n)]
            shared = pool.match(hashes)
            assert [content[b] for b in shared] == hashes[: len(shared)], "a hash led to a block with other content"
            before = pool.free
            blocks = pool.take(shared, n - len(shared))
            if blocks is None:
                assert pool.free == before
                continue
            assert 0 not in blocks and len(set(blocks)) == n
            fresh = blocks[len(shared) :]
            assert not {b for h in held for b in h} & set(fresh), "a held block was given out"
            content.update({b: hashes[len(shared) + i] for i, b in enumerate(fresh)})
            held.append(blocks)
        elif held and kind == "release":
            pool.release(held.pop(which % len(held)))
        elif held:
            for b in held[which % len(held)]:
                pool.register(b, content[b])
        assert pool.free == 4 - len({b for h in held for b in h})


def test_the_longest_free_block_goes_first_and_a_prefix_outlives_its_tail() -> None:
    pool = BlockPool(3)
    blocks = pool.take([], 3)
    assert blocks is not None
    for i, b in enumerate(blocks):
        pool.register(b, bytes([i]))
    pool.release(blocks)
    pool.take([], 1)
    assert pool.match([b"\x00", b"\x01", b"\x02"]) == blocks[:2]


def test_a_hash_depends_on_salt_and_all_tokens_before() -> None:
    tokens = np.arange(24, dtype=np.int32)
    base = block_hashes("1", tokens, 8)
    assert len(base) == 3
    assert block_hashes("1", tokens[:17], 8) == base[:2]
    assert block_hashes("1", tokens, 8, base[:1]) == base
    assert not set(block_hashes("2", tokens, 8)) & set(base)
    changed = tokens.copy()
    changed[0] += 1
    assert not set(block_hashes("1", changed, 8)) & set(base)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 2000)), min_size=1, max_size=60))
def test_buckets_hold_every_sequence_once_and_waste_little(sizes: list[tuple[int, int]]) -> None:
    q, s = np.array([a for a, _ in sizes]), np.array([a + b for a, b in sizes])
    buckets = plan_buckets(q, s)
    assert sorted(np.concatenate(buckets).tolist()) == list(range(len(sizes)))
    for b in buckets:
        padded = len(b) * q[b].max() * s[b].max()
        assert padded <= max(SMALL, WASTE * (q[b] * s[b]).sum())


def test_layout_writes_gathers_and_merges(rng: np.random.Generator) -> None:
    """Against a dictionary of (sequence, position) → row; padded keys are zeros whatever lies in the store."""
    size, n = 4, 6
    cache = PagedCache([(0, "k", (3,))], 64, size)
    starts = np.array([0, 5, 0, 90, 3, 0])
    counts = np.array([7, 1, 30, 1, 2, 1])
    table = np.zeros((n, 23), np.int64)
    free = iter(rng.permutation(np.arange(1, 65)).tolist())
    for i in range(n):
        need = -(-(starts[i] + counts[i]) // size)
        table[i, :need] = [next(free) for _ in range(need)]
    rows: dict[tuple[int, int], np.ndarray] = {}

    def forward(starts: np.ndarray, counts: np.ndarray) -> None:
        layout = CachedLayout(cache, size, starts, counts, table)
        x = torch.randn(len(layout.positions_T), 3)
        for i, p, r in zip(layout.sequence_T, layout.positions_T, x.numpy(), strict=True):
            rows[int(i), int(p)] = r
        members = iter(layout.order)
        store, queries = layout.keys(0, "k", x), layout.split(x)
        for bucket, q in zip(layout.buckets, queries, strict=True):
            keys = bucket.keys(store).numpy()
            for b in range(q.shape[0]):
                i = int(next(members))
                length = int(starts[i] + counts[i])
                expected = np.stack([rows[i, p] for p in range(length)])
                assert (keys[b, :length] == expected).all()
                assert not keys[b, length:].any()
                mask = bucket.mask_BQS[b].numpy()
                for j in range(q.shape[1]):
                    sees = starts[i] + j + 1 if j < counts[i] else 1
                    assert mask[j].tolist() == [p < sees for p in range(mask.shape[1])]
                assert not q[b, counts[i] :].any()
        assert torch.equal(layout.merge(queries), x)

    forward(np.zeros(n, np.int64), np.maximum(starts, 1))
    forward(starts, counts)


def test_rows_of_another_width_are_refused() -> None:
    cache = PagedCache([(0, "k", (3,))], 4, 4)
    with pytest.raises(ValueError, match=r"\(0, 'k'\) has rows \(2,\), cache_spec\(\) says \(3,\)"):
        cache.write(0, "k", torch.tensor([4]), torch.zeros(1, 2))
