"""RMSNorm and RoPE from their definitions."""

from types import SimpleNamespace

import pytest
import torch

from prl.kernels import registry
from prl.layers.norm import RMSNorm
from prl.layers.rope import Rope, rotate_half_split, rotate_interleaved
from prl.models.bitwise import SPLIT


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


@pytest.mark.skipif(registry.unavailable("cpu") is not None, reason="needs the CPU kernels")
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_in_order_a_rotation_depends_on_its_position_alone(interleaved, dtype):
    """Bit for bit, also where vectors end: 7 pairs, 1 and 3 heads, any number of tokens."""
    plain, rope = (Rope(parameters(interleaved=interleaved, dim=14)) for _ in range(2))
    rope.in_order = True
    positions = torch.cat((torch.randperm(77), torch.tensor([400])))
    for heads in (1, 3):
        x = torch.randn(78, heads, 14 if interleaved else 18).to(dtype)
        whole = rope.rotate(x, *rope.angles(positions, dtype))
        for some in (slice(0, 1), slice(5, 8), slice(40, 78)):
            assert torch.equal(rope.rotate(x[some], *rope.angles(positions[some], dtype)), whole[some])
        expected = plain.rotate(x, *plain.angles(positions, dtype))
        assert (whole - expected).abs().max() <= (2**-7 if dtype == torch.bfloat16 else 1e-4)
        a, b = (x[..., i::2] for i in (0, 1)) if interleaved else (x[..., :7], x[..., 7:14])
        cos, sin = (t[:, None] for t in rope.angles(positions, dtype))
        first = whole[..., ::2] if interleaved else whole[..., :7]
        assert torch.equal(first, (a * cos - b * sin).to(dtype))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norms_of_a_row_depend_on_it_alone(dtype, threads):
    """Bit for bit: what the bitwise mode leaves to torch, up to the width that it takes."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for width in (20, 64, 130, 2048, SPLIT - 1):
            x = (torch.randn(12, width) * 3).to(dtype)
            layer = torch.nn.LayerNorm(width, dtype=dtype)
            for norm in (RMSNorm(width, 1e-5).to(dtype), layer):
                whole = norm(x)
                for rows in (slice(0, 1), slice(3, 10), slice(11, 12)):
                    assert torch.equal(norm(x[rows]), whole[rows]), (width, type(norm).__name__)
                wide = torch.cat((x, x), -1)[:, :width]  # a slice of a projection's output
                assert torch.equal(norm(wide)[5], whole[5])
    finally:
        torch.set_num_threads(before)
