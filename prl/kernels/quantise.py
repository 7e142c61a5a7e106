"""Block-scaled FP8: the quantisers. What a code and a scale are is in `prl.kernels.numerics`.

Legend: M rows, K columns, B = K / 128, C = M / 128, E experts, N output width.
Scales lie with the long side last ([B, M] for rows), so that a tile of rows reads them together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prl.kernels import checks
from prl.kernels.numerics import BLOCK, FP8, FP8_MAX, NAN_CODE, SMALLEST_SCALE
from prl.kernels.registry import define

FLOATS = (torch.bfloat16, torch.float32)


def quantise_rows(x_MK: Tensor, *, pow2: bool = False) -> tuple[Tensor, Tensor]:
    """1x128 blocks: (codes [M, K], scales [B, M]). K must be a multiple of 128; x bfloat16 or float32."""
    checks.tensor("quantise_rows", "x_MK", x_MK, [None, None], FLOATS)
    checks.multiple("quantise_rows", "K", x_MK.shape[1])
    return _rows_op(x_MK, pow2)


def quantise_columns(x_MK: Tensor, *, pow2: bool = False) -> tuple[Tensor, Tensor]:
    """128x1 blocks, transposed: (codes [K, M], scales [C, K]). M must be a multiple of 128."""
    checks.tensor("quantise_columns", "x_MK", x_MK, [None, None], FLOATS)
    checks.multiple("quantise_columns", "M", x_MK.shape[0])
    return _columns_op(x_MK, pow2)


def quantise_both(x_MK: Tensor, *, pow2: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantise_rows` and `quantise_columns` from one read: (codes [M, K], scales [B, M], codes [K, M], scales [C, K])."""
    checks.tensor("quantise_both", "x_MK", x_MK, [None, None], FLOATS)
    checks.multiple("quantise_both", "M", x_MK.shape[0])
    checks.multiple("quantise_both", "K", x_MK.shape[1])
    return _both_op(x_MK, pow2)


def quantise_blocks(w_ENK: Tensor, *, pow2: bool = False) -> tuple[Tensor, Tensor]:
    """128x128 blocks: (codes [E, N, K], scales [E, N / 128, K / 128]). N and K must be multiples of 128."""
    checks.tensor("quantise_blocks", "w_ENK", w_ENK, [None, None, None], FLOATS)
    checks.multiple("quantise_blocks", "N", w_ENK.shape[1])
    checks.multiple("quantise_blocks", "K", w_ENK.shape[2])
    return _blocks_op(w_ENK, pow2)


def transpose_codes(codes_ENK: Tensor) -> Tensor:
    """[E, K, N]: the codes of the transposed weight; its scales are the transposed scales, since blocks are square."""
    checks.tensor("transpose_codes", "codes_ENK", codes_ENK, [None, None, None], [FP8])
    return _transpose_op(codes_ENK)


def dequantise_rows(codes_MK: Tensor, scales_BM: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[M, K]."""
    return codes_MK.to(dtype) * scales_BM.to(dtype).t().repeat_interleave(BLOCK, 1)


def dequantise_columns(codes_KM: Tensor, scales_CK: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[M, K], transposed back."""
    return (codes_KM.to(dtype) * scales_CK.to(dtype).t().repeat_interleave(BLOCK, 1)).t()


def dequantise_blocks(codes_ENK: Tensor, scales_ECB: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[E, N, K]."""
    return codes_ENK.to(dtype) * scales_ECB.to(dtype).repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)


def encode(x: Tensor, amax: Tensor, pow2: bool) -> tuple[Tensor, Tensor]:
    """Codes of float32 `x` and scales, for the amax of the block of each element (broadcast against x)."""
    scale = (amax / FP8_MAX).clamp(min=SMALLEST_SCALE)
    if pow2:
        bits = scale.view(torch.int32)
        scale = (((bits >> 23) + ((bits & 0x7FFFFF) != 0)) << 23).view(torch.float32)
    scale = torch.where(amax == 0, 1.0, scale)
    codes = (x * (1 / scale)).clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)
    finite = amax.isfinite()
    return torch.where(finite, codes, NAN_CODE).view(FP8), torch.where(finite, scale, torch.nan)


def rows_reference(x_MK: Tensor, pow2: bool) -> tuple[Tensor, Tensor]:
    x = x_MK.float().unflatten(1, (-1, BLOCK))
    codes, scales = encode(x, x.abs().amax(-1, keepdim=True) if x.numel() else x[..., :1], pow2)
    return codes.flatten(1), scales[..., 0].t().contiguous()


def columns_reference(x_MK: Tensor, pow2: bool) -> tuple[Tensor, Tensor]:
    return rows_reference(x_MK.t().contiguous(), pow2)


def no_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """What an op that can quantise by column returns where nobody wants that."""
    return x.new_empty(0, 0, dtype=FP8), x.new_empty(0, 0, dtype=torch.float32)


def _both_reference(x_MK: Tensor, pow2: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *rows_reference(x_MK, pow2), *columns_reference(x_MK, pow2)


def _blocks_reference(w_ENK: Tensor, pow2: bool) -> tuple[Tensor, Tensor]:
    e, n, k = w_ENK.shape
    w = w_ENK.float().view(e, n // BLOCK, BLOCK, k // BLOCK, BLOCK)
    codes, scales = encode(w, w.abs().amax((2, 4), keepdim=True) if w.numel() else w[:, :, :1, :, :1], pow2)
    return codes.view(e, n, k), scales[:, :, 0, :, 0].contiguous()


def _transpose_reference(codes_ENK: Tensor) -> Tensor:
    return codes_ENK.view(torch.uint8).transpose(1, 2).contiguous().view(FP8)


def rows_fake(x_MK: Tensor, pow2: bool) -> tuple[Tensor, Tensor]:
    m, k = x_MK.shape
    return x_MK.new_empty(m, k, dtype=FP8), x_MK.new_empty(k // BLOCK, m, dtype=torch.float32)


def columns_fake(x_MK: Tensor, pow2: bool) -> tuple[Tensor, Tensor]:
    m, k = x_MK.shape
    return x_MK.new_empty(k, m, dtype=FP8), x_MK.new_empty(m // BLOCK, k, dtype=torch.float32)


def _both_fake(x_MK: Tensor, pow2: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *rows_fake(x_MK, pow2), *columns_fake(x_MK, pow2)


def _blocks_fake(w_ENK: Tensor, pow2: bool) -> tuple[Tensor, Tensor]:
    e, n, k = w_ENK.shape
    return w_ENK.new_empty(e, n, k, dtype=FP8), w_ENK.new_empty(e, n // BLOCK, k // BLOCK, dtype=torch.float32)


def _transpose_fake(codes_ENK: Tensor) -> Tensor:
    e, n, k = codes_ENK.shape
    return codes_ENK.new_empty(e, k, n)


_rows_op = define("quantise_rows(Tensor x_MK, bool pow2) -> (Tensor, Tensor)", rows_reference, rows_fake)
_columns_op = define("quantise_columns(Tensor x_MK, bool pow2) -> (Tensor, Tensor)", columns_reference, columns_fake)
_both_op = define("quantise_both(Tensor x_MK, bool pow2) -> (Tensor, Tensor, Tensor, Tensor)", _both_reference, _both_fake)
_blocks_op = define("quantise_blocks(Tensor w_ENK, bool pow2) -> (Tensor, Tensor)", _blocks_reference, _blocks_fake)
_transpose_op = define("transpose_codes(Tensor codes_ENK) -> Tensor", _transpose_reference, _transpose_fake)
