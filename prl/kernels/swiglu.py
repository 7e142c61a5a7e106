"""SwiGLU (arXiv 2002.05202): silu(gate) · up, plain and quantised in the same pass.

Legend: R rows, J = 2I, I inner width, B = I / 128, C = R / 128. A row of [R, J] is its gate, then its up.
Products are float32 (float64 for float64) from first to last and rounded once: to the input's type, or to FP8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prl.kernels import checks
from prl.kernels.numerics import wide
from prl.kernels.quantise import columns_fake, columns_reference, no_columns, rows_fake, rows_reference
from prl.kernels.registry import define

FLOATS = (torch.bfloat16, torch.float32, torch.float64)


def swiglu(gate_up_RJ: Tensor) -> Tensor:
    """[R, I] in the input's type. Differentiable."""
    _gate_up("swiglu", gate_up_RJ, FLOATS)
    return _swiglu_op(gate_up_RJ)


def swiglu_quantise(gate_up_RJ: Tensor, *, columns: bool, pow2: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The float32 product through `quantise_both`: (codes [R, I], scales [B, R], codes [I, R], scales [C, I]).

    I must be a multiple of 128, with `columns` R too; without, the last two are empty.
    """
    _gate_up("swiglu_quantise", gate_up_RJ, FLOATS[:2])
    checks.multiple("swiglu_quantise", "I", gate_up_RJ.shape[1] // 2)
    if columns:
        checks.multiple("swiglu_quantise", "R", gate_up_RJ.shape[0])
    return _quantise_op(gate_up_RJ, columns, pow2)


def swiglu_backward_quantise(
    gate_up_RJ: Tensor, grad_RI: Tensor, weights_R: Tensor, *, pow2: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """All that the backward of an expert needs from its inner activation, in one pass.

    `grad_RI` is the gradient of a row's output before the routing weight `weights_R` (float32), through the down weight: the
    gradient of the activation a is weight · grad. Returns d_gate_up by row and by column (codes [R, J], scales [2B, R], codes
    [J, R], scales [C, J]), weight · a by column (codes [I, R], scales [C, I]) for the down weight's gradient, and
    ⟨grad, a⟩ float32 [R], the gradient of the routing weight: with it nobody keeps the experts' outputs.
    R and I must be multiples of 128.
    """
    op = "swiglu_backward_quantise"
    _gate_up(op, gate_up_RJ, FLOATS[:2])
    r, i = gate_up_RJ.shape[0], gate_up_RJ.shape[1] // 2
    checks.tensor(op, "grad_RI", grad_RI, [r, i], [gate_up_RJ.dtype])
    checks.tensor(op, "weights_R", weights_R, [r], [torch.float32])
    checks.multiple(op, "R", r)
    checks.multiple(op, "I", i)
    checks.same_device(op, gate_up_RJ=gate_up_RJ, grad_RI=grad_RI, weights_R=weights_R)
    return _backward_quantise_op(gate_up_RJ, grad_RI, weights_R, pow2)


def _gate_up(op: str, gate_up_RJ: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    checks.tensor(op, "gate_up_RJ", gate_up_RJ, [None, None], dtypes)
    checks.multiple(op, "J", gate_up_RJ.shape[1], 2)


def _product(gate_up_RJ: Tensor) -> Tensor:
    gate, up = gate_up_RJ.to(wide(gate_up_RJ)).chunk(2, dim=1)
    return gate * torch.sigmoid(gate) * up


def _slopes(gate_up_RJ: Tensor, grad_RI: Tensor) -> Tensor:
    """d_gate_up [R, J] in float32 or wider: silu' = σ · (1 + gate · (1 − σ))."""
    gate, up = gate_up_RJ.to(wide(gate_up_RJ)).chunk(2, dim=1)
    sigmoid, grad_RI = torch.sigmoid(gate), grad_RI.to(gate.dtype)
    return torch.cat((grad_RI * up * (sigmoid * (1 + gate * (1 - sigmoid))), grad_RI * (gate * sigmoid)), 1)


def _swiglu_reference(gate_up_RJ: Tensor) -> Tensor:
    return _product(gate_up_RJ).to(gate_up_RJ.dtype)


def _swiglu_fake(gate_up_RJ: Tensor) -> Tensor:
    return gate_up_RJ.new_empty(gate_up_RJ.shape[0], gate_up_RJ.shape[1] // 2)


def _swiglu_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _swiglu_backward(ctx: Any, d_out_RI: Tensor) -> Tensor:
    return _backward_op(ctx.saved_tensors[0], d_out_RI.contiguous())


def _backward_reference(gate_up_RJ: Tensor, grad_RI: Tensor) -> Tensor:
    return _slopes(gate_up_RJ, grad_RI).to(gate_up_RJ.dtype)


def _backward_fake(gate_up_RJ: Tensor, grad_RI: Tensor) -> Tensor:
    return torch.empty_like(gate_up_RJ)


def _quantise_reference(gate_up_RJ: Tensor, columns: bool, pow2: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    product_RI = _product(gate_up_RJ)
    return *rows_reference(product_RI, pow2), *(columns_reference(product_RI, pow2) if columns else no_columns(product_RI))


def _quantise_fake(gate_up_RJ: Tensor, columns: bool, pow2: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    product_RI = _swiglu_fake(gate_up_RJ)
    return *rows_fake(product_RI, pow2), *(columns_fake(product_RI, pow2) if columns else no_columns(product_RI))


def _backward_quantise_reference(
    gate_up_RJ: Tensor, grad_RI: Tensor, weights_R: Tensor, pow2: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    weights_R1, grad_RI = weights_R[:, None], grad_RI.float()
    product_RI = _product(gate_up_RJ)
    d_RJ = _slopes(gate_up_RJ, grad_RI * weights_R1)
    d_weights_R = (grad_RI * product_RI).sum(1)
    weighted = columns_reference(product_RI * weights_R1, pow2)
    return *rows_reference(d_RJ, pow2), *columns_reference(d_RJ, pow2), *weighted, d_weights_R


def _backward_quantise_fake(
    gate_up_RJ: Tensor, grad_RI: Tensor, weights_R: Tensor, pow2: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    by_column = columns_fake(grad_RI, pow2)
    return *rows_fake(gate_up_RJ, pow2), *columns_fake(gate_up_RJ, pow2), *by_column, torch.empty_like(weights_R)


_swiglu_op = define(
    "swiglu(Tensor gate_up_RJ) -> Tensor",
    _swiglu_reference,
    _swiglu_fake,
    setup_context=_swiglu_setup,
    backward=_swiglu_backward,
)
_backward_op = define("swiglu_backward(Tensor gate_up_RJ, Tensor grad_RI) -> Tensor", _backward_reference, _backward_fake)
_quantise_op = define(
    "swiglu_quantise(Tensor gate_up_RJ, bool columns, bool pow2) -> (Tensor, Tensor, Tensor, Tensor)",
    _quantise_reference,
    _quantise_fake,
)
_backward_quantise_op = define(
    "swiglu_backward_quantise(Tensor gate_up_RJ, Tensor grad_RI, Tensor weights_R, bool pow2)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_quantise_reference,
    _backward_quantise_fake,
)
