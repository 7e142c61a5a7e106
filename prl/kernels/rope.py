"""Rotation of pairs (2i, 2i + 1) of a head's dimensions. Legend: T tokens, H heads, R rotated dimensions, P = R / 2 pairs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prl.kernels import checks
from prl.kernels.numerics import wide
from prl.kernels.registry import define

FLOATS = (torch.bfloat16, torch.float32, torch.float64)


def rotate_pairs(x_THR: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """[T, H, R] in x's type: (a, b) → (a cos − b sin, b cos + a sin), each operation rounded in float32 or wider.

    On the backend `cpu` an element's bits depend on its pair and its angle alone. Differentiable in x.
    """
    x_THR = x_THR.contiguous()
    checks.tensor("rotate_pairs", "x_THR", x_THR, [None, None, None], FLOATS)
    t, _, r = x_THR.shape
    checks.multiple("rotate_pairs", "R", r, 2)
    for name, angle_TP in (("cos_TP", cos_TP), ("sin_TP", sin_TP)):
        checks.tensor("rotate_pairs", name, angle_TP, [t, r // 2], [wide(x_THR)])
    checks.same_device("rotate_pairs", x_THR=x_THR, cos_TP=cos_TP, sin_TP=sin_TP)
    return _rotate_op(x_THR, cos_TP, sin_TP)


def _reference(x_THR: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    a, b = x_THR.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos_TP[:, None], sin_TP[:, None]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).to(x_THR.dtype)


def _fake(x_THR: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    return torch.empty_like(x_THR)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[1:])


def _backward(ctx: Any, d_out_THR: Tensor) -> tuple[Tensor, None, None]:
    cos_TP, sin_TP = ctx.saved_tensors
    return _rotate_op(d_out_THR.contiguous(), cos_TP, -sin_TP), None, None


_rotate_op = define(
    "rotate_pairs(Tensor x_THR, Tensor cos_TP, Tensor sin_TP) -> Tensor",
    _reference,
    _fake,
    backends=("cpu",),
    setup_context=_setup,
    backward=_backward,
)
