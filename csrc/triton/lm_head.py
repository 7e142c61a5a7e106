"""The fused LM head. Logits exist only as tiles: their statistics are gathered on the way, and backward makes them again.

Forward: a tile of logits leaves, per row, its maximum m, s = Σe^(z−m) and t = Σ(z−m)e^(z−m), with z = logits / temperature; a
second kernel joins the tiles of the vocabulary in their order. As t is taken from the maximum, H = log s − t/s loses nothing
where logits are large. Backward, chunk by chunk of rows: the gradient of the logits, written as the sum of two bfloat16 (16
bits of mantissa, so that both products that follow run on tensor cores), then its product with the weight and, added to the
float32 gradient, with the hidden states. Each sum has one fixed order; there are no atomics. Rows without a label add nothing,
and tiles of nothing else are skipped.
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
from prl_triton.grouped_gemm import add_halves, halves, multiply, ordered, product, product_aot, suffix
from prl_triton.launch import launch
from prl_triton.router_logits import dense, dense_aot

IGNORE = tl.constexpr(-100)
LOWEST = tl.constexpr(-3.4028234663852886e38)
GENERAL = ["first", "C", "labels_ptr", "temperature_ptr", "entropy_ptr", "total_ptr", "d_logprob_ptr", "d_entropy_ptr"]
"""What kernels are not compiled anew for: the number of rows, and vectors of rows that begin anywhere in their storage."""


@triton.jit
def at_least_lowest(x):
    """x, finite where it is −∞, so that 0 · x is 0; a NaN stays one."""
    return tl.where(x < LOWEST, LOWEST, x)


@triton.jit
def joined(m, s, t, m_new, s_new, t_new):
    """The statistics of two sets of logits together."""
    top = tl.maximum(m, m_new)
    down = tl.where(m == float("-inf"), 0.0, m - top)
    down_new = tl.where(m_new == float("-inf"), 0.0, m_new - top)
    factor, factor_new = tl.exp(m - top), tl.exp(m_new - top)
    return top, s * factor + s_new * factor_new, (t + down * s) * factor + (t_new + down_new * s_new) * factor_new


@triton.jit
def sums_below(z, top):
    """s and t of each row, for its maximum."""
    below = z - top[:, None]
    p = tl.exp(below)
    return tl.sum(p, 1), tl.sum(p * at_least_lowest(below), 1)


@triton.jit
def labels_of(labels_ptr, rows):
    """int32 (label of each row, whether it has one)."""
    labels = tl.load(labels_ptr + rows).to(tl.int32)
    return labels, labels != IGNORE


@triton.jit(do_not_specialize=GENERAL)
def statistics_kernel(
    hidden_ptr,
    weight_ptr,
    labels_ptr,
    temperature_ptr,
    parts_ptr,
    chosen_ptr,
    first,
    C,
    V,
    D,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Of rows first … first + C: parts [tiles of the vocabulary, 3, C] are m, s, t; chosen [C] is the label's logit."""
    tile_m, tile_n = ordered(tl.program_id(0), tl.cdiv(C, BLOCK_M), tl.cdiv(V, BLOCK_N), GROUP_M)
    places = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = first + tl.minimum(places, C - 1)
    labels, kept = labels_of(labels_ptr, rows)
    if tl.max(kept.to(tl.int32), 0) > 0:
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        existing = tl.minimum(columns, V - 1)
        z = product(hidden_ptr, rows, weight_ptr, existing, V, D, BLOCK_M, BLOCK_N, BLOCK_K, False, False)
        z *= (1.0 / tl.load(temperature_ptr + rows))[:, None]
        chosen = tl.sum(tl.where(columns[None, :] == labels[:, None], z, 0.0), 1)
        here = (labels // BLOCK_N == tile_n) & (labels < V) & kept & (places < C)
        tl.store(chosen_ptr + places, chosen, mask=here)
        z = tl.where((columns < V)[None, :], z, float("-inf"))
        top = tl.max(z, 1)
        left, right = halves(z, BLOCK_M, BLOCK_N)
        s_left, t_left = sums_below(left, top)
        s_right, t_right = sums_below(right, top)
        part_ptrs = parts_ptr + tile_n.to(tl.int64) * 3 * C + places
        tl.store(part_ptrs, top, mask=places < C)
        tl.store(part_ptrs + C, s_left + s_right, mask=places < C)
        tl.store(part_ptrs + 2 * C, t_left + t_right, mask=places < C)


@triton.jit(do_not_specialize=GENERAL)
def join_kernel(labels_ptr, parts_ptr, chosen_ptr, logprob_ptr, entropy_ptr, total_ptr, first, C, parts, BLOCK_M: tl.constexpr):
    places = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = first + places
    kept = tl.load(labels_ptr + rows, mask=places < C, other=IGNORE) != IGNORE
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    s = tl.zeros((BLOCK_M,), tl.float32)
    t = tl.zeros((BLOCK_M,), tl.float32)
    part_ptrs = parts_ptr + places
    for _ in range(parts):
        part_m = tl.load(part_ptrs, mask=kept, other=0.0)
        part_s = tl.load(part_ptrs + C, mask=kept, other=1.0)
        m, s, t = joined(m, s, t, part_m, part_s, tl.load(part_ptrs + 2 * C, mask=kept, other=0.0))
        part_ptrs += 3 * C
    log_s = tl.log(s)
    logprob = at_least_lowest(tl.load(chosen_ptr + places, mask=kept, other=0.0) - m - log_s)
    tl.store(logprob_ptr + rows, tl.where(kept, logprob, 0.0), mask=places < C)
    tl.store(entropy_ptr + rows, tl.where(kept, log_s - t / s, 0.0), mask=places < C)
    tl.store(total_ptr + rows, tl.where(kept, m + log_s, 0.0), mask=places < C)


@triton.jit
def store_sum(x, high_ptr, low_ptr, rows, column, M, N, STRIDE, WIDE: tl.constexpr, BLOCK_N: tl.constexpr):
    columns = column + tl.arange(0, BLOCK_N)
    offsets = rows.to(tl.int64)[:, None] * STRIDE + columns[None, :]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    high = narrow(x, high_ptr.dtype.element_ty)
    tl.store(high_ptr + offsets, high, mask=inside)
    if not WIDE:
        tl.store(low_ptr + offsets, narrow(x - widen(high), low_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=GENERAL)
def d_logits_kernel(
    hidden_ptr,
    weight_ptr,
    labels_ptr,
    temperature_ptr,
    entropy_ptr,
    total_ptr,
    d_logprob_ptr,
    d_entropy_ptr,
    high_ptr,
    low_ptr,
    first,
    C,
    V,
    D,
    STRIDE,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """high + low [C, STRIDE]: the gradient of the logits of rows first … first + C; if WIDE, high alone, in float32."""
    tile_m, tile_n = ordered(tl.program_id(0), tl.cdiv(C, BLOCK_M), tl.cdiv(V, BLOCK_N), GROUP_M)
    places = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = first + tl.minimum(places, C - 1)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    labels, kept = labels_of(labels_ptr, rows)
    d_z = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if tl.max(kept.to(tl.int32), 0) > 0:
        existing = tl.minimum(columns, V - 1)
        z = product(hidden_ptr, rows, weight_ptr, existing, V, D, BLOCK_M, BLOCK_N, BLOCK_K, False, False)
        z = tl.where(kept[:, None], z, 0.0)
        inverse = 1.0 / tl.load(temperature_ptr + rows, mask=kept, other=float("inf"))
        log_p = at_least_lowest(z * inverse[:, None] - tl.load(total_ptr + rows, mask=kept, other=0.0)[:, None])
        if d_entropy_ptr is not None:
            entropy = tl.load(entropy_ptr + rows, mask=kept, other=0.0)
            d_entropy = tl.load(d_entropy_ptr + rows, mask=kept, other=0.0) * inverse
            d_z = -(log_p + entropy[:, None]) * d_entropy[:, None]
        if d_logprob_ptr is not None:
            d_logprob = tl.load(d_logprob_ptr + rows, mask=kept, other=0.0) * inverse
            d_z -= d_logprob[:, None]
        d_z *= tl.exp(log_p)
        if d_logprob_ptr is not None:
            d_z += tl.where(columns[None, :] == labels[:, None], d_logprob[:, None], 0.0)
    left, right = halves(d_z, BLOCK_M, BLOCK_N)
    store_sum(left, high_ptr, low_ptr, places, tile_n * BLOCK_N, C, V, STRIDE, WIDE, BLOCK_N // 2)
    store_sum(right, high_ptr, low_ptr, places, tile_n * BLOCK_N + BLOCK_N // 2, C, V, STRIDE, WIDE, BLOCK_N // 2)


@triton.jit(do_not_specialize=GENERAL)
def d_hidden_kernel(
    high_ptr,
    low_ptr,
    weight_ptr,
    labels_ptr,
    d_hidden_ptr,
    first,
    C,
    V,
    D,
    STRIDE,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    tile_m, tile_n = ordered(tl.program_id(0), tl.cdiv(C, BLOCK_M), tl.cdiv(D, BLOCK_N), GROUP_M)
    places = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    of = tl.minimum(places, C - 1)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    kept = tl.load(labels_ptr + first + of) != IGNORE
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if tl.max(kept.to(tl.int32), 0) > 0:
        k = tl.arange(0, BLOCK_K)
        offsets = of.to(tl.int64)[:, None] * STRIDE + k[None, :]
        high_ptrs, low_ptrs = high_ptr + offsets, low_ptr + offsets
        weight_ptrs = weight_ptr + k.to(tl.int64)[:, None] * D + columns[None, :]
        for start in range(0, V, BLOCK_K):
            inside = k < V - start
            high = tl.load(high_ptrs, mask=inside[None, :], other=0.0)
            weight = tl.load(weight_ptrs, mask=inside[:, None] & (columns < D)[None, :], other=0.0)
            total = multiply(high, weight, total)
            if not WIDE:
                total = multiply(tl.load(low_ptrs, mask=inside[None, :], other=0.0), weight, total)
                low_ptrs += BLOCK_K
            high_ptrs += BLOCK_K
            weight_ptrs += D * BLOCK_K
    total = tl.where(kept[:, None], total, 0.0)
    out_ptrs = d_hidden_ptr + (first + places).to(tl.int64)[:, None] * D + columns[None, :]
    tl.store(out_ptrs, narrow(total, d_hidden_ptr.dtype.element_ty), mask=(places < C)[:, None] & (columns < D)[None, :])


@triton.jit(do_not_specialize=GENERAL)
def d_weight_kernel(
    high_ptr,
    low_ptr,
    hidden_ptr,
    labels_ptr,
    d_weight_ptr,
    first,
    C,
    V,
    D,
    STRIDE,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """d_weight += (high + low)ᵀ · hidden over the rows first … first + C that have a label."""
    tile_m, tile_n = ordered(tl.program_id(0), tl.cdiv(V, BLOCK_M), tl.cdiv(D, BLOCK_N), GROUP_M)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    offsets = k.to(tl.int64)[:, None] * STRIDE + m[None, :]
    high_ptrs, low_ptrs = high_ptr + offsets, low_ptr + offsets
    hidden_ptrs = hidden_ptr + (first + k).to(tl.int64)[:, None] * D + n[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, C, BLOCK_K):
        inside = k < C - start
        kept = tl.load(labels_ptr + first + start + k, mask=inside, other=IGNORE) != IGNORE
        hidden = tl.load(hidden_ptrs, mask=kept[:, None] & (n < D)[None, :], other=0.0)
        inside = inside[:, None] & (m < V)[None, :]
        high = tl.load(high_ptrs, mask=inside, other=0.0)
        total = multiply(high.T, hidden, total)
        if not WIDE:
            total = multiply(tl.load(low_ptrs, mask=inside, other=0.0).T, hidden, total)
            low_ptrs += STRIDE * BLOCK_K
        high_ptrs += STRIDE * BLOCK_K
        hidden_ptrs += D * BLOCK_K
    add_halves(total, d_weight_ptr, m, tile_n * BLOCK_N, V, D, BLOCK_M, BLOCK_N)


def _alike(hidden_TD: Tensor, weight_VD: Tensor) -> tuple[Tensor, Tensor, bool]:
    """(hidden, weight, whether they are float32): of one type, float32 unless both are bfloat16."""
    if hidden_TD.dtype == weight_VD.dtype == torch.bfloat16:
        return hidden_TD, weight_VD, False
    return hidden_TD.float(), weight_VD.float(), True


def logits(hidden_TD: Tensor, weight_VD: Tensor) -> Tensor:
    hidden_TD, weight_VD, wide = _alike(hidden_TD, weight_VD)
    return dense("logits" + suffix(wide), hidden_TD, weight_VD, wide)


def logprobs(
    hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, temperature_T: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    hidden_TD, weight_VD, wide = _alike(hidden_TD, weight_VD)
    (t, d), v = hidden_TD.shape, len(weight_VD)
    name, chunk = "logprobs" + suffix(wide), max(min(chunk, t), 1)
    table = config(name)
    parts = triton.cdiv(v, table["BLOCK_N"])
    parts_P3C = hidden_TD.new_empty(parts, 3, chunk, dtype=torch.float32)
    chosen_C = hidden_TD.new_empty(chunk, dtype=torch.float32)
    logprob_T, entropy_T, total_T = (torch.empty_like(temperature_T) for _ in range(3))
    for first in range(0, t, chunk):
        c = min(chunk, t - first)
        args = (hidden_TD, weight_VD, labels_T, temperature_T, parts_P3C, chosen_C, first, c, v, d)
        chosen_C.fill_(torch.nan)  # what a label outside the vocabulary leaves: it has no logit
        launch(name, statistics_kernel, triton.cdiv(c, table["BLOCK_M"]) * parts, *args)
        joined_rows = triton.cdiv(c, config("logprobs.join")["BLOCK_M"])
        args = (labels_T, parts_P3C, chosen_C, logprob_T, entropy_T, total_T, first, c, parts)
        launch("logprobs.join", join_kernel, joined_rows, *args)
    return logprob_T, entropy_T, total_T


def logprobs_backward(
    d_logprob_T: Tensor | None,
    d_entropy_T: Tensor | None,
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    temperature_T: Tensor,
    entropy_T: Tensor,
    total_T: Tensor,
    chunk: int,
    want_hidden: bool,
    want_weight: bool,
) -> tuple[Tensor, Tensor]:
    kind = hidden_TD.dtype
    hidden_TD, weight_VD, wide = _alike(hidden_TD, weight_VD)
    (t, d), v = hidden_TD.shape, len(weight_VD)
    d_hidden = torch.empty_like(hidden_TD) if want_hidden else hidden_TD.new_empty(0, 0)
    d_weight = torch.zeros_like(weight_VD, dtype=torch.float32) if want_weight else temperature_T.new_empty(0, 0)
    chunk = max(min(chunk, t), 1)
    stride = triton.cdiv(v, 16) * 16  # so that rows begin at multiples of 16 bytes whatever the vocabulary
    high = hidden_TD.new_empty(chunk, stride)
    low = hidden_TD.new_empty(0 if wide else chunk, stride)

    def run(step: str, kernel: Any, rows: int, columns: int, *args: Any) -> None:
        name = f"logprobs_backward.{step}{suffix(wide)}"
        table = config(name)
        programs = triton.cdiv(rows, table["BLOCK_M"]) * triton.cdiv(columns, table["BLOCK_N"])
        launch(name, kernel, programs, *args, v, d, stride, WIDE=wide)

    for first in range(0, t, chunk):
        c = min(chunk, t - first)
        saved = (hidden_TD, weight_VD, labels_T, temperature_T, entropy_T, total_T)
        run("d_logits", d_logits_kernel, c, v, *saved, d_logprob_T, d_entropy_T, high, low, first, c)
        if want_hidden:
            run("d_hidden", d_hidden_kernel, c, d, high, low, weight_VD, labels_T, d_hidden, first, c)
        if want_weight:
            run("d_weight", d_weight_kernel, v, d, high, low, hidden_TD, labels_T, d_weight, first, c)
    return d_hidden.to(kind), d_weight


OPS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (logits, logprobs, logprobs_backward)}


def _aots(kind: str, core: str | None) -> list[Aot]:
    """All kernels for hidden states and weights of this type."""
    wide = core is None
    operands = {"hidden_ptr": kind, "weight_ptr": kind, "labels_ptr": "*i64", "temperature_ptr": "*fp32"}
    saved = dict.fromkeys(("entropy_ptr", "total_ptr", "d_logprob_ptr", "d_entropy_ptr"), "*fp32")
    parts = {"parts_ptr": "*fp32", "chosen_ptr": "*fp32"}
    d_logits = {"high_ptr": kind, "low_ptr": kind}
    rows, sizes = {"first": "i32", "C": "i32"}, {"V": "i32", "D": "i32"}
    chunk = {**rows, **sizes, "STRIDE": "i32"}
    to_hidden = {**d_logits, "weight_ptr": kind, "labels_ptr": "*i64", "d_hidden_ptr": kind, **chunk}
    to_weight = {**d_logits, "hidden_ptr": kind, "labels_ptr": "*i64", "d_weight_ptr": "*fp32", **chunk}
    end = suffix(wide)
    aots = [
        dense_aot("logits" + end, kind, kind, wide=wide),
        shipped("logprobs" + end, statistics_kernel, {**operands, **parts, **rows, **sizes}, bandwidth=False),
        shipped(f"logprobs_backward.d_logits{end}", d_logits_kernel, {**operands, **saved, **d_logits, **chunk}, WIDE=wide),
        shipped(f"logprobs_backward.d_hidden{end}", d_hidden_kernel, to_hidden, WIDE=wide),
        shipped(f"logprobs_backward.d_weight{end}", d_weight_kernel, to_weight, WIDE=wide),
    ]
    return [product_aot(aot, core) for aot in aots]


_JOIN = dict.fromkeys(("parts_ptr", "chosen_ptr", "logprob_ptr", "entropy_ptr", "total_ptr"), "*fp32")
_ROWS = {"first": "i32", "C": "i32", "parts": "i32"}
AOT: list[Aot] = [
    *_aots("*bf16", "HGMMA"),
    *_aots("*fp32", None),
    shipped("logprobs.join", join_kernel, {"labels_ptr": "*i64", **_JOIN, **_ROWS}, bandwidth=False),
]
