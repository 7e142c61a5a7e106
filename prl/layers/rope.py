"""Rotary position embedding (arXiv 2104.09864): frequencies with the scalings supported, and both pairings of dimensions.

Legend: T tokens, H heads, R rotated dimensions of a head (even).
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from prl.kernels.numerics import wide
from prl.kernels.rope import rotate_pairs


class RopeParameters(Protocol):
    """As in `prl.models.spec.Rope`."""

    @property
    def theta(self) -> float: ...
    @property
    def dim(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def factor(self) -> float: ...
    @property
    def low_freq_factor(self) -> float: ...
    @property
    def high_freq_factor(self) -> float: ...
    @property
    def original_max_positions(self) -> int: ...
    @property
    def interleaved(self) -> bool: ...


BLOCK = 32
"""Positions of a table's block: so few numbers that one thread makes them."""


class Rope:
    def __init__(self, parameters: RopeParameters):
        self.parameters = parameters
        self._frequencies: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self.in_order = False
        """Whether angles and rotation of a position are the same bits whatever comes with it (`prl.models.bitwise`)."""
        self._tables: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}

    def frequencies(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[R / 2]: radians per position of each pair."""
        if (dtype, device) not in self._frequencies:
            self._frequencies[dtype, device] = _frequencies(self.parameters, dtype, device)
        return self._frequencies[dtype, device]

    def angles(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [T, R / 2], in the wider of float32 and `dtype`."""
        dtype = torch.promote_types(dtype, torch.float32)
        if self.in_order:
            return self._from_table(positions_T, dtype)
        angle = positions_T[:, None].to(dtype) * self.frequencies(dtype, positions_T.device)
        return angle.cos(), angle.sin()

    def rotate(self, x_THR: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
        """[T, H, R] in the type of x, at the angles of `angles`."""
        if not self.parameters.interleaved:
            return rotate_half_split(x_THR, cos_TR, sin_TR)
        return (rotate_pairs if self.in_order else rotate_interleaved)(x_THR, cos_TR, sin_TR)

    def _from_table(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Vectorised cosines may differ in the last bit with their place among others, so each block is always made alike."""
        frequencies = self.frequencies(dtype, positions_T.device)
        blocks = self._tables.setdefault((dtype, positions_T.device), [])
        for first in range(len(blocks) * BLOCK, int(positions_T.max()) + 1 if len(positions_T) else 0, BLOCK):
            angle = torch.arange(first, first + BLOCK, dtype=dtype, device=positions_T.device)[:, None] * frequencies
            blocks.append(torch.stack((angle.cos(), angle.sin())))
        cos_TR, sin_TR = (torch.cat(blocks, 1) if len(blocks) > 1 else blocks[0]).index_select(1, positions_T)
        return cos_TR, sin_TR


def _frequencies(p: RopeParameters, dtype: torch.dtype, device: torch.device) -> Tensor:
    exponent = torch.arange(0, p.dim, 2, dtype=dtype, device=device) / p.dim
    inverse = 1.0 / (p.theta**exponent)
    if p.kind == "default":
        return inverse
    if p.kind == "linear":
        return inverse / p.factor
    if p.kind == "llama3":  # long wavelengths are slowed by `factor`, short ones kept, those between blended linearly
        turns = p.original_max_positions / (2 * math.pi / inverse)
        keep = ((turns - p.low_freq_factor) / (p.high_freq_factor - p.low_freq_factor)).clamp(0, 1)
        return (1 - keep) * inverse / p.factor + keep * inverse
    raise ValueError(f"rope kind {p.kind!r} is not supported; supported: default, linear, llama3")


def rotate_half_split(x_THR: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate the first R dimensions in pairs (i, i + R/2) (Llama, Qwen, GLM-4.5); the rest of a head passes through."""
    half = cos_TR.shape[-1]
    cos, sin = cos_TR[:, None], sin_TR[:, None]
    a, b = x_THR[..., :half], x_THR[..., half : 2 * half]
    rotated = (a * cos - b * sin, b * cos + a * sin)
    return torch.cat((*(r.to(x_THR.dtype) for r in rotated), x_THR[..., 2 * half :]), -1)


def rotate_interleaved(x_THR: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate all R dimensions in pairs (2i, 2i + 1) (DeepSeek, GLM-5), left in their places."""
    pairs = torch.view_as_complex(x_THR.to(wide(x_THR)).unflatten(-1, (-1, 2)).contiguous())
    turned = pairs * torch.complex(cos_TR, sin_TR)[:, None]
    return torch.view_as_real(turned).flatten(-2).to(x_THR.dtype)
