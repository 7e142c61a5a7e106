"""The type in which sums that must not lose bits are done."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> torch.dtype:
    """The wider of float32 and the type of `x`: "float32" everywhere in this project means this."""
    return torch.promote_types(x.dtype, torch.float32)
