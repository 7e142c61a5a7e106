"""Samples are cut, joined, packed and balanced with all their fields together.

Every entry of every field is a function of the token at its place, so wherever a token goes, a field left behind shows.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prl.samples import (
    CE,
    OPTIONAL,
    PER_TOKEN,
    RL,
    Batch,
    Rollout,
    Sample,
    balance,
    concatenate,
    first_fit_decreasing,
    pack,
    shift_left,
    truncate,
)

quick = settings(max_examples=60, deadline=None)


def fields_of(tokens: np.ndarray, optional: frozenset[str]) -> dict[str, np.ndarray]:
    """What every field holds where these tokens stand."""
    t = tokens.astype(np.int64)
    all_fields = {
        "tokens": t,
        "turn": t % 5,
        "trainable": t % 3 > 0,
        "logprobs": -t / 7,
        "versions": t % 11,
        "temperature": 0.5 + t / 1000,
        "routed": (t % 4 > 0) if "routes" in optional else np.zeros(len(t)),
        "advantages": t / 3 - 100,
        "loss_stream": np.where(t % 2 == 0, RL, CE),
        "routes": t[:, None, None] % 200 + np.arange(6).reshape(1, 2, 3),
        "selections": t[:, None, None] - np.arange(4).reshape(1, 1, 4),
        "ref_logprobs": -t / 9,
    }
    dtypes = {"routes": np.dtype(np.uint8), "selections": np.dtype(np.int32)}
    kept = {n: a for n, a in all_fields.items() if n not in OPTIONAL or n in optional}
    return {n: a.astype(PER_TOKEN[n] or dtypes[n]) for n, a in kept.items()}


def make(tokens: np.ndarray, optional: frozenset[str]) -> Sample:
    s = Sample(**fields_of(tokens, optional))  # type: ignore[arg-type]
    if len(s):
        s.trainable = s.trainable & (np.arange(len(s)) > 0)
        s.routed = s.routed & (np.arange(len(s)) < len(s) - 1)
    return s.check()


def assert_aligned(s: Sample, optional: frozenset[str]) -> None:
    """Every field's entry belongs to the token at its place; the marks that ends take away may be missing."""
    expected = fields_of(s.tokens, optional)
    for name, a in expected.items():
        got = getattr(s, name)
        assert got.dtype == a.dtype and len(got) == len(s), name
        if name in ("trainable", "routed"):
            assert not (got & ~a).any(), name
        else:
            assert np.array_equal(got, a), name


OPTIONALS = st.sets(st.sampled_from(OPTIONAL)).map(frozenset)


@st.composite
def samples(draw: st.DrawFn, at_least: int = 1, at_most: int = 6, longest: int = 12) -> tuple[list[Sample], frozenset[str]]:
    """Samples of tokens that occur once."""
    optional = draw(OPTIONALS)
    lengths = draw(st.lists(st.integers(1, longest), min_size=at_least, max_size=at_most))
    order = np.random.default_rng(draw(st.integers(0, 99))).permutation(sum(lengths))
    parts = np.split(order, np.cumsum(lengths)[:-1])
    return [make(p, optional) for p in parts], optional


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[list[Rollout], frozenset[str]]:
    parts, optional = draw(samples(at_most=12))
    owners = sorted(draw(st.lists(st.integers(0, 5), min_size=len(parts), max_size=len(parts))))
    groups = [[p for p, o in zip(parts, owners, strict=True) if o == owner] for owner in sorted(set(owners))]
    return [Rollout(f"r{i}", "e", "t", i, 0, samples=g) for i, g in enumerate(groups)], optional


def same(a: Sample, b: Sample) -> bool:
    pairs = [(getattr(a, n), getattr(b, n)) for n in PER_TOKEN]
    return all((x is None and y is None) or (x is not None and y is not None and np.array_equal(x, y)) for x, y in pairs)


