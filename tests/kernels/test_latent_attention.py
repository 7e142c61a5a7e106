"""Latent attention from its definition, head by head."""

import pytest
import torch

from prl.kernels import latent_attention as module
from prl.kernels.latent_attention import latent_attention, sparse_latent_attention


def inputs(dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, 3, 4, 7, dtype=dtype, generator=g, requires_grad=True)
    keys = torch.randn(2, 5, 7, dtype=dtype, generator=g, requires_grad=True)
    mask = torch.rand(2, 3, 5, generator=g) < 0.5
    mask[:, :, 0] = True
    return q, keys, mask


def test_values():
    q, keys, mask = inputs()
    out = latent_attention(q, keys, mask, 4, 0.3)
    for b in range(2):
        for i in range(3):
            seen = keys[b][mask[b, i]]
            for h in range(4):
                torch.testing.assert_close(out[b, i, h], (0.3 * seen @ q[b, i, h]).softmax(0) @ seen[:, :4])


def test_gradients():
    q, keys, mask = inputs()
    assert torch.autograd.gradcheck(lambda q, k: latent_attention(q, k, mask, 4, 0.3), (q, keys))


def test_what_the_mask_excludes_does_not_matter():
    q, keys, mask = inputs()
    mask[1, :, 4] = False
    out = latent_attention(q, keys, mask, 4, 0.3)
    with torch.no_grad():
        keys[1, 4] = 1e4
    assert torch.equal(latent_attention(q, keys, mask, 4, 0.3), out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_softmax_is_float32(dtype):
    q, keys, mask = inputs(dtype)
    out = latent_attention(q, keys, mask, 4, 0.3)
    out.sum().backward()
    assert out.dtype == q.grad.dtype == keys.grad.dtype == dtype
    q64, keys64 = q.double(), keys.double()
    expected = latent_attention(q64, keys64, mask, 4, 0.3)
    assert (out - expected).abs().max() < (0.03 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("kept", [1, 90, 10_000])
def test_queries_in_chunks_are_computed_again(kept, monkeypatch):
    q, keys, mask = inputs()
    slope = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    out = latent_attention(q, keys, mask, 4, 0.3)
    expected = [out, *torch.autograd.grad(out, (q, keys), slope)]
    monkeypatch.setattr(module, "KEEP", kept)
    out = latent_attention(q, keys, mask, 4, 0.3)
    for a, b in zip([out, *torch.autograd.grad(out, (q, keys), slope)], expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


def indices(mask, top_k):
    """int32 [B, Q, K]: the keys of the mask, then −1."""
    out = torch.full((*mask.shape[:2], top_k), -1, dtype=torch.int32)
    for b, q, s in mask.nonzero().tolist():
        out[b, q, int(mask[b, q, :s].sum())] = s
    return out


@pytest.mark.parametrize("chunk", [1, 60, 1 << 24])
def test_attention_by_index_is_attention_by_mask(chunk, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", chunk)
    q, keys, mask = inputs()
    slope = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    dense = latent_attention(q, keys, mask, 4, 0.3)
    sparse = sparse_latent_attention(q, keys, indices(mask, 5), 4, 0.3)
    torch.testing.assert_close(sparse, dense, rtol=0, atol=1e-12)
    pairs = zip(torch.autograd.grad(sparse, (q, keys), slope), torch.autograd.grad(dense, (q, keys), slope), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_what_was_not_kept_gets_no_gradient():
    """Rows of fewer keys than there is room for: −1 adds nothing, not to the first key either."""
    q, keys, mask = inputs()
    mask[:] = False
    mask[0, :, 3] = mask[1, :, 2] = True
    out = sparse_latent_attention(q, keys, indices(mask, 5), 4, 0.3)
    torch.testing.assert_close(out, keys[[0, 1], [3, 2], None, None, :4].expand_as(out), rtol=0, atol=1e-15)
    d_q, d_keys = torch.autograd.grad(out.sum(), (q, keys))
    assert not d_q.any()
    assert (d_keys != 0).any(-1).nonzero().tolist() == [[0, 3], [1, 2]]
    assert torch.autograd.gradcheck(lambda q, k: sparse_latent_attention(q, k, indices(mask, 5), 4, 0.3), (q, keys))


def test_bfloat16_keys_gradients_are_added_in_float32(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 1)
    g = torch.Generator().manual_seed(0)
    q = torch.randn(1, 600, 2, 7, generator=g).bfloat16().requires_grad_()
    keys = torch.randn(1, 5, 7, generator=g).bfloat16().requires_grad_()
    kept = torch.arange(3, dtype=torch.int32).expand(1, 600, 3)
    (grad,) = torch.autograd.grad(sparse_latent_attention(q, keys, kept, 4, 0.3).sum(), keys)
    exact = keys.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(sparse_latent_attention(q.double(), exact, kept, 4, 0.3).sum(), exact)
    assert (grad - expected).abs().max() < 0.004 * expected.abs().max()
