"""Token movement. Every output row is gathered by one program, so that nothing is written twice and no order depends on timing.

The stable order of the slots takes four small kernels and no atomics: each block of slots counts its experts, each expert sums
its counts over the blocks, the counts become padded starts, and each slot's row is its expert's start, plus those of the
expert in earlier blocks, plus those before it in its own block, which the block compares in pairs.
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
from prl_triton.fp8 import narrow, widen
from prl_triton.launch import launch
from prl_triton.quantise import BLOCK, new_columns, new_rows, raw, store_columns, store_rows


@triton.jit(do_not_specialize=["n_slots", "n_blocks"])
def _count(ids, histogram, n_slots, n_blocks, n_experts, SLOTS: tl.constexpr, EXPERTS: tl.constexpr):
    """histogram [n_experts, n_blocks]: slots of each expert in each block."""
    block = tl.program_id(0)
    slots = block * SLOTS + tl.arange(0, SLOTS)
    expert_of_slot = tl.load(ids + slots, mask=slots < n_slots, other=-1)
    for first in range(0, n_experts, EXPERTS):
        experts = first + tl.arange(0, EXPERTS)
        counts = tl.sum((expert_of_slot[:, None] == experts[None, :]).to(tl.int32), axis=0)
        tl.store(histogram + experts.to(tl.int64) * n_blocks + block, counts, mask=experts < n_experts)


@triton.jit(do_not_specialize=["n_blocks"])
def _sum_blocks(histogram, counts, n_blocks, BLOCKS: tl.constexpr):
    """Each expert's counts become the sums over the blocks before; their total is the expert's count."""
    expert = tl.program_id(0)
    row = histogram + expert.to(tl.int64) * n_blocks
    total = tl.zeros((), tl.int32)
    for first in range(0, n_blocks, BLOCKS):
        blocks = first + tl.arange(0, BLOCKS)
        here = tl.load(row + blocks, mask=blocks < n_blocks, other=0)
        tl.store(row + blocks, total + tl.cumsum(here, 0) - here, mask=blocks < n_blocks)
        total += tl.sum(here, 0)
    tl.store(counts + expert, total.to(tl.int64))


@triton.jit
def _place_experts(counts, starts, n_experts, align, EXPERTS: tl.constexpr):
    experts = tl.arange(0, EXPERTS)
    count = tl.load(counts + experts, mask=experts < n_experts, other=0)
    ends = tl.cumsum((count + align - 1) // align * align, 0)
    tl.store(starts + 1 + experts, ends, mask=experts < n_experts)
    tl.store(starts + experts, tl.zeros_like(ends), mask=experts == 0)


@triton.jit(do_not_specialize=["n_slots", "n_blocks"])
def _place_slots(ids, before, starts, source, position, n_slots, n_blocks, n_experts, SLOTS: tl.constexpr):
    block = tl.program_id(0)
    index = tl.arange(0, SLOTS)
    slots = block * SLOTS + index
    inside = slots < n_slots
    expert = tl.load(ids + slots, mask=inside, other=-1)
    has_row = (expert >= 0) & (expert < n_experts)
    earlier = (expert[:, None] == expert[None, :]) & (index[None, :] < index[:, None])
    row = tl.sum(earlier.to(tl.int32), axis=1).to(tl.int64)
    row += tl.load(before + expert * n_blocks + block, mask=has_row, other=0)
    row += tl.load(starts + expert, mask=has_row, other=0)
    tl.store(position + slots, tl.where(has_row, row, -1), mask=inside)
    tl.store(source + row, slots.to(tl.int64), mask=has_row)


@triton.jit(do_not_specialize=["n_rows"])
def _permute(x, source, out, n_rows, width, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    program = tl.program_id(0)
    across = tl.cdiv(width, COLUMNS)
    rows = program // across * ROWS + tl.arange(0, ROWS)
    columns = program % across * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.load(source + rows, mask=rows < n_rows, other=-1)
    inside = (columns < width)[None, :]
    at = x + (slot // K)[:, None] * width + columns[None, :]
    tile = tl.load(at, mask=(slot >= 0)[:, None] & inside, other=0)
    tl.store(out + rows.to(tl.int64)[:, None] * width + columns[None, :], tile, mask=(rows < n_rows)[:, None] & inside)


@triton.jit(do_not_specialize=["n_blocks"])
def _permute_quantise(
    x, source, codes, scales, t_codes, t_scales, n_blocks, width, K: tl.constexpr, BY_COLUMN: tl.constexpr, POW2: tl.constexpr
):
    program = tl.program_id(0)
    across = width // 128
    first_row, first_column = program // across * 128, program % across * 128
    slot = tl.load(source + first_row + tl.arange(0, 128))
    at = x + (slot // K)[:, None] * width + (first_column + tl.arange(0, 128))[None, :]
    tile = widen(tl.load(at, mask=(slot >= 0)[:, None], other=0))
    store_rows(tile, codes, scales, first_row, n_blocks * 128, first_column, width, 128, POW2)
    if BY_COLUMN:
        store_columns(tile, t_codes, t_scales, first_row, n_blocks, first_column, width, 128, POW2)


@triton.jit(do_not_specialize=["n_tokens"])
def _combine(
    rows, weights, position, out, n_tokens, width, K: tl.constexpr, WEIGHTED: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    across = tl.cdiv(width, COLUMNS)
    tokens = (program // across * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    columns = program % across * COLUMNS + tl.arange(0, COLUMNS)
    exists, inside = tokens < n_tokens, (columns < width)[None, :]
    total = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(position + tokens * K + k, mask=exists, other=-1)
        has_row = (row >= 0)[:, None]
        part = widen(tl.load(rows + row[:, None] * width + columns[None, :], mask=has_row & inside, other=0))
        if WEIGHTED:
            part *= tl.load(weights + tokens * K + k, mask=exists, other=0)[:, None]
        total += tl.where(has_row, part, 0.0)
    at = out + tokens[:, None] * width + columns[None, :]
    tl.store(at, narrow(total, out.dtype.element_ty), mask=exists[:, None] & inside)


@triton.jit(do_not_specialize=["n_rows"])
def _combine_backward(
    d_out, rows, weights, source, d_rows, d_weights, n_rows, width, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Each program has whole rows, so that d_weights, a sum over the width, needs no second pass."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    exists = row < n_rows
    slot = tl.load(source + row, mask=exists, other=-1)
    has_slot = slot >= 0
    weight = tl.load(weights + slot, mask=has_slot, other=0)[:, None]
    slopes = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, width, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        inside = (columns < width)[None, :]
        at = row[:, None] * width + columns[None, :]
        grad = widen(tl.load(d_out + (slot // K)[:, None] * width + columns[None, :], mask=has_slot[:, None] & inside, other=0))
        slopes += grad * widen(tl.load(rows + at, mask=has_slot[:, None] & inside, other=0))
        tl.store(d_rows + at, narrow(grad * weight, d_rows.dtype.element_ty), mask=exists[:, None] & inside)
    tl.store(d_weights + slot, tl.sum(slopes, axis=1), mask=has_slot)


def sort_rows(ids_TK: Tensor, n_experts: int, align: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    slots = ids_TK.numel()
    rows = (slots + min(slots, n_experts) * (align - 1)) // align * align
    source_R, position_TK = ids_TK.new_full((rows,), -1), torch.empty_like(ids_TK)
    if not slots or not n_experts:
        return source_R, position_TK.fill_(-1), ids_TK.new_zeros(n_experts + 1), ids_TK.new_zeros(n_experts)
    starts_E1, counts_E = ids_TK.new_empty(n_experts + 1), ids_TK.new_empty(n_experts)
    blocks = triton.cdiv(slots, config("sort_rows.count")["SLOTS"])
    histogram = ids_TK.new_empty(n_experts, blocks, dtype=torch.int32)
    launch("sort_rows.count", _count, blocks, ids_TK, histogram, slots, blocks, n_experts)
    launch("sort_rows.sum", _sum_blocks, n_experts, histogram, counts_E, blocks)
    experts = triton.next_power_of_2(n_experts)
    launch("sort_rows.experts", _place_experts, 1, counts_E, starts_E1, n_experts, align, EXPERTS=experts)
    args = (ids_TK, histogram, starts_E1, source_R, position_TK, slots, blocks, n_experts)
    launch("sort_rows.slots", _place_slots, blocks, *args)
    return source_R, position_TK, starts_E1, counts_E


def permute(x_TD: Tensor, source_R: Tensor, position_TK: Tensor) -> Tensor:
    rows, width = len(source_R), x_TD.shape[1]
    out_RD = x_TD.new_empty(rows, width)
    programs = _tiles("permute", "ROWS", rows, width)
    launch("permute", _permute, programs, x_TD, source_R, out_RD, rows, width, K=_slots(position_TK))
    return out_RD


def permute_quantise(
    x_TD: Tensor, source_R: Tensor, position_TK: Tensor, columns: bool, pow2: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, width = len(source_R), x_TD.shape[1]
    by_row, by_column = new_rows(x_TD, rows, width), new_columns(x_TD, *((rows, width) if columns else (0, 0)))
    args = (x_TD, source_R, raw(by_row[0]), by_row[1], raw(by_column[0]), by_column[1], rows // BLOCK, width)
    programs = (rows // BLOCK) * (width // BLOCK)
    constexprs = {"K": _slots(position_TK), "BY_COLUMN": columns, "POW2": pow2}
    launch("permute_quantise", _permute_quantise, programs, *args, **constexprs)
    return *by_row, *by_column


def combine(rows_RD: Tensor, weights_TK: Tensor | None, source_R: Tensor, position_TK: Tensor) -> Tensor:
    (tokens, k), width = position_TK.shape, rows_RD.shape[1]
    out_TD = rows_RD.new_empty(tokens, width)
    args = (rows_RD, rows_RD if weights_TK is None else weights_TK, position_TK, out_TD, tokens, width)
    programs = _tiles("combine", "TOKENS", tokens, width)
    launch("combine", _combine, programs, *args, K=k, WEIGHTED=weights_TK is not None)
    return out_TD


def combine_backward(
    d_out_TD: Tensor, rows_RD: Tensor, weights_TK: Tensor, source_R: Tensor, position_TK: Tensor
) -> tuple[Tensor, Tensor]:
    d_rows_RD, d_weights_TK = torch.empty_like(rows_RD), torch.zeros_like(weights_TK)
    rows, width = rows_RD.shape
    args = (d_out_TD, rows_RD, weights_TK, source_R, d_rows_RD, d_weights_TK, rows, width)
    programs = triton.cdiv(rows, config("combine_backward")["ROWS"])
    launch("combine_backward", _combine_backward, programs, *args, K=_slots(position_TK))
    return d_rows_RD, d_weights_TK


def _slots(position_TK: Tensor) -> int:
    """Slots per token; 1 where there are none, since the row of a slot is divided by it."""
    return max(position_TK.shape[1], 1)


def _tiles(op: str, down: str, rows: int, width: int) -> int:
    table = config(op)
    return triton.cdiv(rows, table[down]) * triton.cdiv(width, table["COLUMNS"])


OPS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (sort_rows, permute, permute_quantise, combine, combine_backward)}

_SORT = {"n_blocks": "i32", "n_slots": "i32", "n_experts": "i32"}
_MOVE = {"source": "*i64", "n_rows": "i32", "width": "i32"}


def _by_type(kind: str) -> list[Aot]:
    quantised = {"x": kind, "source": "*i64", "codes": "*u8", "scales": "*fp32", "t_codes": "*u8", "t_scales": "*fp32"}
    quantised |= {"n_blocks": "i32", "width": "i32"}
    combined = {"rows": kind, "weights": "*fp32", "position": "*i64", "out": kind, "n_tokens": "i32", "width": "i32"}
    backward = {**_MOVE, "d_out": kind, "rows": kind, "weights": "*fp32", "d_rows": kind, "d_weights": "*fp32"}
    return [
        shipped("permute", _permute, {**_MOVE, "x": kind, "out": kind}, K=8),
        shipped("permute_quantise", _permute_quantise, quantised, K=8, BY_COLUMN=False, POW2=False),
        shipped("permute_quantise", _permute_quantise, quantised, K=8, BY_COLUMN=True, POW2=False),
        shipped("permute_quantise", _permute_quantise, quantised, K=8, BY_COLUMN=True, POW2=True),
        shipped("combine", _combine, combined, K=8, WEIGHTED=True),
        shipped("combine", _combine, {**combined, "weights": kind}, K=8, WEIGHTED=False),
        shipped("combine_backward", _combine_backward, backward, K=8),
    ]


AOT: list[Aot] = [
    shipped("sort_rows.count", _count, {**_SORT, "ids": "*i64", "histogram": "*i32"}, bandwidth=False),
    shipped("sort_rows.sum", _sum_blocks, {"histogram": "*i32", "counts": "*i64", "n_blocks": "i32"}, bandwidth=False),
    shipped(
        "sort_rows.experts",
        _place_experts,
        {"counts": "*i64", "starts": "*i64", "n_experts": "i32", "align": "i32"},
        bandwidth=False,
        EXPERTS=256,
    ),
    shipped(
        "sort_rows.slots",
        _place_slots,
        {**_SORT, "ids": "*i64", "before": "*i32", "starts": "*i64", "source": "*i64", "position": "*i64"},
        bandwidth=False,
    ),
    *_by_type("*bf16"),
    *_by_type("*fp32"),
]
