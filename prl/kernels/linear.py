"""A dense product in block-scaled FP8: tokens, weight and gradients quantised, as the routed experts' are.

Legend: T tokens, R rows (T rounded up to 128), K input width, N output width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from prl.kernels import checks
from prl.kernels.grouped_gemm import grouped_gemm_fp8, grouped_gemm_weight_fp8
from prl.kernels.numerics import BLOCK
from prl.kernels.permute import permute_quantise
from prl.kernels.quantise import quantise_blocks
from prl.kernels.weights import CodedWeight, Quantised

FLOATS = (torch.bfloat16, torch.float32)


def linear_fp8(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """[T, N]: x · wᵀ in x's type (bfloat16 or float32). K and N are multiples of 128; a weight that is no `CodedWeight` is
    quantised from what it holds, and its gradient is summed in float32. Differentiable."""
    checks.tensor("linear_fp8", "x_TK", x_TK, [None, None], FLOATS)
    checks.tensor("linear_fp8", "weight_NK", weight_NK, [None, x_TK.shape[1]], FLOATS)
    checks.same_device("linear_fp8", x_TK=x_TK, weight_NK=weight_NK)
    return _LinearFP8.apply(x_TK, weight_NK, torch.is_grad_enabled())


def _rows(t: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(source [R], position [T, 1], starts [2], counts [1]) of T tokens that are one group, in their own order."""
    r = -(-t // BLOCK) * BLOCK
    row_R = torch.arange(r, device=device)
    starts = torch.tensor([0, r], device=device)
    return torch.where(row_R < t, row_R, -1), row_R[:t, None], starts, torch.full((1,), t, device=device)


class _LinearFP8(torch.autograd.Function):
    """Keeps FP8 codes of tokens, by column, and of the weight."""

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight_NK: Tensor, grad: bool) -> Tensor:
        source_R, position_T1, starts_2, counts_1 = _rows(len(x_TK), x_TK.device)
        columns = grad and ctx.needs_input_grad[1]
        x, x_scales, *x_kept = permute_quantise(x_TK, source_R, position_T1, columns=columns)
        weight = weight_NK.quantised if isinstance(weight_NK, CodedWeight) else Quantised(*quantise_blocks(weight_NK[None]))
        codes, scales = weight.plain
        out_RN = grouped_gemm_fp8(x, x_scales, codes, scales, starts_2, counts_1, out_dtype=x_TK.dtype)
        ctx.save_for_backward(*x_kept)
        ctx.weight, ctx.weight_dtype, ctx.shape = weight, weight_NK.dtype, weight_NK.shape
        return out_RN[: len(x_TK)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_columns, x_column_scales = ctx.saved_tensors
        t = len(grad_TN)
        source_R, position_T1, starts_2, counts_1 = _rows(t, grad_TN.device)
        wanted_x, wanted_w, _ = ctx.needs_input_grad
        g, g_scales, *g_columns = permute_quantise(grad_TN.contiguous(), source_R, position_T1, columns=wanted_w)
        d_x_TK = d_weight_NK = None
        if wanted_x:
            codes, scales = ctx.weight.transposed
            d_x_TK = grouped_gemm_fp8(g, g_scales, codes, scales, starts_2, counts_1, out_dtype=grad_TN.dtype)[:t]
        if wanted_w:
            d_1NK = grad_TN.new_zeros(1, *ctx.shape, dtype=torch.float32)
            g_codes, g_column_scales = g_columns
            grouped_gemm_weight_fp8(g_codes, g_column_scales, x_columns, x_column_scales, starts_2, counts_1, d_1NK)
            d_weight_NK = d_1NK[0].to(ctx.weight_dtype)
        return d_x_TK, d_weight_NK, None
