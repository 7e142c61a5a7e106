"""The numeric contract of the kernels, in one place, and the measures by which it is judged.

FP8 codes are e4m3fn (largest 448, smallest normal 2^-6, smallest subnormal 2^-9) with one float32 scale per block of 128 (1x128
along a row, 128x1 along a column, 128x128 of a weight); value = code · scale.

* amax is the largest magnitude of the block in float32. scale = amax / 448, rounded to nearest, at least 2^-126, so that its
  reciprocal is finite and gradients of 1e-10 survive. With power-of-two scales that is rounded up to a power of two.
* A block of zeros has scale 1 and codes 0. A block that holds a NaN or an infinity has scale NaN and every code 0x7F: what
  is not finite stays visible in all that it touches, and is never saturated away.
* code = e4m3fn(clamp(x · (1 / scale), ±448)): multiplied by the reciprocal, which is rounded to nearest once per block;
  saturating, round to nearest even, the sign of zero kept.
* An FP8 GEMM takes the float32 sum over 128 of K, then adds it, times both scales, to a float32 total, in the order of K.
  A GEMM of another type has one float32 total (float64 for float64). Nothing splits K, and neither tiles nor order depend on
  the number of rows: an output row depends on its own input row alone, bit for bit.
* Data movement and quantisation equal the reference bit for bit, given the same inputs. Padding rows are exactly 0.
* SwiGLU, router, softmax and combine compute in the wider of float32 and their input's type, rounding once at the end.
* The LM head's slopes (gradients of its logits) may be rounded to bfloat16 for the products with operands that both are, but
  for the label's, by far the largest, as any activation's gradient is; sums stay in float32.

Sources: DeepSeek-V3 (arXiv 2412.19437, section 3.3) for the blocks and the promotion every 128; the floor and the special cases
are our own.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SMALLEST_SCALE = 2.0**-126
NAN_CODE = 0x7F


def wide(x: Tensor) -> torch.dtype:
    """The wider of float32 and the type of `x`: "float32" everywhere in this project means this."""
    return torch.promote_types(x.dtype, torch.float32)


def calc_diff(x: Tensor, y: Tensor) -> float:
    """1 − 2Σxy / Σ(x² + y²) in float64, 0 for two zeros; the relative error of one tensor against another (DeepGEMM)."""
    x, y = x.double(), y.double()
    total = float((x * x + y * y).sum())
    return 0.0 if total == 0 else 1 - 2 * float((x * y).sum()) / total


def sqnr_db(x: Tensor, reference: Tensor) -> float:
    """Signal to quantisation noise in dB: 10 log10(Σ reference² / Σ (x − reference)²)."""
    x, reference = x.double(), reference.double()
    return float(10 * torch.log10(reference.square().sum() / (x - reference).square().sum()))
