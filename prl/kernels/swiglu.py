"""SwiGLU of a fused gate and up projection (arXiv 2002.05202).

Legend: R rows, I inner width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prl.kernels.registry import choose, implements


def swiglu(gate_up: Tensor) -> Tensor:
    """[R, 2I] (gate, then up) → [R, I]: silu(gate) · up, in the input's type."""
    return choose("swiglu")(gate_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        d_gate_up = torch.empty_like(gate_up)
        d_gate, d_up = d_gate_up.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=d_up)
        d_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return d_gate_up


@implements("swiglu", "reference")
def _swiglu(gate_up: Tensor) -> Tensor:
    return _SwiGLU.apply(gate_up)
