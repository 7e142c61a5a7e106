"""RMSNorm (arXiv 1910.07467), statistics in float32 or wider, the weight applied in the input's type."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from prl.kernels.numerics import wide


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] → the same shape and type."""
        w = x.to(wide(x))
        return self.weight * (w * torch.rsqrt(w.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
