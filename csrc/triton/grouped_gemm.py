"""Grouped GEMMs on tensor cores; float32 ones on the ordinary units.

The grid covers the most tiles that any groups can need, and a program finds its tile's group on the device, so that nothing
waits for the host. Every row of the output is written, those of no group with zeros. A tile's shape and the order of K are the
same for every number of rows. FP8 tiles come through TMA descriptors (every size is a multiple of 128 there); the others
through pointers, for which any size will do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from prl_triton.aot import Aot, shipped
from prl_triton.configs import config
from prl_triton.fp8 import HARDWARE, narrow, widen
from prl_triton.launch import launch

BLOCK = 128
GENERAL = ["R", "E", "tiles_m", "starts_ptr", "counts_ptr"]
"""What kernels are not compiled anew for: numbers of rows and groups, and where the groups' sizes lie."""


@triton.jit
def multiply(a, b, total):
    """total + a · b; of float32 operands in IEEE arithmetic. The interpreter multiplies no bfloat16."""
    if HARDWARE:
        return tl.dot(a, b, total, input_precision="ieee")
    else:
        return tl.dot(widen(a), widen(b), total)


@triton.jit
def ordered(program, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """(tile of rows, tile of columns): GROUP_M tiles of rows pass all columns together, so that both operands stay in L2."""
    first = program // (GROUP_M * tiles_n) * GROUP_M
    size = tl.minimum(tiles_m - first, GROUP_M)
    place = program % (GROUP_M * tiles_n)
    return first + place % size, place // size


@triton.jit
def product(
    a_ptr,
    rows,
    w_ptr,
    columns,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """float32 [BLOCK_M, BLOCK_N]: rows of a [·, K] times rows of w [N, K], or if TRANSPOSED columns of w [K, N].

    Every index must exist, except that columns beyond N count as zeros. WIDE: multiply in float32 whatever the types.
    """
    k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows.to(tl.int64)[:, None] * K + k[None, :]
    if TRANSPOSED:
        w_ptrs = w_ptr + k.to(tl.int64)[:, None] * N + columns[None, :]
    else:
        w_ptrs = w_ptr + columns.to(tl.int64)[None, :] * K + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = k < K - start
        a = tl.load(a_ptrs, mask=inside[None, :], other=0.0)
        if TRANSPOSED:
            w = tl.load(w_ptrs, mask=inside[:, None] & (columns < N)[None, :], other=0.0)
            w_ptrs += N * BLOCK_K
        else:
            w = tl.load(w_ptrs, mask=inside[:, None], other=0.0)
            w_ptrs += BLOCK_K
        total = multiply(widen(a), widen(w), total) if WIDE else multiply(a, w, total)
        a_ptrs += BLOCK_K
    return total


@triton.jit
def tile_of_rows(tile, starts_ptr, counts_ptr, R, E, BLOCK_M: tl.constexpr, SPANS: tl.constexpr):
    """(group, first row, end of the rows to write, end of the group's rows) of a tile; no rows where there is no such tile.

    The rows are E + 2 spans, each cut into tiles of its own: those before the first group, each group with its padding, and
    those after the last. SPANS: a power of two, E + 2 or more.
    """
    i = tl.arange(0, SPANS)
    begin = tl.load(starts_ptr + i - 1, mask=(i > 0) & (i <= E + 1), other=0).to(tl.int32)
    end = tl.load(starts_ptr + i, mask=i <= E, other=R).to(tl.int32)
    tiles = tl.where(i <= E + 1, tl.cdiv(end - begin, BLOCK_M), 0)
    last = tl.cumsum(tiles, 0)
    span = tl.sum((last <= tile).to(tl.int32), 0)
    row = tl.sum(tl.where(i == span, begin + (tile - last + tiles) * BLOCK_M, 0), 0)
    limit = tl.sum(tl.where(i == span, end, 0), 0)
    group = span - 1
    stop = 0
    if (group >= 0) & (group < E):
        stop = (tl.load(starts_ptr + group) + tl.load(counts_ptr + group)).to(tl.int32)
    return group, row, limit, stop


@triton.jit(do_not_specialize=GENERAL)
def gemm_kernel(
    a_ptr,
    w_ptr,
    starts_ptr,
    counts_ptr,
    out_ptr,
    R,
    N,
    K,
    E,
    tiles_m,
    TRANSPOSED: tl.constexpr,
    SPANS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    tile_m, tile_n = ordered(tl.program_id(0), tiles_m, tl.cdiv(N, BLOCK_N), GROUP_M)
    group, row, limit, stop = tile_of_rows(tile_m, starts_ptr, counts_ptr, R, E, BLOCK_M, SPANS)
    rows = row + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if row < stop:
        w_ptr += group.to(tl.int64) * N * K
        of = columns
        if not TRANSPOSED:
            of = tl.minimum(columns, N - 1)
        total = product(a_ptr, tl.minimum(rows, R - 1), w_ptr, of, N, K, BLOCK_M, BLOCK_N, BLOCK_K, TRANSPOSED, False)
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
    total = tl.where((rows < stop)[:, None], total, 0.0)
    tl.store(out_ptrs, narrow(total, out_ptr.dtype.element_ty), mask=(rows < limit)[:, None] & (columns < N)[None, :])


@triton.jit
def halves(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The left and the right half of a tile: what is done with one after the other needs fewer registers."""
    return tile.reshape((BLOCK_M, 2, BLOCK_N // 2)).permute((0, 2, 1)).split()


@triton.jit
def add_halves(total, out_ptr, rows, column, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """out [M, N] += total, half after half."""
    left, right = halves(total, BLOCK_M, BLOCK_N)
    for half in tl.static_range(2):
        columns = column + half * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
        inside = (rows < M)[:, None] & (columns < N)[None, :]
        if half == 0:
            tl.store(out_ptrs, tl.load(out_ptrs, mask=inside) + left, mask=inside)
        else:
            tl.store(out_ptrs, tl.load(out_ptrs, mask=inside) + right, mask=inside)


@triton.jit(do_not_specialize=GENERAL)
def weight_kernel(
    g_ptr,
    a_ptr,
    starts_ptr,
    counts_ptr,
    out_ptr,
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    tiles_n, tiles_k = tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K)
    group = tl.program_id(0) // (tiles_n * tiles_k)
    count = tl.load(counts_ptr + group).to(tl.int32)
    if count > 0:
        tile_n, tile_k = ordered(tl.program_id(0) % (tiles_n * tiles_k), tiles_n, tiles_k, GROUP_M)
        n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
        r = tl.arange(0, BLOCK_R)
        first = tl.load(starts_ptr + group) + r
        g_ptrs = g_ptr + first[:, None] * N + n[None, :]
        a_ptrs = a_ptr + first[:, None] * K + k[None, :]
        total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for start in range(0, count, BLOCK_R):
            inside = (r < count - start)[:, None]
            g = tl.load(g_ptrs, mask=inside & (n < N)[None, :], other=0.0)
            a = tl.load(a_ptrs, mask=inside & (k < K)[None, :], other=0.0)
            total = multiply(g.T, a, total)
            g_ptrs += N * BLOCK_R
            a_ptrs += K * BLOCK_R
        add_halves(total, out_ptr + group.to(tl.int64) * N * K, n, tile_k * BLOCK_K, N, K, BLOCK_N, BLOCK_K)


@triton.jit(do_not_specialize=GENERAL)
def fp8_kernel(
    a_scales_ptr,
    w_scales_ptr,
    a_desc,
    w_desc,
    starts_ptr,
    counts_ptr,
    out_ptr,
    R,
    N,
    K,
    E,
    GROUPS: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Tiles of 128 x 128, one block of the weight's scales; as starts are multiples of 128, a tile is of one group or of none.

    Scales are loaded one block ahead of the product that they belong to. GROUPS: a power of two, E or more.
    """
    tile_m, tile_n = ordered(tl.program_id(0), tl.cdiv(R, 128), N // 128, GROUP_M)
    row, column = tile_m * 128, tile_n * 128
    i = tl.arange(0, GROUPS)
    group = tl.sum((tl.load(starts_ptr + 1 + i, mask=i < E, other=R) <= row).to(tl.int32), 0)
    first = tl.load(starts_ptr + tl.minimum(group, E))
    stop = 0
    if (group < E) & (row >= first):
        stop = (first + tl.load(counts_ptr + group)).to(tl.int32)
    rows = row + tl.arange(0, 128)
    total = tl.zeros((128, 128), tl.float32)
    if row < stop:
        blocks = K // 128
        a_scales_ptrs = a_scales_ptr + tl.minimum(rows, R - 1)
        w_scales_ptr += (group.to(tl.int64) * (N // 128) + tile_n) * blocks
        next_a = tl.load(a_scales_ptrs)
        next_w = tl.load(w_scales_ptr)
        for b in range(blocks):
            scale = next_a * next_w
            following = tl.minimum(b + 1, blocks - 1)
            next_a = tl.load(a_scales_ptrs + following.to(tl.int64) * R)
            next_w = tl.load(w_scales_ptr + following)
            part = tl.dot(a_desc.load([row, b * 128]), w_desc.load([group * N + column, b * 128]).T)
            total = tl.fma(part, tl.broadcast_to(scale[:, None], (128, 128)), total)
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * N + (column + tl.arange(0, 128))[None, :]
    total = tl.where((rows < stop)[:, None], total, 0.0)
    tl.store(out_ptrs, narrow(total, out_ptr.dtype.element_ty), mask=(rows < R)[:, None])


@triton.jit(do_not_specialize=GENERAL)
def weight_fp8_kernel(
    g_scales_ptr,
    a_scales_ptr,
    g_desc,
    a_desc,
    starts_ptr,
    counts_ptr,
    out_ptr,
    N,
    K,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
):
    """As the scales of a block of rows are many, they are loaded through shared memory like the codes (STAGES on the loop)."""
    tiles_n, tiles_k = N // 128, K // 128
    group = tl.program_id(0) // (tiles_n * tiles_k)
    count = tl.load(counts_ptr + group).to(tl.int32)
    if count > 0:
        tile_n, tile_k = ordered(tl.program_id(0) % (tiles_n * tiles_k), tiles_n, tiles_k, GROUP_M)
        n = tile_n * 128 + tl.arange(0, 128)
        k = tile_k * 128 + tl.arange(0, 128)
        block = (tl.load(starts_ptr + group) // 128).to(tl.int32)
        g_scales_ptrs = g_scales_ptr + block.to(tl.int64) * N + n
        a_scales_ptrs = a_scales_ptr + block.to(tl.int64) * K + k
        total = tl.zeros((128, 128), tl.float32)
        for b in tl.range(block, block + tl.cdiv(count, 128), num_stages=STAGES):
            g_scales, a_scales = tl.load(g_scales_ptrs), tl.load(a_scales_ptrs)
            part = tl.dot(g_desc.load([tile_n * 128, b * 128]), a_desc.load([tile_k * 128, b * 128]).T)
            total = tl.fma(part, g_scales[:, None] * a_scales[None, :], total)
            g_scales_ptrs += N
            a_scales_ptrs += K
        out_ptrs = out_ptr + (group.to(tl.int64) * N + n)[:, None] * K + k[None, :]
        tl.store(out_ptrs, tl.load(out_ptrs) + total)


def suffix(wide: bool) -> str:
    """Of an op's configuration: tensor cores have one, float32 arithmetic another."""
    return ".float32" if wide else ""


def grouped_gemm(a_RK: Tensor, w_ENK: Tensor, starts_E1: Tensor, counts_E: Tensor, transposed: bool) -> Tensor:
    (r, k), e, n = a_RK.shape, len(counts_E), w_ENK.shape[2 if transposed else 1]
    out_RN = a_RK.new_empty(r, n)
    name = "grouped_gemm" + suffix(a_RK.dtype == torch.float32)
    table = config(name)
    tiles_m = (r + min(e + 2, r) * (table["BLOCK_M"] - 1)) // table["BLOCK_M"]  # every span may waste all but a row of a tile
    args = (a_RK, w_ENK, starts_E1, counts_E, out_RN, r, n, k, e, tiles_m)
    spans = triton.next_power_of_2(e + 2)
    launch(name, gemm_kernel, tiles_m * triton.cdiv(n, table["BLOCK_N"]), *args, TRANSPOSED=transposed, SPANS=spans)
    return out_RN


def grouped_gemm_weight(g_RN: Tensor, a_RK: Tensor, starts_E1: Tensor, counts_E: Tensor, out_ENK: Tensor) -> None:
    e, n, k = out_ENK.shape
    name = "grouped_gemm_weight" + suffix(a_RK.dtype == torch.float32)
    table = config(name)
    programs = e * triton.cdiv(n, table["BLOCK_N"]) * triton.cdiv(k, table["BLOCK_K"])
    launch(name, weight_kernel, programs, g_RN, a_RK, starts_E1, counts_E, out_ENK, n, k)


def tiles(codes: Tensor) -> TensorDescriptor:
    """Of a matrix of codes, in tiles of 128 x 128. TMA reads from multiples of 16 bytes only; others are copied."""
    return TensorDescriptor.from_tensor(codes.clone() if codes.data_ptr() % 16 else codes, [BLOCK, BLOCK])


def grouped_gemm_fp8(
    a_RK: Tensor,
    a_scales_BR: Tensor,
    w_ENK: Tensor,
    w_scales_EMB: Tensor,
    starts_E1: Tensor,
    counts_E: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    r, (e, n, k) = len(a_RK), w_ENK.shape
    if not (r and w_ENK.numel()):
        return a_RK.new_zeros(r, n, dtype=out_dtype)
    out_RN = a_RK.new_empty(r, n, dtype=out_dtype)
    args = (a_scales_BR, w_scales_EMB, tiles(a_RK), tiles(w_ENK.view(e * n, k)), starts_E1, counts_E, out_RN, r, n, k, e)
    programs = triton.cdiv(r, BLOCK) * (n // BLOCK)
    launch("grouped_gemm_fp8", fp8_kernel, programs, *args, GROUPS=triton.next_power_of_2(e))
    return out_RN


def grouped_gemm_weight_fp8(
    g_NR: Tensor,
    g_scales_CN: Tensor,
    a_KR: Tensor,
    a_scales_CK: Tensor,
    starts_E1: Tensor,
    counts_E: Tensor,
    out_ENK: Tensor,
) -> None:
    e, n, k = out_ENK.shape
    if g_NR.numel() and a_KR.numel():
        args = (g_scales_CN, a_scales_CK, tiles(g_NR), tiles(a_KR), starts_E1, counts_E, out_ENK, n, k)
        launch("grouped_gemm_weight_fp8", weight_fp8_kernel, e * (n // BLOCK) * (k // BLOCK), *args)


OPS: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (grouped_gemm, grouped_gemm_weight, grouped_gemm_fp8, grouped_gemm_weight_fp8)
}

_GROUPS = {"starts_ptr": "*i64", "counts_ptr": "*i64"}
_SIZES = {"N": "i32", "K": "i32"}
_TILES = "tensordesc<fp8e4nv[128,128]>"


def product_aot(aot: Aot, tensor_core: str | None) -> Aot:
    """A kernel that multiplies on tensor cores with QGMMA or HGMMA, or in float32 (None)."""
    return replace(aot, tensor_core=tensor_core, async_loads=True)


def _gemm_aot(kind: str, core: str | None, transposed: bool) -> Aot:
    signature = {"a_ptr": kind, "w_ptr": kind, **_GROUPS, "out_ptr": kind, "R": "i32", **_SIZES, "E": "i32", "tiles_m": "i32"}
    aot = shipped("grouped_gemm" + suffix(core is None), gemm_kernel, signature, TRANSPOSED=transposed, SPANS=64)
    return product_aot(aot, core)


def _weight_aot(kind: str, core: str | None) -> Aot:
    signature = {"g_ptr": kind, "a_ptr": kind, **_GROUPS, "out_ptr": "*fp32", **_SIZES}
    return product_aot(shipped("grouped_gemm_weight" + suffix(core is None), weight_kernel, signature), core)


def _fp8_aot(out: str) -> Aot:
    operands = {"a_scales_ptr": "*fp32", "w_scales_ptr": "*fp32", "a_desc": _TILES, "w_desc": _TILES}
    signature = {**operands, **_GROUPS, "out_ptr": out, "R": "i32", **_SIZES, "E": "i32"}
    return product_aot(shipped("grouped_gemm_fp8", fp8_kernel, signature, GROUPS=32), "QGMMA")


def _weight_fp8_aot() -> Aot:
    operands = {"g_scales_ptr": "*fp32", "a_scales_ptr": "*fp32", "g_desc": _TILES, "a_desc": _TILES}
    signature = {**operands, **_GROUPS, "out_ptr": "*fp32", **_SIZES}
    return product_aot(shipped("grouped_gemm_weight_fp8", weight_fp8_kernel, signature), "QGMMA")


_KINDS = (("*bf16", "HGMMA"), ("*fp32", None))
AOT: list[Aot] = [
    *(_gemm_aot(*kind, transposed) for kind in _KINDS for transposed in (False, True)),
    *(_weight_aot(*kind) for kind in _KINDS),
    *(_fp8_aot(out) for out in ("*bf16", "*fp32")),
    _weight_fp8_aot(),
]
