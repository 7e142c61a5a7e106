"""Linear layers, and what a product of one is computed by."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from prl.kernels.dense import linear


class Linear(nn.Linear):
    in_order = False
    """Whether a row of the output depends on its row of the input alone, bit for bit (`prl.models.bitwise`)."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.in_order:
            return F.linear(x, self.weight, self.bias)
        y = linear(x, self.weight)
        return y if self.bias is None else y + self.bias
