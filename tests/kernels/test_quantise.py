"""The quantisers against e4m3 as its definition has it: a table of all codes, the nearest taken, ties to the even code."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prl.kernels.checks import ArgumentError
from prl.kernels.numerics import FP8
from prl.kernels.quantise import (
    dequantise_blocks,
    dequantise_columns,
    dequantise_rows,
    quantise_blocks,
    quantise_both,
    quantise_columns,
    quantise_rows,
    transpose_codes,
)


def e4m3_values():
    """The 127 finite values of codes 0 … 126: sign 1, exponent 4 (bias 7), mantissa 3; no infinities."""
    return np.array([m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127])


def nearest(x):
    """uint8 codes of float64 magnitudes, saturating."""
    values = e4m3_values()
    high = np.clip(np.searchsorted(values, x), 0, 126)
    low = np.clip(high - 1, 0, 126)
    up, down = np.abs(values[high] - x), np.abs(x - values[low])
    return np.where((up < down) | ((up == down) & (high % 2 == 0)), high, low).astype(np.uint8)


def golden(x, pow2):
    """Codes and scale of one block of float32 by the contract."""
    amax = np.abs(x).max()
    if not np.isfinite(amax):
        return np.full(len(x), 0x7F, np.uint8), np.float32(np.nan)
    scale = np.float32(1) if amax == 0 else max(np.float32(amax) / np.float32(448), np.float32(2.0**-126))
    if pow2 and amax:
        scale = np.float32(2.0 ** np.ceil(np.log2(np.float64(scale))))
    scaled = np.clip(x * (np.float32(1) / scale), -448, 448)
    return nearest(np.abs(scaled.astype(np.float64))) | (np.signbit(scaled) << 7).astype(np.uint8), scale


VALUES = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-1, 1, width=32),
    st.floats(-(2.0**-126), 2.0**-126, width=32, allow_subnormal=True),
    st.sampled_from([0.0, -0.0, np.inf, np.nan, 1e-45, 3.4e38]),
)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@given(st.lists(VALUES, min_size=128, max_size=128), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_block_is_quantised_as_the_contract_says(backend, values, pow2):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRL_KERNELS", backend)
        x = torch.tensor([values], dtype=torch.float32)
        codes, scales = quantise_rows(x, pow2=pow2)
    want_codes, want_scale = golden(x[0].numpy(), pow2)
    np.testing.assert_array_equal(codes.view(torch.uint8)[0].numpy(), want_codes)
    np.testing.assert_array_equal(scales[0].numpy(), [want_scale])


@pytest.mark.parametrize("size", [1e-10, 1e-20, 1e-35, 1e30])
def test_gradients_of_any_size_survive(size):
    x = torch.randn(4, 256) * size
    error = (dequantise_rows(*quantise_rows(x)) - x).double()
    assert error.norm() / x.double().norm() < 0.04


def test_blocks_of_zeros_and_of_what_is_not_finite():
    x = torch.randn(3, 128)
    x[0], x[1, 7], x[2, 9] = 0, torch.inf, torch.nan
    codes, scales = quantise_rows(x)
    assert scales[0, 0] == 1 and (codes[0].float() == 0).all()
    assert scales[0, 1:].isnan().all() and codes[1:].float().isnan().all(), "never saturated away"


@pytest.mark.parametrize("pow2", [False, True])
def test_one_read_gives_the_same_as_two(pow2):
    x = torch.randn(256, 384).bfloat16()
    both = quantise_both(x, pow2=pow2)
    apart = (*quantise_rows(x, pow2=pow2), *quantise_columns(x, pow2=pow2))
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(both, apart, strict=True))
    assert both[2].shape == (384, 256) and both[3].shape == (2, 384)
    assert ((dequantise_columns(*both[2:]) - x.float()).norm() / x.float().norm()) < 0.04


def test_square_blocks_can_be_transposed():
    w = torch.randn(2, 256, 128)
    codes, scales = quantise_blocks(w)
    other_codes, other_scales = quantise_blocks(w.transpose(1, 2).contiguous())
    assert torch.equal(transpose_codes(codes).view(torch.uint8), other_codes.view(torch.uint8))
    assert torch.equal(scales.transpose(1, 2), other_scales)
    assert ((dequantise_blocks(codes, scales) - w).norm() / w.norm()) < 0.04


def test_powers_of_two_round_up_and_lose_no_range():
    x = torch.randn(64, 128)
    _, scales = quantise_rows(x)
    _, pow2 = quantise_rows(x, pow2=True)
    assert (pow2.log2().frac() == 0).all() and (pow2 >= scales).all() and (pow2 < 2 * scales).all()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: quantise_rows(torch.zeros(2, 100)), "quantise_rows: K must be a multiple of 128, got 100"),
        (lambda: quantise_columns(torch.zeros(100, 2)), "quantise_columns: M must be a multiple of 128, got 100"),
        (lambda: quantise_rows(torch.zeros(128)), r"quantise_rows: x_MK must be of shape \[any, any\], got \[128\]"),
        (lambda: quantise_rows(torch.zeros(2, 128, dtype=torch.float16)), "x_MK must be of type bfloat16 or float32, got"),
        (lambda: quantise_rows(torch.zeros(128, 256).t()), "x_MK must be contiguous, got strides"),
        (lambda: quantise_blocks(torch.zeros(1, 128, 64)), "quantise_blocks: K must be a multiple of 128, got 64"),
        (lambda: transpose_codes(torch.zeros(1, 1, 1)), "codes_ENK must be of type float8_e4m3fn, got"),
    ],
)
def test_what_no_kernel_takes_is_named(call, says):
    with pytest.raises(ArgumentError, match=says):
        call()


def test_no_rows():
    codes, scales = quantise_rows(torch.zeros(0, 256))
    assert codes.shape == (0, 256) and codes.dtype == FP8 and scales.shape == (2, 0)
    assert quantise_blocks(torch.zeros(0, 128, 128))[1].shape == (0, 1, 1)