@quick
@given(samples(at_most=1), st.integers(0, 14))
def test_truncate_keeps_a_prefix_of_every_field(given_: tuple[list[Sample], frozenset[str]], length: int) -> None:
    ((s,), optional) = given_
    before = replace(s, **{n: a.copy() for n in PER_TOKEN if (a := getattr(s, n)) is not None})
    cut = truncate(s, length)
    assert len(cut) == min(length, len(s)) and np.array_equal(cut.tokens, s.tokens[:length])
    assert_aligned(cut, optional)
    if len(cut):
        cut.check()
        assert not cut.routed[-1] and np.array_equal(cut.routed[:-1], s.routed[: len(cut) - 1])
    assert np.array_equal(cut.trainable, s.trainable[:length])
    assert same(s, before), "the whole sample is left alone"


@quick
@given(samples())
def test_concatenate_moves_every_field(given_: tuple[list[Sample], frozenset[str]]) -> None:
    parts, optional = given_
    whole = concatenate(parts)
    assert np.array_equal(whole.tokens, np.concatenate([p.tokens for p in parts]))
    assert_aligned(whole, optional)
    assert np.array_equal(whole.trainable, np.concatenate([p.trainable for p in parts]))
    assert np.array_equal(whole.routed, np.concatenate([p.routed for p in parts]))
    assert same(truncate(whole, len(parts[0])), parts[0])
    if len(parts) > 2:
        assert same(whole, concatenate([parts[0], concatenate(parts[1:])]))


def test_a_part_without_an_optional_field_gets_unmarked_filling() -> None:
    a, b = make(np.arange(3), frozenset(OPTIONAL)), Sample.of_prompt([7, 8])
    whole = concatenate([a, b])
    assert whole.routes is not None and whole.selections is not None and whole.ref_logprobs is not None
    assert (whole.routes[3:] == 0).all() and (whole.selections[3:] == -1).all() and not whole.routed[3:].any()
    odd = replace(a, routes=np.zeros((3, 2, 4), np.uint8))
    with pytest.raises(ValueError, match="sample.routes: parts differ"):
        concatenate([a, odd])
    with pytest.raises(ValueError, match="no samples"):
        concatenate([])


@quick
@given(st.lists(st.integers(-5, 5), max_size=8))
def test_shift_left_moves_each_entry_to_the_position_that_scores_it(values: list[int]) -> None:
    a = np.array(values, np.int64)
    out = shift_left(a, -9)
    assert out.tolist() == [*values[1:], -9][: len(values)] and out.dtype == a.dtype


@quick
@given(st.lists(st.integers(1, 20), max_size=30), st.integers(1, 25))
def test_first_fit_decreasing_fills_bins_within_the_budget(lengths: list[int], budget: int) -> None:
    bins = first_fit_decreasing(lengths, budget)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in b) for b in bins]
    assert all(s <= budget or len(b) == 1 for s, b in zip(sums, bins, strict=True))
    # First fit: the first item of a bin fitted into no bin before it.
    for later in range(1, len(bins)):
        assert all(sums[e] + lengths[bins[later][0]] > budget for e in range(later))


