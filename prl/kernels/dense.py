"""Products of dense layers in a fixed order: on the backend `cpu` a row of the result depends on its own row of x alone.

Legend: T tokens, K input width, N output width, H heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prl.kernels import checks
from prl.kernels.grouped_gemm import grouped_gemm
from prl.kernels.registry import define

FLOATS = (torch.bfloat16, torch.float32, torch.float64)


def linear(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """[T, N] in the type of both (bfloat16, float32, float64), summed in float32 or wider: x · wᵀ. The gradient is torch's."""
    checks.tensor("linear", "x_TK", x_TK, [None, None], FLOATS)
    checks.tensor("linear", "weight_NK", weight_NK, [None, x_TK.shape[1]], [x_TK.dtype])
    checks.same_device("linear", x_TK=x_TK, weight_NK=weight_NK)
    return _linear_op(x_TK, weight_NK)


def per_head(x_THK: Tensor, weight_HNK: Tensor, *, transposed: bool = False) -> Tensor:
    """[T, H, N]: each head's x · w[h]ᵀ, or with `transposed` x · w[h] of w [H, K, N]. Differentiable."""
    t, h, _ = x_THK.shape
    starts = torch.arange(0, h * t + 1, max(t, 1), device=x_THK.device) if t else x_THK.new_zeros(h + 1, dtype=torch.long)
    counts = torch.full((h,), t, device=x_THK.device)
    x_RK = x_THK.transpose(0, 1).reshape(h * t, -1).contiguous()
    y_RN = grouped_gemm(x_RK, weight_HNK.contiguous(), starts, counts, transposed=transposed)
    return y_RN.unflatten(0, (h, t)).transpose(0, 1)


def _fake(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    return x_TK.new_empty(x_TK.shape[0], weight_NK.shape[0])


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, d_out_TN: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x_TK, weight_NK = ctx.saved_tensors
    d_x = d_out_TN @ weight_NK if ctx.needs_input_grad[0] else None
    return d_x, d_out_TN.t() @ x_TK if ctx.needs_input_grad[1] else None


_linear_op = define(
    "linear(Tensor x_TK, Tensor weight_NK) -> Tensor",
    F.linear,
    _fake,
    backends=("cpu",),
    setup_context=_setup,
    backward=_backward,
)
