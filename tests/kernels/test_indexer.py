"""The lightning indexer's scores and choice."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prl.kernels.indexer import SelectionError, index_scores, index_select, selection_flips, selection_indices, selection_mask


def test_scores_are_weighted_sums_of_relus():
    q, k, w = torch.randn(2, 3, 4, 5), torch.randn(2, 6, 5), torch.randn(2, 3, 4)
    expected = torch.einsum("bqh,bqhs->bqs", w, torch.einsum("bqhd,bsd->bqhs", q, k).relu())
    torch.testing.assert_close(index_scores(q, k, w), expected)
    assert index_scores(q.bfloat16(), k.bfloat16(), w.bfloat16()).dtype == torch.float32
    assert index_scores(q.double(), k.double(), w.double()).dtype == torch.float64


@given(st.integers(1, 12), st.integers(1, 14), st.integers(0, 10_000))
@settings(max_examples=80, deadline=None)
def test_the_best_keys_and_among_equals_the_lowest_index(s, top_k, seed):
    g = torch.Generator().manual_seed(seed)
    scores = torch.randint(-1, 3, (2, s, s), generator=g).float()  # few values: ties everywhere
    mask = torch.ones(s, s, dtype=torch.bool).tril().expand(2, s, s)
    selected = index_select(scores, mask, top_k)
    for b in range(2):
        for q in range(s):
            best = sorted(range(q + 1), key=lambda i: (-scores[b, q, i].item(), i))[:top_k]
            assert selected[b, q].nonzero()[:, 0].tolist() == sorted(best)


def test_negative_zero_is_zero():
    scores = torch.tensor([[[-0.0, 0.0, -0.0, 0.0]]])
    assert index_select(scores, torch.ones(1, 1, 4, dtype=torch.bool), 2).tolist() == [[[True, True, False, False]]]


@given(st.integers(1, 9), st.integers(1, 11), st.integers(0, 100))
@settings(max_examples=30, deadline=None)
def test_recorded_selections_are_replayed_exactly(s, top_k, seed):
    g = torch.Generator().manual_seed(seed)
    mask = torch.ones(s, s, dtype=torch.bool).tril().expand(2, s, s)
    positions = torch.arange(s).expand(2, s)
    selected = index_select(torch.randn(2, s, s, generator=g), mask, top_k)
    recorded = selection_indices(selected, positions, top_k)
    assert recorded.shape == (2, s, top_k) and recorded.dtype == torch.int32
    own = index_select(torch.randn(2, s, s, generator=g), mask, top_k)
    assert torch.equal(selection_mask(recorded, positions, own), selected)
    recorded[0, s - 1] = -1
    mixed = selection_mask(recorded, positions, own)
    assert torch.equal(mixed[0, -1], own[0, -1]) and torch.equal(mixed[1], selected[1]), "a row of −1 takes the own choice"


def test_a_selection_beyond_the_sequence_is_refused():
    positions = torch.arange(3).expand(1, 3)
    with pytest.raises(SelectionError, match="position 3 selected, the longest sequence has 3"):
        selection_mask(torch.tensor([[[0, 3]]]), positions, torch.ones(1, 1, 3, dtype=torch.bool))


def test_flips_compare_sets():
    a = torch.tensor([[[0, 1, 2], [0, 1, -1]], [[3, 4, 5], [1, 2, 3]]])
    b = torch.tensor([[[2, 1, 0], [1, 0, -1]], [[3, 4, 6], [1, 2, -1]]])
    assert selection_flips(a, b).tolist() == [[False, False], [True, True]]
