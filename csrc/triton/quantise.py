"""The quantisers: a tile of 128 x 128 is read once, and its row copy, its column copy or both are written from registers.

128 rows make a column block and 128 columns a row block, so no tile needs another. Programs run along the row first, since
neighbours then read one run of memory. The transposed copy goes through shared memory, so that both copies leave in 16-byte
stores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from prl_triton.aot import Aot, shipped
from prl_triton.configs import config
from prl_triton.fp8 import block_scale, encode, magnitude, widen
from prl_triton.launch import launch

BLOCK = 128


@triton.jit
def store_rows(x, codes, scales, first_row, n_rows, first_column, n_columns, ROWS: tl.constexpr, POW2: tl.constexpr):
    """Quantise a float32 tile [ROWS, 128] by row: codes [n_rows, n_columns], scales [n_columns / 128, n_rows]."""
    scale, reciprocal = block_scale(tl.max(magnitude(x), axis=1), POW2)
    rows = first_row + tl.arange(0, ROWS)
    columns = first_column + tl.arange(0, 128)
    inside = rows < n_rows
    tl.store(scales + (first_column // 128).to(tl.int64) * n_rows + rows, scale, mask=inside)
    at = codes + rows.to(tl.int64)[:, None] * n_columns + columns[None, :]
    tl.store(at, encode(x, reciprocal[:, None]), mask=inside[:, None])


@triton.jit
def store_columns(x, codes, scales, first_row, n_blocks, first_column, n_columns, COLUMNS: tl.constexpr, POW2: tl.constexpr):
    """Quantise a float32 tile [128, COLUMNS] by column: codes [n_columns, n_blocks · 128], scales [n_blocks, n_columns]."""
    scale, reciprocal = block_scale(tl.max(magnitude(x), axis=0), POW2)
    columns = first_column + tl.arange(0, COLUMNS)
    inside = columns < n_columns
    tl.store(scales + (first_row // 128).to(tl.int64) * n_columns + columns, scale, mask=inside)
    at = codes + columns.to(tl.int64)[:, None] * (n_blocks * 128) + (first_row + tl.arange(0, 128))[None, :]
    tl.store(at, tl.trans(encode(x, reciprocal[None, :])), mask=inside[:, None])


@triton.jit(do_not_specialize=["n_rows"])
def _rows(x, codes, scales, n_rows, n_columns, ROWS: tl.constexpr, POW2: tl.constexpr):
    program = tl.program_id(0)
    n_blocks = n_columns // 128
    first_row, first_column = program // n_blocks * ROWS, program % n_blocks * 128
    rows = first_row + tl.arange(0, ROWS)
    at = x + rows.to(tl.int64)[:, None] * n_columns + (first_column + tl.arange(0, 128))[None, :]
    tile = widen(tl.load(at, mask=(rows < n_rows)[:, None], other=0))
    store_rows(tile, codes, scales, first_row, n_rows, first_column, n_columns, ROWS, POW2)


@triton.jit(do_not_specialize=["n_blocks"])
def _columns(x, codes, scales, n_blocks, n_columns, COLUMNS: tl.constexpr, POW2: tl.constexpr):
    program = tl.program_id(0)
    across = tl.cdiv(n_columns, COLUMNS)
    first_row, first_column = program // across * 128, program % across * COLUMNS
    columns = first_column + tl.arange(0, COLUMNS)
    at = x + (first_row + tl.arange(0, 128)).to(tl.int64)[:, None] * n_columns + columns[None, :]
    tile = widen(tl.load(at, mask=(columns < n_columns)[None, :], other=0))
    store_columns(tile, codes, scales, first_row, n_blocks, first_column, n_columns, COLUMNS, POW2)


@triton.jit(do_not_specialize=["n_blocks"])
def _both(x, codes, scales, t_codes, t_scales, n_blocks, n_columns, POW2: tl.constexpr):
    program = tl.program_id(0)
    across = n_columns // 128
    first_row, first_column = program // across * 128, program % across * 128
    rows = first_row + tl.arange(0, 128)
    tile = widen(tl.load(x + rows.to(tl.int64)[:, None] * n_columns + (first_column + tl.arange(0, 128))[None, :]))
    store_rows(tile, codes, scales, first_row, n_blocks * 128, first_column, n_columns, 128, POW2)
    store_columns(tile, t_codes, t_scales, first_row, n_blocks, first_column, n_columns, 128, POW2)


@triton.jit
def _blocks(w, codes, scales, n_columns, POW2: tl.constexpr):
    program = tl.program_id(0)
    across = n_columns // 128
    rows = program // across * 128 + tl.arange(0, 128)
    offsets = rows.to(tl.int64)[:, None] * n_columns + (program % across * 128 + tl.arange(0, 128))[None, :]
    tile = widen(tl.load(w + offsets))
    scale, reciprocal = block_scale(tl.max(tl.max(magnitude(tile), axis=1), axis=0), POW2)
    tl.store(scales + program, scale)
    tl.store(codes + offsets, encode(tile, reciprocal))


@triton.jit
def _transpose(codes, out, n_rows, n_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    program = tl.program_id(0)
    down, across = tl.cdiv(n_rows, ROWS), tl.cdiv(n_columns, COLUMNS)
    expert = (program // (down * across)).to(tl.int64) * n_rows * n_columns
    rows = program // across % down * ROWS + tl.arange(0, ROWS)
    columns = program % across * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
    tile = tl.load(codes + expert + rows.to(tl.int64)[:, None] * n_columns + columns[None, :], mask=inside, other=0)
    at = out + expert + columns.to(tl.int64)[:, None] * n_rows + rows[None, :]
    tl.store(at, tl.trans(tile), mask=tl.trans(inside))


def new_rows(x: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Empty (codes [rows, columns], scales [columns / 128, rows]) beside `x`."""
    codes = x.new_empty(rows, columns, dtype=torch.float8_e4m3fn)
    return codes, x.new_empty(columns // BLOCK, rows, dtype=torch.float32)


def new_columns(x: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Empty (codes [columns, rows], scales [rows / 128, columns]) beside `x`."""
    codes = x.new_empty(columns, rows, dtype=torch.float8_e4m3fn)
    return codes, x.new_empty(rows // BLOCK, columns, dtype=torch.float32)


def raw(codes: Tensor) -> Tensor:
    """The bytes of codes, as the kernels take them."""
    return codes.view(torch.uint8)


def quantise_rows(x_MK: Tensor, pow2: bool) -> tuple[Tensor, Tensor]:
    m, k = x_MK.shape
    codes, scales = new_rows(x_MK, m, k)
    programs = triton.cdiv(m, config("quantise_rows")["ROWS"]) * (k // BLOCK)
    launch("quantise_rows", _rows, programs, x_MK, raw(codes), scales, m, k, POW2=pow2)
    return codes, scales


def quantise_columns(x_MK: Tensor, pow2: bool) -> tuple[Tensor, Tensor]:
    m, k = x_MK.shape
    codes, scales = new_columns(x_MK, m, k)
    programs = (m // BLOCK) * triton.cdiv(k, config("quantise_columns")["COLUMNS"])
    launch("quantise_columns", _columns, programs, x_MK, raw(codes), scales, m // BLOCK, k, POW2=pow2)
    return codes, scales


def quantise_both(x_MK: Tensor, pow2: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m, k = x_MK.shape
    rows, columns = new_rows(x_MK, m, k), new_columns(x_MK, m, k)
    programs = (m // BLOCK) * (k // BLOCK)
    args = (x_MK, raw(rows[0]), rows[1], raw(columns[0]), columns[1], m // BLOCK, k)
    launch("quantise_both", _both, programs, *args, POW2=pow2)
    return *rows, *columns


def quantise_blocks(w_ENK: Tensor, pow2: bool) -> tuple[Tensor, Tensor]:
    e, n, k = w_ENK.shape
    codes = w_ENK.new_empty(e, n, k, dtype=torch.float8_e4m3fn)
    scales = w_ENK.new_empty(e, n // BLOCK, k // BLOCK, dtype=torch.float32)
    launch("quantise_blocks", _blocks, scales.numel(), w_ENK, raw(codes), scales, k, POW2=pow2)
    return codes, scales


def transpose_codes(codes_ENK: Tensor) -> Tensor:
    e, n, k = codes_ENK.shape
    out = codes_ENK.new_empty(e, k, n)
    table = config("transpose_codes")
    programs = e * triton.cdiv(n, table["ROWS"]) * triton.cdiv(k, table["COLUMNS"])
    launch("transpose_codes", _transpose, programs, raw(codes_ENK), raw(out), n, k)
    return out


OPS: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (quantise_rows, quantise_columns, quantise_both, quantise_blocks, transpose_codes)
}


_SIZES = {"x": "*bf16", "codes": "*u8", "scales": "*fp32", "n_columns": "i32"}
_TRANSPOSED = {"t_codes": "*u8", "t_scales": "*fp32"}
AOT: list[Aot] = [
    shipped("quantise_rows", _rows, {**_SIZES, "n_rows": "i32"}, POW2=False),
    shipped("quantise_rows", _rows, {**_SIZES, "x": "*fp32", "n_rows": "i32"}, POW2=True),
    shipped("quantise_columns", _columns, {**_SIZES, "n_blocks": "i32"}, POW2=False),
    shipped("quantise_columns", _columns, {**_SIZES, "x": "*fp32", "n_blocks": "i32"}, POW2=True),
    shipped("quantise_both", _both, {**_SIZES, **_TRANSPOSED, "n_blocks": "i32"}, POW2=False),
    shipped("quantise_both", _both, {**_SIZES, **_TRANSPOSED, "x": "*fp32", "n_blocks": "i32"}, POW2=True),
    shipped("quantise_blocks", _blocks, {"w": "*bf16", "codes": "*u8", "scales": "*fp32", "n_columns": "i32"}, POW2=False),
    shipped("quantise_blocks", _blocks, {"w": "*fp32", "codes": "*u8", "scales": "*fp32", "n_columns": "i32"}, POW2=True),
    shipped("transpose_codes", _transpose, {"codes": "*u8", "out": "*u8", "n_rows": "i32", "n_columns": "i32"}),
]
