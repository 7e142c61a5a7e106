"""The dense FP8 product against an independent emulation in float64, for every number of rows."""

import pytest
import torch
from torch import Tensor

from prl.kernels.linear import linear_fp8
from prl.kernels.numerics import BLOCK, sqnr_db
from prl.kernels.quantise import (
    dequantise_blocks,
    dequantise_columns,
    dequantise_rows,
    quantise_blocks,
    quantise_columns,
    quantise_rows,
)
from prl.kernels.weights import CodedWeight, Quantised


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rows(x: Tensor) -> Tensor:
    codes, scales = quantise_rows(x)
    return dequantise_rows(codes, scales, torch.float64)


def columns(x: Tensor) -> Tensor:
    padded = torch.cat((x, x.new_zeros(-len(x) % BLOCK, x.shape[1])))
    return dequantise_columns(*quantise_columns(padded), dtype=torch.float64)[: len(x)]


def blocks(w: Tensor) -> Tensor:
    return dequantise_blocks(*quantise_blocks(w[None]), dtype=torch.float64)[0]


@pytest.mark.parametrize("t", [1, 3, 127, 128, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_product_and_gradients_are_those_of_the_quantised_operands(t: int, dtype: torch.dtype) -> None:
    """Up to float32 sums and the rounding of the result; and 25 dB or more from the product of what was not quantised."""
    x, w, g = drawn(t, 256, dtype=dtype), drawn(384, 256, dtype=dtype, seed=1), drawn(t, 384, dtype=dtype, seed=2)
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = linear_fp8(*leaves)
    y.backward(g)
    wanted = rows(x) @ blocks(w).t(), rows(g) @ blocks(w), columns(g).t() @ columns(x)
    plain = x.double() @ w.double().t(), g.double() @ w.double(), g.double().t() @ x.double()
    for got, emulated, exact in zip((y, leaves[0].grad, leaves[1].grad), wanted, plain, strict=True):
        assert got is not None and got.dtype == dtype
        assert sqnr_db(got.detach(), emulated) > (50 if dtype == torch.bfloat16 else 120)
        assert sqnr_db(got.detach(), exact) > 25


def test_a_row_depends_on_itself_alone_and_a_coded_weight_is_the_weight() -> None:
    x, w = drawn(130, 128), drawn(256, 128, seed=1)
    coded = CodedWeight(Quantised(*quantise_blocks(w[None])), w.dtype, linear=True)
    assert coded.shape == w.shape
    with torch.inference_mode():
        y = linear_fp8(x, w)
        assert torch.equal(linear_fp8(x, coded), y)
        for at in (slice(0, 1), slice(5, 9), slice(129, 130)):
            assert torch.equal(linear_fp8(x[at], w), y[at])
        both = torch.cat((coded, CodedWeight(Quantised(*quantise_blocks(-w[None])), w.dtype, linear=True)))
        assert torch.equal(linear_fp8(x, both), torch.cat((y, -y), 1)), "one on top of the other"


def test_only_what_is_wanted_is_computed() -> None:
    x, w = drawn(4, 128), drawn(128, 128).requires_grad_()
    (d_w,) = torch.autograd.grad(linear_fp8(x, w).sum(), w)
    assert d_w.shape == w.shape
    x.requires_grad_()
    (d_x,) = torch.autograd.grad(linear_fp8(x, w.detach()).sum(), x)
    assert d_x.shape == x.shape


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"linear_fp8: weight_NK.*\[None, 128\]|linear_fp8.*weight_NK"):
        linear_fp8(drawn(2, 128), drawn(128, 256))
    with pytest.raises(ValueError, match="128"):
        linear_fp8(drawn(2, 64), drawn(128, 64))
