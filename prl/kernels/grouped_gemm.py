"""Grouped GEMM: each expert's rows times that expert's matrix.

Legend: R rows sorted by expert, K inner width, N outer width, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from prl.kernels.registry import choose, implements


def grouped_gemm(x_RK: Tensor, weight_ENK: Tensor, counts: Sequence[int]) -> Tensor:
    """[R, N]: rows of expert e (counts[e] of them, in order) times weight_ENK[e] transposed."""
    return choose("grouped_gemm")(x_RK, weight_ENK, counts)


class _GroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RK: Tensor, weight_ENK: Tensor, counts: Sequence[int]) -> Tensor:
        ctx.save_for_backward(x_RK, weight_ENK)
        ctx.spans = [(e, end - n, end) for e, (n, end) in enumerate(zip(counts, accumulate(counts), strict=True)) if n]
        y_RN = x_RK.new_empty(len(x_RK), weight_ENK.shape[1])
        for e, a, b in ctx.spans:
            torch.mm(x_RK[a:b], weight_ENK[e].t(), out=y_RN[a:b])
        return y_RN

    @staticmethod
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_RK, weight_ENK = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x_RK)
            for e, a, b in ctx.spans:
                torch.mm(grad_RN[a:b], weight_ENK[e], out=dx[a:b])
        if ctx.needs_input_grad[1]:
            dw = torch.zeros_like(weight_ENK)
            for e, a, b in ctx.spans:
                torch.mm(grad_RN[a:b].t(), x_RK[a:b], out=dw[e])
        return dx, dw, None


@implements("grouped_gemm", "reference")
def _grouped_gemm(x_RK: Tensor, weight_ENK: Tensor, counts: Sequence[int]) -> Tensor:
    if sum(counts) != len(x_RK) or len(counts) != len(weight_ENK):
        raise ValueError(f"grouped_gemm: counts {list(counts)} for {len(x_RK)} rows and {len(weight_ENK)} experts")
    return _GroupedGemm.apply(x_RK, weight_ENK, counts)
