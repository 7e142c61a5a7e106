"""Latent attention from its definition, head by head."""

import pytest
import torch

from prl.kernels.latent_attention import latent_attention


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
