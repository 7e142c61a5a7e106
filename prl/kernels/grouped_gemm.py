"""Grouped GEMMs: rows grouped by expert, each group times its expert's weight; and the sums over rows that weights need.

Legend: R rows, E experts, N output width, K input width, B = K / 128, C = R / 128.
Group e is rows starts[e] … starts[e] + counts[e]. Rows of no group come out as zeros, whatever they hold.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prl.kernels import checks
from prl.kernels.numerics import BLOCK, FP8, wide
from prl.kernels.registry import define

FLOATS = (torch.bfloat16, torch.float32, torch.float64)


def grouped_gemm(a_RK: Tensor, w_ENK: Tensor, starts_E1: Tensor, counts_E: Tensor, *, transposed: bool = False) -> Tensor:
    """[R, N]: a · w[e]ᵀ, in a's type (bfloat16, float32, float64), summed in float32 or wider.

    With `transposed`, w is [E, K, N] and the product a · w[e]. Differentiable.
    """
    n, k = (2, 1) if transposed else (1, 2)
    checks.tensor("grouped_gemm", "a_RK", a_RK, [None, None], FLOATS)
    checks.tensor("grouped_gemm", "counts_E", counts_E, [None], [torch.int64])
    checks.tensor("grouped_gemm", "w_ENK", w_ENK, [len(counts_E), None, None], [a_RK.dtype])
    if w_ENK.shape[k] != a_RK.shape[1]:
        checks.fail("grouped_gemm", f"w_ENK's dimension {k}", f"a_RK's width {a_RK.shape[1]}", list(w_ENK.shape))
    checks.same_device("grouped_gemm", a_RK=a_RK, w_ENK=w_ENK, starts_E1=starts_E1, counts_E=counts_E)
    checks.groups("grouped_gemm", starts_E1, counts_E, len(a_RK), 1)
    return _gemm_op(a_RK, w_ENK, starts_E1, counts_E, transposed)


def grouped_gemm_weight(g_RN: Tensor, a_RK: Tensor, starts_E1: Tensor, counts_E: Tensor, out_ENK: Tensor) -> None:
    """out[e] += gᵀ · a over the rows of group e; out is float32, or float64 for float64 operands."""
    checks.tensor("grouped_gemm_weight", "a_RK", a_RK, [None, None], FLOATS)
    checks.tensor("grouped_gemm_weight", "g_RN", g_RN, [len(a_RK), None], [a_RK.dtype])
    checks.tensor("grouped_gemm_weight", "counts_E", counts_E, [None], [torch.int64])
    shape = [len(counts_E), g_RN.shape[1], a_RK.shape[1]]
    checks.tensor("grouped_gemm_weight", "out_ENK", out_ENK, shape, [wide(a_RK)])
    checks.same_device("grouped_gemm_weight", g_RN=g_RN, a_RK=a_RK, starts_E1=starts_E1, counts_E=counts_E, out_ENK=out_ENK)
    checks.groups("grouped_gemm_weight", starts_E1, counts_E, len(a_RK), 1)
    _weight_op(g_RN, a_RK, starts_E1, counts_E, out_ENK)


def grouped_gemm_fp8(
    a_RK: Tensor,
    a_scales_BR: Tensor,
    w_ENK: Tensor,
    w_scales_EMB: Tensor,
    starts_E1: Tensor,
    counts_E: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """[R, N] in `out_dtype` (bfloat16 or float32): a · w[e]ᵀ of `quantise_rows` and `quantise_blocks`.

    starts are multiples of 128; M = N / 128.
    """
    checks.tensor("grouped_gemm_fp8", "a_RK", a_RK, [None, None], [FP8])
    checks.tensor("grouped_gemm_fp8", "counts_E", counts_E, [None], [torch.int64])
    r, k = a_RK.shape
    checks.tensor("grouped_gemm_fp8", "w_ENK", w_ENK, [len(counts_E), None, k], [FP8])
    e, n, _ = w_ENK.shape
    checks.multiple("grouped_gemm_fp8", "K", k)
    checks.multiple("grouped_gemm_fp8", "N", n)
    checks.tensor("grouped_gemm_fp8", "a_scales_BR", a_scales_BR, [k // BLOCK, r], [torch.float32])
    checks.tensor("grouped_gemm_fp8", "w_scales_EMB", w_scales_EMB, [e, n // BLOCK, k // BLOCK], [torch.float32])
    if out_dtype not in (torch.bfloat16, torch.float32):
        checks.fail("grouped_gemm_fp8", "out_dtype", "bfloat16 or float32", out_dtype)
    tensors = {"a_RK": a_RK, "a_scales_BR": a_scales_BR, "w_ENK": w_ENK, "w_scales_EMB": w_scales_EMB}
    checks.same_device("grouped_gemm_fp8", **tensors, starts_E1=starts_E1, counts_E=counts_E)
    checks.groups("grouped_gemm_fp8", starts_E1, counts_E, r, BLOCK)
    return _fp8_op(a_RK, a_scales_BR, w_ENK, w_scales_EMB, starts_E1, counts_E, out_dtype)


def grouped_gemm_weight_fp8(
    g_NR: Tensor,
    g_scales_CN: Tensor,
    a_KR: Tensor,
    a_scales_CK: Tensor,
    starts_E1: Tensor,
    counts_E: Tensor,
    out_ENK: Tensor,
) -> None:
    """out[e] += g · aᵀ of `quantise_columns` over the columns of group e, padding included (its codes are 0); out is float32.

    starts are multiples of 128.
    """
    checks.tensor("grouped_gemm_weight_fp8", "g_NR", g_NR, [None, None], [FP8])
    n, r = g_NR.shape
    checks.tensor("grouped_gemm_weight_fp8", "a_KR", a_KR, [None, r], [FP8])
    checks.tensor("grouped_gemm_weight_fp8", "counts_E", counts_E, [None], [torch.int64])
    k = len(a_KR)
    checks.multiple("grouped_gemm_weight_fp8", "R", r)
    checks.multiple("grouped_gemm_weight_fp8", "N", n)
    checks.multiple("grouped_gemm_weight_fp8", "K", k)
    checks.tensor("grouped_gemm_weight_fp8", "g_scales_CN", g_scales_CN, [r // BLOCK, n], [torch.float32])
    checks.tensor("grouped_gemm_weight_fp8", "a_scales_CK", a_scales_CK, [r // BLOCK, k], [torch.float32])
    checks.tensor("grouped_gemm_weight_fp8", "out_ENK", out_ENK, [len(counts_E), n, k], [torch.float32])
    tensors = {"g_NR": g_NR, "g_scales_CN": g_scales_CN, "a_KR": a_KR, "a_scales_CK": a_scales_CK}
    checks.same_device("grouped_gemm_weight_fp8", **tensors, starts_E1=starts_E1, counts_E=counts_E, out_ENK=out_ENK)
    checks.groups("grouped_gemm_weight_fp8", starts_E1, counts_E, r, BLOCK)
    _weight_fp8_op(g_NR, g_scales_CN, a_KR, a_scales_CK, starts_E1, counts_E, out_ENK)


def _spans(starts_E1: Tensor, counts_E: Tensor) -> list[tuple[int, slice]]:
    pairs = zip(starts_E1.tolist(), counts_E.tolist(), strict=False)
    return [(e, slice(start, start + count)) for e, (start, count) in enumerate(pairs) if count]


def _gemm_reference(a_RK: Tensor, w_ENK: Tensor, starts_E1: Tensor, counts_E: Tensor, transposed: bool) -> Tensor:
    if not transposed:
        w_ENK = w_ENK.transpose(1, 2)
    out_RN = a_RK.new_zeros(len(a_RK), w_ENK.shape[2])
    for e, rows in _spans(starts_E1, counts_E):
        torch.mm(a_RK[rows], w_ENK[e], out=out_RN[rows])
    return out_RN


def _weight_reference(g_RN: Tensor, a_RK: Tensor, starts_E1: Tensor, counts_E: Tensor, out_ENK: Tensor) -> None:
    for e, rows in _spans(starts_E1, counts_E):
        out_ENK[e].addmm_(g_RN[rows].t().to(out_ENK.dtype), a_RK[rows].to(out_ENK.dtype))


def _fp8_reference(
    a_RK: Tensor,
    a_scales_BR: Tensor,
    w_ENK: Tensor,
    w_scales_EMB: Tensor,
    starts_E1: Tensor,
    counts_E: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    out_RN = a_RK.new_zeros(len(a_RK), w_ENK.shape[1], dtype=out_dtype)
    for e, rows in _spans(starts_E1, counts_E):
        scales_BR, scales_BN = a_scales_BR[:, rows], w_scales_EMB[e].t().repeat_interleave(BLOCK, 1)
        out_RN[rows] = _promoted(a_RK[rows], scales_BR, w_ENK[e], scales_BN).to(out_dtype)
    return out_RN


def _weight_fp8_reference(
    g_NR: Tensor,
    g_scales_CN: Tensor,
    a_KR: Tensor,
    a_scales_CK: Tensor,
    starts_E1: Tensor,
    counts_E: Tensor,
    out_ENK: Tensor,
) -> None:
    for e, span in _spans(starts_E1, counts_E):
        stop = -(-span.stop // BLOCK) * BLOCK
        rows, blocks = slice(span.start, stop), slice(span.start // BLOCK, stop // BLOCK)
        out_ENK[e] += _promoted(g_NR[:, rows], g_scales_CN[blocks], a_KR[:, rows], a_scales_CK[blocks])


def _promoted(a_MK: Tensor, a_scales_BM: Tensor, b_NK: Tensor, b_scales_BN: Tensor) -> Tensor:
    """float32 [M, N]: a · bᵀ, block of K by block, each scaled before it is added."""
    total_MN = a_MK.new_zeros(len(a_MK), len(b_NK), dtype=torch.float32)
    for b, (a_scales_M, b_scales_N) in enumerate(zip(a_scales_BM, b_scales_BN, strict=True)):
        block = slice(b * BLOCK, (b + 1) * BLOCK)
        total_MN += (a_MK[:, block].float() @ b_NK[:, block].float().t()) * (a_scales_M[:, None] * b_scales_N)
    return total_MN


def _gemm_fake(a_RK: Tensor, w_ENK: Tensor, starts_E1: Tensor, counts_E: Tensor, transposed: bool) -> Tensor:
    return a_RK.new_empty(a_RK.shape[0], w_ENK.shape[2 if transposed else 1])


def _gemm_setup(ctx: Any, inputs: Any, output: Any) -> None:
    a_RK, w_ENK, starts_E1, counts_E, ctx.transposed = inputs
    ctx.save_for_backward(a_RK, w_ENK, starts_E1, counts_E)


def _gemm_backward(ctx: Any, d_out_RN: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
    a_RK, w_ENK, starts_E1, counts_E = ctx.saved_tensors
    d_out_RN = d_out_RN.contiguous()
    d_a = _gemm_op(d_out_RN, w_ENK, starts_E1, counts_E, not ctx.transposed) if ctx.needs_input_grad[0] else None
    d_w = None
    if ctx.needs_input_grad[1]:
        d_w = torch.zeros_like(w_ENK, dtype=wide(w_ENK))
        g, a = (a_RK, d_out_RN) if ctx.transposed else (d_out_RN, a_RK)
        _weight_op(g, a, starts_E1, counts_E, d_w)
        d_w = d_w.to(w_ENK.dtype)
    return d_a, d_w, None, None, None


def _fp8_fake(
    a_RK: Tensor,
    a_scales_BR: Tensor,
    w_ENK: Tensor,
    w_scales_EMB: Tensor,
    starts_E1: Tensor,
    counts_E: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    return a_RK.new_empty(a_RK.shape[0], w_ENK.shape[1], dtype=out_dtype)


def _nothing(*args: Any) -> None:
    return None


_gemm_op = define(
    "grouped_gemm(Tensor a_RK, Tensor w_ENK, Tensor starts_E1, Tensor counts_E, bool transposed) -> Tensor",
    _gemm_reference,
    _gemm_fake,
    setup_context=_gemm_setup,
    backward=_gemm_backward,
)
_weight_op = define(
    "grouped_gemm_weight(Tensor g_RN, Tensor a_RK, Tensor starts_E1, Tensor counts_E, Tensor(a!) out_ENK) -> ()",
    _weight_reference,
    _nothing,
)
_fp8_op = define(
    "grouped_gemm_fp8(Tensor a_RK, Tensor a_scales_BR, Tensor w_ENK, Tensor w_scales_EMB, Tensor starts_E1, Tensor counts_E,"
    " ScalarType out_dtype) -> Tensor",
    _fp8_reference,
    _fp8_fake,
    backends=("cuda", "triton", "cpu"),
)
_weight_fp8_op = define(
    "grouped_gemm_weight_fp8(Tensor g_NR, Tensor g_scales_CN, Tensor a_KR, Tensor a_scales_CK, Tensor starts_E1,"
    " Tensor counts_E, Tensor(a!) out_ENK) -> ()",
    _weight_fp8_reference,
    _nothing,
    backends=("cuda", "triton", "cpu"),
)