@quick
@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=12), st.integers(1, 5))
def test_balance_gives_every_rank_as_many_bins(bin_lengths: list[list[int]], ranks: int) -> None:
    lengths = [n for b in bin_lengths for n in b]
    ends = np.cumsum([len(b) for b in bin_lengths])
    bins = [list(range(e - len(b), e)) for e, b in zip(ends, bin_lengths, strict=True)]
    out = balance(bins, [float(n) for n in lengths], ranks)
    assert len(out) == ranks and {len(r) for r in out} == {-(-len(bins) // ranks)}
    assert sorted(map(tuple, (b for r in out for b in r if b))) == sorted(map(tuple, bins))


def test_balance_levels_the_load() -> None:
    lengths = [9, 8, 7, 6, 5, 4, 3, 2]
    out = balance([[i] for i in range(8)], [float(n) for n in lengths], 2)
    assert [sum(lengths[i] for b in r for i in b) for r in out] == [22, 22]


def documents(batches: list[Batch]) -> list[tuple[str, Sample, int, int]]:
    """(rollout id, document, its rollout's trainable tokens, rank) of all ranks, fillers aside."""
    found = []
    for rank, batch in enumerate(batches):
        for mb in batch.micro_batches:
            ends = np.cumsum(mb.lengths)
            assert ends[-1] == mb.n_tokens == len(mb.positions)
            for end, n, r, total in zip(ends, mb.lengths, mb.rollout, mb.rollout_tokens, strict=True):
                part = {f: a[end - n : end] for f in PER_TOKEN if (a := getattr(mb.sample, f)) is not None}
                assert mb.positions[end - n : end].tolist() == list(range(n))
                found.append((batch.rollout_ids[r], Sample(**part), int(total), rank))
    return found


@pytest.mark.parametrize("field", ["advantages", "trainable", "loss_stream", "logprobs"])
def test_a_field_of_another_length_is_named_before_it_misaligns_what_follows(field: str) -> None:
    one, two = Sample.of_prompt([1, 2, 3]), Sample.of_prompt([4, 5])
    setattr(one, field, getattr(one, field)[:-1])
    setattr(two, field, np.append(getattr(two, field), getattr(two, field)[:1]))
    with pytest.raises(ValueError, match=rf"sample\.{field}: length 2, expected 3 as in tokens"):
        concatenate([one, two])
    with pytest.raises(ValueError, match=rf"sample\.{field}: length"):
        pack([Rollout("r", "e", "t", 0, 0, samples=[two])], step=1, budget=8, ranks=1)


@quick
@given(rollouts(), st.integers(1, 30), st.integers(1, 4))
def test_pack_moves_every_document_once_and_counts_the_whole_batch(
    given_: tuple[list[Rollout], frozenset[str]], budget: int, ranks: int
) -> None:
    rs, optional = given_
    batches = pack(rs, step=3, budget=budget, ranks=ranks, checksum="c")
    assert len(batches) == ranks and {len(b.micro_batches) for b in batches} == {len(batches[0].micro_batches)}
    assert all((b.step, b.checksum, b.rollout_ids) == (3, "c", [r.id for r in rs]) for b in batches)
    packed = documents(batches)
    wanted = {int(s.tokens[0]): (r, s) for r in rs for s in r.samples}
    real = [d for d in packed if not (len(d[1]) == 1 and not d[1].trainable.any() and d[1].versions[0] == -1)]
    assert len(real) == len(wanted)
    for rollout_id, document, total, _ in real:
        rollout, original = wanted.pop(int(document.tokens[0]))
        assert rollout_id == rollout.id and total == max(rollout.n_trainable, 1)
        assert same(document, original)
        assert_aligned(document, optional)
    assert not wanted
    for batch in batches:
        assert all(mb.n_tokens <= budget or len(mb.lengths) == 1 for mb in batch.micro_batches)
        counts = batch.counts
        assert counts.rollouts == sum(r.n_trainable > 0 for r in rs)
        assert counts.rl_tokens + counts.ce_tokens == sum(r.n_trainable for r in rs)
        assert counts.ce_tokens == sum(int((s.trainable & (s.loss_stream == CE)).sum()) for r in rs for s in r.samples)


def test_check_names_the_field() -> None:
    good = make(np.arange(1, 6), frozenset(OPTIONAL))
    assert good.routes is not None and good.selections is not None
    wrong = {
        "sample.turn: length 4": {"turn": good.turn[:4]},
        "sample.logprobs: float64": {"logprobs": good.logprobs.astype(np.float64)},
        "sample.routes: int64": {"routes": good.routes.astype(np.int64)},
        "sample.selections: int64": {"selections": good.selections.astype(np.int64)},
        "the last token cannot have": {"routed": np.ones(5, np.bool_)},
        "rows marked, but sample.routes is missing": {"routes": None},
        "sample.trainable: the first token": {"trainable": np.ones(5, np.bool_)},
        "a trainable token without a weight version": {"versions": np.full(5, -1, np.int32)},
        "not finite on a trainable token": {"logprobs": np.full(5, np.nan, np.float32)},
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=message):
            replace(good, **change).check()
    with pytest.raises(ValueError, match="expert id .*, the model has 4"):
        good.check(n_experts=4)


def test_the_oldest_version_is_that_of_a_trainable_token() -> None:
    s = make(np.array([22, 13, 14, 25]), frozenset())  # versions 0, 2, 3, 3; 22 comes first and is not trained
    r = Rollout("r", "e", "t", 0, 0, samples=[s])
    assert r.oldest_version() == 2 and r.n_trainable == 3 and r.n_tokens == 4
    assert Rollout("r", "e", "t", 0, 0, samples=[Sample.of_prompt([1])]).oldest_version() is None
