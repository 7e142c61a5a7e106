"""The routed experts of a layer: permute, gate and up, SwiGLU, down, combine; in the tokens' type or in block-scaled FP8.

Legend: T tokens, K experts per token, R rows, D hidden width, E experts, I inner width, J = 2I.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from prl.kernels import checks
from prl.kernels.grouped_gemm import grouped_gemm, grouped_gemm_fp8, grouped_gemm_weight_fp8
from prl.kernels.numerics import BLOCK, FP8, wide
from prl.kernels.permute import FLOATS, combine, permute, permute_codes, permute_quantise, sort_rows
from prl.kernels.quantise import dequantise_rows, quantise_columns
from prl.kernels.swiglu import swiglu, swiglu_backward_quantise, swiglu_quantise
from prl.kernels.weights import quantised

Precision = Literal["bf16", "fp8"]


def experts(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up_EJD: Tensor,
    down_EDI: Tensor,
    *,
    precision: Precision = "bf16",
    codes: tuple[Tensor, Tensor] | None = None,
    slots: int | None = None,
) -> Tensor:
    """[T, D]: Σ_k weights[t, k] · expert ids[t, k] of x[t], in x's type; the gate's rows of `gate_up_EJD` come first.

    An id of −1 adds nothing. `bf16` computes in x's type, whatever it is; `fp8` quantises tokens, activations and gradients
    (x is bfloat16 or float32, the weights any of these: their gradient is float32 before it is cast). Differentiable.
    `codes`: the tokens' FP8 codes [T, D] and scales float32 [T, D / 128], for `fp8` alone: then x is not read, it gets the
    gradient as if quantisation were the identity. `slots`: how many ids are not −1, where the host knows: then there are rows
    for these alone, else for all.
    """
    if precision not in get_args(Precision):
        checks.fail("experts", "precision", "bf16 or fp8", precision)
    if codes is None:
        checks.tensor("experts", "x_TD", x_TD, [None, None], FLOATS)
    else:
        checks.tensor("experts", "codes_TD", codes[0], list(x_TD.shape), [FP8])
        checks.tensor("experts", "scales_TB", codes[1], [len(x_TD), x_TD.shape[1] // BLOCK], [torch.float32])
        if precision != "fp8":
            checks.fail("experts", "precision", "fp8 for tokens that are FP8 codes", precision)
    checks.tensor("experts", "ids_TK", ids_TK, [len(x_TD), None], [torch.int64])
    checks.tensor("experts", "weights_TK", weights_TK, list(ids_TK.shape), [wide(x_TD)])
    checks.tensor("experts", "gate_up_EJD", gate_up_EJD, [None, None, x_TD.shape[1]], FLOATS)
    e, j, d = gate_up_EJD.shape
    checks.multiple("experts", "J", j, 2)
    checks.tensor("experts", "down_EDI", down_EDI, [e, d, j // 2], [gate_up_EJD.dtype])
    tensors = {"x_TD": x_TD, "ids_TK": ids_TK, "weights_TK": weights_TK, "gate_up_EJD": gate_up_EJD, "down_EDI": down_EDI}
    checks.same_device("experts", **tensors)
    if precision == "fp8":
        args = x_TD, ids_TK, weights_TK, gate_up_EJD, down_EDI, *(codes or (None, None))
        return _ExpertsFP8.apply(*args, slots, torch.is_grad_enabled())
    source_R, position_TK, starts_E1, counts_E = sort_rows(ids_TK, e, slots=slots)
    rows_RD = permute(x_TD, source_R, position_TK)
    act_RI = swiglu(grouped_gemm(rows_RD, gate_up_EJD, starts_E1, counts_E))
    return combine(grouped_gemm(act_RI, down_EDI, starts_E1, counts_E), weights_TK, source_R, position_TK)


class _ExpertsFP8(torch.autograd.Function):
    """Keeps the tokens' FP8 codes and the gate and up projections; activations are computed again, outputs never kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        gate_up_EJD: Tensor,
        down_EDI: Tensor,
        codes_TD: Tensor | None,
        scales_TB: Tensor | None,
        slots: int | None,
        grad: bool,
    ) -> Tensor:
        source_R, position_TK, starts_E1, counts_E = sort_rows(ids_TK, len(gate_up_EJD), align=BLOCK, slots=slots)
        if codes_TD is None or scales_TB is None:
            columns = grad and any(ctx.needs_input_grad)  # parameters need a gradient under no_grad too
            x, x_scales, *x_kept = permute_quantise(x_TD, source_R, position_TK, columns=columns)
        else:
            x, x_scales = permute_codes(codes_TD, scales_TB, source_R, position_TK)
            x_kept = [codes_TD, scales_TB]  # fewer bytes than the columns, which backward makes of them
        ctx.coded = codes_TD is not None
        gate_up, down = quantised(gate_up_EJD), quantised(down_EDI)
        gate_up_RJ = grouped_gemm_fp8(x, x_scales, *gate_up.plain, starts_E1, counts_E, out_dtype=x_TD.dtype)
        act, act_scales, _, _ = swiglu_quantise(gate_up_RJ, columns=False)
        out_RD = grouped_gemm_fp8(act, act_scales, *down.plain, starts_E1, counts_E, out_dtype=x_TD.dtype)
        ctx.save_for_backward(weights_TK, gate_up_RJ, *x_kept, source_R, position_TK, starts_E1, counts_E)
        ctx.gate_up, ctx.down = gate_up, down  # what FSDP frees in between and gathers again are their buffers
        ctx.shapes, ctx.weight_dtype = (gate_up_EJD.shape, down_EDI.shape), gate_up_EJD.dtype
        return combine(out_RD, weights_TK, source_R, position_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        weights_TK, gate_up_RJ, x_columns, x_column_scales, source_R, position_TK, starts_E1, counts_E = ctx.saved_tensors
        if ctx.coded:
            codes_TD, scales_TB = x_columns, x_column_scales
            rows_RD = dequantise_rows(*permute_codes(codes_TD, scales_TB, source_R, position_TK))
            x_columns, x_column_scales = quantise_columns(rows_RD)
        (gate_up_shape, down_shape), dtype = ctx.shapes, gate_up_RJ.dtype
        grad_TD = grad_TD.contiguous()
        g, g_scales, g_columns, g_column_scales = permute_quantise(grad_TD, source_R, position_TK, columns=True)
        down, down_scales = ctx.down.transposed
        d_act_RI = grouped_gemm_fp8(g, g_scales, down, down_scales, starts_E1, counts_E, out_dtype=dtype)
        weights_R = torch.where(source_R < 0, 0, weights_TK.flatten()[source_R.clamp(min=0)])
        d, d_scales, d_columns, d_column_scales, act_columns, act_column_scales, d_weights_R = swiglu_backward_quantise(
            gate_up_RJ, d_act_RI, weights_R
        )
        d_down_EDI = grad_TD.new_zeros(down_shape, dtype=torch.float32)
        grouped_gemm_weight_fp8(g_columns, g_column_scales, act_columns, act_column_scales, starts_E1, counts_E, d_down_EDI)
        d_gate_up_EJD = grad_TD.new_zeros(gate_up_shape, dtype=torch.float32)
        grouped_gemm_weight_fp8(d_columns, d_column_scales, x_columns, x_column_scales, starts_E1, counts_E, d_gate_up_EJD)
        gate_up, gate_up_scales = ctx.gate_up.transposed
        d_x_RD = grouped_gemm_fp8(d, d_scales, gate_up, gate_up_scales, starts_E1, counts_E, out_dtype=dtype)
        d_weights_TK = torch.zeros_like(weights_TK)
        if len(d_weights_R):
            d_weights_TK = torch.where(position_TK < 0, 0, d_weights_R[position_TK.clamp(min=0)])
        d_x_TD = combine(d_x_RD, None, source_R, position_TK)
        d_w = d_gate_up_EJD.to(ctx.weight_dtype), d_down_EDI.to(ctx.weight_dtype)
        return d_x_TD, None, d_weights_TK, *d_w, None, None, None, None
