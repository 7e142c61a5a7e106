"""Linear layers, and what a product of one is computed by."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from prl.kernels.dense import linear
from prl.kernels.experts import Precision
from prl.kernels.linear import linear_fp8


class Linear(nn.Linear):
    """`never_fp8`: of one whose weight others read as it is, or that chooses what the policy sees."""

    precision: Precision = "bf16"
    in_order = False
    """Whether a row of the output depends on its row of the input alone, bit for bit (`prl.models.bitwise`); in FP8 it does."""
    multiply_fp8 = staticmethod(linear_fp8)

    def __init__(self, width: int, out: int, *, bias: bool, never_fp8: bool = False):
        super().__init__(width, out, bias=bias)
        self.never_fp8 = never_fp8

    def forward(self, x: Tensor) -> Tensor:
        if self.precision == "bf16" and not self.in_order:
            return F.linear(x, self.weight, self.bias)
        y = self.multiply(x, self.weight)
        return y if self.bias is None else y + self.bias

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """x · weightᵀ, as this layer computes it."""
        if self.precision == "fp8":
            return self.multiply_fp8(x, weight)
        return linear(x, weight) if self.in_order else F.linear(x, weight)
