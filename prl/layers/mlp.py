"""The dense SwiGLU feed-forward, also the shared expert of an MoE layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from prl.kernels.swiglu import swiglu
from prl.layers.linear import Linear


class MLP(nn.Module):
    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.gate_proj = Linear(hidden, width, bias=False)
        self.up_proj = Linear(hidden, width, bias=False)
        self.down_proj = Linear(width, hidden, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        gate_up_JD = torch.cat((self.gate_proj.weight, self.up_proj.weight))  # one GEMM, and SwiGLU in one pass over its output
        return self.down_proj(swiglu(self.gate_proj.multiply(x_TD, gate_up_JD)))
