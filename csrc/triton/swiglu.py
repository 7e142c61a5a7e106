"""SwiGLU and its gradient, plain and quantised: each element is read once, and every product is float32 until it is rounded.

The quantising kernels have tiles of 128 x 128 of the inner width, which are whole blocks of gate, up and activation alike. The
gradient of the routing weight is a sum over the inner width; each tile writes its share and a second, tiny kernel adds them
in order, so that no atomics decide the bits.
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
from prl_triton.exponential import sigmoid
from prl_triton.fp8 import narrow, widen
from prl_triton.launch import launch
from prl_triton.quantise import BLOCK, new_columns, new_rows, raw, store_columns, store_rows


@triton.jit
def _d_gate(gate, up, grad):
    """grad · up · silu'(gate), where silu' = σ · (1 + gate · (1 − σ))."""
    s = sigmoid(gate)
    return grad * up * (s * (1 + gate * (1 - s)))


@triton.jit(do_not_specialize=["n_rows"])
def _swiglu(gate_up, out, n_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    program = tl.program_id(0)
    across = tl.cdiv(width, COLUMNS)
    rows = (program // across * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = (program % across * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (rows < n_rows) & (columns < width)
    at = gate_up + rows * (2 * width) + columns
    gate = widen(tl.load(at, mask=inside, other=0))
    up = widen(tl.load(at + width, mask=inside, other=0))
    tl.store(out + rows * width + columns, narrow(gate * sigmoid(gate) * up, out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n_rows"])
def _swiglu_backward(gate_up, grad, out, n_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    program = tl.program_id(0)
    across = tl.cdiv(width, COLUMNS)
    rows = (program // across * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = (program % across * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (rows < n_rows) & (columns < width)
    offsets = rows * (2 * width) + columns
    gate = widen(tl.load(gate_up + offsets, mask=inside, other=0))
    up = widen(tl.load(gate_up + offsets + width, mask=inside, other=0))
    slope = widen(tl.load(grad + rows * width + columns, mask=inside, other=0))
    tl.store(out + offsets, narrow(_d_gate(gate, up, slope), out.dtype.element_ty), mask=inside)
    tl.store(out + offsets + width, narrow(slope * (gate * sigmoid(gate)), out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n_rows"])
def _swiglu_quantise_rows(gate_up, codes, scales, n_rows, width, ROWS: tl.constexpr, POW2: tl.constexpr):
    program = tl.program_id(0)
    across = width // 128
    first_row, first_column = program // across * ROWS, program % across * 128
    rows = first_row + tl.arange(0, ROWS)
    at = gate_up + rows.to(tl.int64)[:, None] * (2 * width) + (first_column + tl.arange(0, 128))[None, :]
    inside = (rows < n_rows)[:, None]
    gate = widen(tl.load(at, mask=inside, other=0))
    product = gate * sigmoid(gate) * widen(tl.load(at + width, mask=inside, other=0))
    store_rows(product, codes, scales, first_row, n_rows, first_column, width, ROWS, POW2)


@triton.jit(do_not_specialize=["n_blocks"])
def _swiglu_quantise_both(gate_up, codes, scales, t_codes, t_scales, n_blocks, width, POW2: tl.constexpr):
    program = tl.program_id(0)
    across = width // 128
    first_row, first_column = program // across * 128, program % across * 128
    rows = first_row + tl.arange(0, 128)
    at = gate_up + rows.to(tl.int64)[:, None] * (2 * width) + (first_column + tl.arange(0, 128))[None, :]
    gate = widen(tl.load(at))
    product = gate * sigmoid(gate) * widen(tl.load(at + width))
    store_rows(product, codes, scales, first_row, n_blocks * 128, first_column, width, 128, POW2)
    store_columns(product, t_codes, t_scales, first_row, n_blocks, first_column, width, 128, POW2)


@triton.jit(do_not_specialize=["n_blocks"])
def _swiglu_backward_quantise(
    gate_up, grad, weights, codes, scales, t_codes, t_scales, act_codes, act_scales, shares, n_blocks, width,
    POW2: tl.constexpr,
):  # fmt: skip
    """Two programs have each tile, one after the other, so that the second finds it in the cache: three results of 128 x 128
    at once are more than the registers hold. Each loads for itself, or what it has loaded would wait in registers, too."""
    program = tl.program_id(0) // 2
    across = width // 128
    block = program % across
    first_row, first_column = program // across * 128, block * 128
    rows = (first_row + tl.arange(0, 128)).to(tl.int64)
    columns = (first_column + tl.arange(0, 128))[None, :]
    at = gate_up + rows[:, None] * (2 * width) + columns
    grad += rows[:, None] * width + columns
    if tl.program_id(0) % 2 == 0:
        gate, up, slope = widen(tl.load(at)), widen(tl.load(at + width)), widen(tl.load(grad))
        weight = tl.load(weights + rows)[:, None]
        d_gate = _d_gate(gate, up, slope * weight)
        store_rows(d_gate, codes, scales, first_row, n_blocks * 128, first_column, 2 * width, 128, POW2)
        store_columns(d_gate, t_codes, t_scales, first_row, n_blocks, first_column, 2 * width, 128, POW2)
    else:
        weight = tl.load(weights + rows)[:, None]
        slope, up, gate = widen(tl.load(grad)), widen(tl.load(at + width)), widen(tl.load(at))
        silu = gate * sigmoid(gate)
        product, d_up = silu * up, slope * weight * silu
        tl.store(shares + block.to(tl.int64) * n_blocks * 128 + rows, tl.sum(slope * product, axis=1))
        store_columns(product * weight, act_codes, act_scales, first_row, n_blocks, first_column, width, 128, POW2)
        store_rows(d_up, codes, scales, first_row, n_blocks * 128, first_column + width, 2 * width, 128, POW2)
        store_columns(d_up, t_codes, t_scales, first_row, n_blocks, first_column + width, 2 * width, 128, POW2)


@triton.jit(do_not_specialize=["n_rows"])
def _sum_shares(shares, out, n_rows, n_shares, ROWS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS,), tl.float32)
    for share in range(n_shares):
        total += tl.load(shares + tl.cast(share, tl.int64) * n_rows + rows, mask=rows < n_rows, other=0)
    tl.store(out + rows, total, mask=rows < n_rows)


def swiglu(gate_up_RJ: Tensor) -> Tensor:
    rows, width = gate_up_RJ.shape[0], gate_up_RJ.shape[1] // 2
    out_RI = gate_up_RJ.new_empty(rows, width)
    launch("swiglu", _swiglu, _tiles("swiglu", rows, width), gate_up_RJ, out_RI, rows, width)
    return out_RI


def swiglu_backward(gate_up_RJ: Tensor, grad_RI: Tensor) -> Tensor:
    rows, width = grad_RI.shape
    out_RJ = torch.empty_like(gate_up_RJ)
    programs = _tiles("swiglu_backward", rows, width)
    launch("swiglu_backward", _swiglu_backward, programs, gate_up_RJ, grad_RI, out_RJ, rows, width)
    return out_RJ


def swiglu_quantise(gate_up_RJ: Tensor, columns: bool, pow2: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, width = gate_up_RJ.shape[0], gate_up_RJ.shape[1] // 2
    by_row = new_rows(gate_up_RJ, rows, width)
    by_column = new_columns(gate_up_RJ, *((rows, width) if columns else (0, 0)))
    args = (gate_up_RJ, raw(by_row[0]), by_row[1])
    if columns:
        args = (*args, raw(by_column[0]), by_column[1], rows // BLOCK, width)
        programs = (rows // BLOCK) * (width // BLOCK)
        launch("swiglu_quantise.both", _swiglu_quantise_both, programs, *args, POW2=pow2)
    else:
        programs = triton.cdiv(rows, config("swiglu_quantise.rows")["ROWS"]) * (width // BLOCK)
        launch("swiglu_quantise.rows", _swiglu_quantise_rows, programs, *args, rows, width, POW2=pow2)
    return *by_row, *by_column


def swiglu_backward_quantise(gate_up_RJ: Tensor, grad_RI: Tensor, weights_R: Tensor, pow2: bool) -> tuple[Tensor, ...]:
    rows, width = grad_RI.shape
    by_row, by_column = new_rows(gate_up_RJ, rows, 2 * width), new_columns(gate_up_RJ, rows, 2 * width)
    weighted, d_weights_R = new_columns(gate_up_RJ, rows, width), torch.empty_like(weights_R)
    shares = weights_R.new_empty(width // BLOCK, rows)
    results = (raw(by_row[0]), by_row[1], raw(by_column[0]), by_column[1], raw(weighted[0]), weighted[1], shares)
    args = (gate_up_RJ, grad_RI, weights_R, *results, rows // BLOCK, width)
    programs = 2 * (rows // BLOCK) * (width // BLOCK)
    launch("swiglu_backward_quantise.tiles", _swiglu_backward_quantise, programs, *args, POW2=pow2)
    programs = triton.cdiv(rows, config("swiglu_backward_quantise.sum")["ROWS"])
    launch("swiglu_backward_quantise.sum", _sum_shares, programs, shares, d_weights_R, rows, len(shares))
    return *by_row, *by_column, *weighted, d_weights_R


def _tiles(op: str, rows: int, width: int) -> int:
    table = config(op)
    return triton.cdiv(rows, table["ROWS"]) * triton.cdiv(width, table["COLUMNS"])


OPS: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (swiglu, swiglu_backward, swiglu_quantise, swiglu_backward_quantise)
}


def _by_type(kind: str) -> list[Aot]:
    plain = {"gate_up": kind, "out": kind, "n_rows": "i32", "width": "i32"}
    rows = {"gate_up": kind, "codes": "*u8", "scales": "*fp32", "width": "i32"}
    both = {**rows, "t_codes": "*u8", "t_scales": "*fp32", "n_blocks": "i32"}
    backward = {**both, "grad": kind, "weights": "*fp32", "act_codes": "*u8", "act_scales": "*fp32", "shares": "*fp32"}
    return [
        shipped("swiglu", _swiglu, plain),
        shipped("swiglu_backward", _swiglu_backward, {**plain, "grad": kind}),
        *(
            entry
            for pow2 in (False, True)
            for entry in (
                shipped("swiglu_quantise.rows", _swiglu_quantise_rows, {**rows, "n_rows": "i32"}, POW2=pow2),
                shipped("swiglu_quantise.both", _swiglu_quantise_both, both, POW2=pow2),
                shipped("swiglu_backward_quantise.tiles", _swiglu_backward_quantise, backward, POW2=pow2),
            )
        ),
    ]


AOT: list[Aot] = [
    *_by_type("*bf16"),
    *_by_type("*fp32"),
    shipped(
        "swiglu_backward_quantise.sum",
        _sum_shares,
        {"shares": "*fp32", "out": "*fp32", "n_rows": "i32", "n_shares": "i32"},
        bandwidth=False,
    ),
]
