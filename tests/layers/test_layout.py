"""The packed layout: buckets hold every token once, masks are causal within a document, gradients are exact."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prl.layers.layout import PackedLayout

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=12)


@given(LENGTHS)
@settings(max_examples=40, deadline=None)
def test_split_and_merge_are_inverse(lengths):
    layout = PackedLayout(lengths)
    x_T = torch.arange(1, sum(lengths) + 1)
    if x_T.numel():
        assert torch.equal(layout.merge(layout.split(x_T)), x_T)
    assert sum(b.mask_BQS.shape[0] for b in layout.buckets) == sum(n > 0 for n in lengths)


@given(LENGTHS)
@settings(max_examples=40, deadline=None)
def test_a_token_sees_its_document_up_to_itself(lengths):
    layout = PackedLayout(lengths)
    document_T = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    if not layout.buckets:
        return
    tokens = layout.split(torch.arange(sum(lengths)))
    for bucket, document_BQ, token_BQ in zip(layout.buckets, layout.split(document_T), tokens, strict=True):
        for b in range(len(document_BQ)):
            n = lengths[int(document_BQ[b, 0])]
            assert (document_BQ[b] == document_BQ[b, 0]).all()
            assert torch.equal(token_BQ[b, :n], token_BQ[b, 0] + torch.arange(n))
            assert torch.equal(bucket.mask_BQS[b, :n, :n], torch.ones(n, n, dtype=torch.bool).tril())
            assert not bucket.mask_BQS[b, :n, n:].any()
        assert bucket.mask_BQS.any(-1).all(), "no row is empty"
        assert torch.equal(bucket.key_positions_BS[0], torch.arange(bucket.mask_BQS.shape[2]))


def test_documents_of_unlike_lengths_do_not_share_a_bucket():
    layout = PackedLayout([3, 500, 16, 480, 5])
    assert sorted(b.mask_BQS.shape[:2] for b in layout.buckets) == [(2, 500), (3, 16)]


def test_gradients_of_padding_and_merging():
    layout = PackedLayout([3, 1, 40, 25])
    x_T = torch.randn(69, 2, dtype=torch.float64, requires_grad=True)

    def there_and_back(x_T):
        rows = layout.keys(0, "k", x_T)
        parts = [q * b.keys(rows).cumsum(1) for b, q in zip(layout.buckets, layout.split(x_T), strict=True)]
        return layout.merge([p * torch.arange(1, 1 + len(p))[:, None, None] for p in parts])

    assert torch.autograd.gradcheck(there_and_back, (x_T,))
