"""RMSNorm and RoPE from their definitions."""

from types import SimpleNamespace

import pytest
import torch

from prl.layers.norm import RMSNorm
from prl.layers.rope import Rope, rotate_half_split, rotate_interleaved


def test_rms_norm_in_float32_or_wider():
    norm = RMSNorm(64, 1e-5)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(5, 64, dtype=torch.float64) * 30
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    assert (norm.double()(x) - expected).abs().max() < 1e-12
    half = norm.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16 and (half - expected).abs().max() < 0.02 * expected.abs().max()


def test_rms_norm_gradient():
    norm = RMSNorm(6, 1e-3).double()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: norm(x), (x, norm.weight))


def parameters(kind="default", **kw):
    base = {"theta": 100.0, "dim": 8, "kind": kind, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return SimpleNamespace(**base | {"original_max_positions": 32, "interleaved": False} | kw)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_turns_each_pair_by_position_times_frequency(interleaved):
    rope = Rope(parameters(interleaved=interleaved))
    x = torch.randn(7, 3, 8, dtype=torch.float64)
    positions = torch.tensor([0, 1, 2, 5, 30, 31, 1000])
    y = rope.rotate(x, *rope.angles(positions, x.dtype))
    for pair in range(4):
        i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + 4)
        z = torch.complex(x[..., i], x[..., j]) * torch.exp(1j * positions.double() * 100.0 ** (-2 * pair / 8))[:, None]
        torch.testing.assert_close(torch.complex(y[..., i], y[..., j]), z)


def test_half_split_passes_the_rest_through():
    rope = Rope(parameters())
    x = torch.randn(4, 2, 12)
    y = rotate_half_split(x, *rope.angles(torch.arange(4), x.dtype))
    assert torch.equal(y[..., 8:], x[..., 8:]) and not torch.equal(y[1:, :, :8], x[1:, :, :8])


def test_angles_are_at_least_float32_and_rows_keep_their_type():
    rope = Rope(parameters(interleaved=True))
    x = torch.randn(4, 2, 8)
    angles = rope.angles(torch.arange(4), torch.bfloat16)
    assert angles[0].dtype == torch.float32
    assert rotate_interleaved(x.bfloat16(), *angles).dtype == torch.bfloat16
    assert rope.angles(torch.arange(4), torch.float64)[0].dtype == torch.float64


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_scaled_frequencies(kind):
    """Llama 3.1: wavelengths under original/high are kept, over original/low divided by the factor."""
    plain = Rope(parameters(dim=64)).frequencies(torch.float64, torch.device("cpu"))
    scaled = Rope(parameters(kind, dim=64)).frequencies(torch.float64, torch.device("cpu"))
    wavelength = 2 * torch.pi / plain
    if kind == "linear":
        torch.testing.assert_close(scaled, plain / 4)
    else:
        short, long = wavelength < 32 / 4, wavelength > 32 / 1
        assert short.any() and long.any() and (~short & ~long).any()
        torch.testing.assert_close(scaled[short], plain[short])
        torch.testing.assert_close(scaled[long], plain[long] / 4)
        between = scaled[~short & ~long]
        assert (between < plain[~short & ~long]).all() and (between > plain[~short & ~long] / 4).all()
