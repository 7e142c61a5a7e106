"""SwiGLU (arXiv 2002.05202): silu(gate) · up, in the input's type."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prl.kernels.registry import choose, implements


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Two tensors of one shape → one."""
    return choose("swiglu")(gate, up)


def swiglu_backward(gate: Tensor, up: Tensor, grad: Tensor, d_gate: Tensor, d_up: Tensor) -> Tensor:
    """Fills `d_gate` and `d_up`, returns the forward's value, which the next weight's gradient needs."""
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    torch.mul(grad, silu, out=d_up)
    slope = sigmoid.addcmul(silu, 1 - sigmoid)  # silu' = σ + silu · (1 − σ)
    torch.mul(slope.mul_(up), grad, out=d_gate)
    return silu.mul_(up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        swiglu_backward(gate, up, grad, d_gate, d_up)
        return d_gate, d_up


@implements("swiglu", "reference")
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return _SwiGLU.apply(gate, up)
