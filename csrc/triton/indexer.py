"""The lightning indexer: scores of all keys for each query, and a deterministic choice of the best.

Scores: one tile of keys stays while the heads of a tile of queries pass, each a product on tensor cores (bfloat16) or in
float32, so the scores per head never reach memory.
Choice: the k-th largest score of a row is found by its bits, eight at a time from the top, counting how many scores have each
value of the next eight; then all above it are taken, and of its equals the first. Five passes over the row and nothing sorted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from prl_triton.aot import Aot, shipped
from prl_triton.configs import config
from prl_triton.fp8 import HARDWARE, widen
from prl_triton.launch import launch

NAN_KEY = tl.constexpr(0xFFFFFFFF)


@triton.jit(do_not_specialize=["n_queries", "n_keys"])
def _scores(
    q, keys, weights, out, n_queries, n_keys, n_heads, width, ALIGNED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    if ALIGNED:
        n_keys = n_keys // 16 * 16  # what it is, told to the compiler, without a variant of the kernel for each size
    program = tl.program_id(0)
    across, down = tl.cdiv(n_keys, KEYS), tl.cdiv(n_queries, QUERIES)
    sequence = (program // (across * down)).to(tl.int64)
    query = (program // across % down * QUERIES + tl.arange(0, QUERIES)).to(tl.int64)
    key = (program % across * KEYS + tl.arange(0, KEYS)).to(tl.int64)
    d = tl.arange(0, WIDTH)
    query_exists, key_exists, inside = query < n_queries, key < n_keys, d < width
    at = keys + (sequence * n_keys + key)[None, :] * width + d[:, None]
    keys_tile = tl.load(at, mask=key_exists[None, :] & inside[:, None], other=0)
    head_at = (sequence * n_queries + query) * n_heads
    total = tl.zeros((QUERIES, KEYS), tl.float32)
    for head in range(n_heads):
        of_head = q + (head_at + head)[:, None] * width + d[None, :]
        q_tile = tl.load(of_head, mask=query_exists[:, None] & inside[None, :], other=0)
        if HARDWARE:
            dots = tl.dot(q_tile, keys_tile, input_precision="ieee")
        else:
            dots = tl.dot(widen(q_tile), widen(keys_tile), input_precision="ieee")
        weight = widen(tl.load(weights + head_at + head, mask=query_exists, other=0))
        total += tl.where(dots < 0, 0.0, dots) * weight[:, None]
    at = out + (sequence * n_queries + query)[:, None] * n_keys + key[None, :]
    tl.store(at, total, mask=query_exists[:, None] & key_exists[None, :])


@triton.jit
def _keys(scores, mask, first, n_keys, KEYS: tl.constexpr):
    """From `first` on: uint32 ordered as the scores are, NaN above all, −inf where the mask is not; the mask; which exist."""
    index = first + tl.arange(0, KEYS)
    exists = index < n_keys
    masked = tl.load(mask + index, mask=exists, other=0) != 0
    x = tl.load(scores + index, mask=exists, other=0.0) + 0.0  # −0 becomes 0, its equal
    x = tl.where(masked, x, float("-inf"))
    bits = x.to(tl.uint32, bitcast=True)
    key = tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)
    return tl.where(x != x, NAN_KEY, key).to(tl.uint32), masked, exists


@triton.jit(do_not_specialize=["n_keys"])
def _select(scores, mask, out, n_keys, top_k, ALIGNED: tl.constexpr, KEYS: tl.constexpr):
    if ALIGNED:
        n_keys = n_keys // 16 * 16
    row = tl.program_id(0).to(tl.int64) * n_keys
    scores, mask, out = scores + row, mask + row, out + row
    bins = tl.arange(0, 256)
    wanted = tl.full((), top_k, tl.int32)  # rank of the sought among those that begin with `found`
    found = tl.zeros((), tl.uint32)
    n_nan = tl.zeros((), tl.int32)
    for step in tl.static_range(4):
        counts = tl.zeros((256,), tl.int32)
        for first in range(0, n_keys, KEYS):
            key, _, exists = _keys(scores, mask, first, n_keys, KEYS)
            if step == 0:
                n_nan += tl.sum((exists & (key == NAN_KEY)).to(tl.int32), axis=0)
                fits = exists
            else:
                fits = exists & ((key >> (32 - 8 * step)) == found)
            counts += tl.histogram(((key >> (24 - 8 * step)) & 0xFF).to(tl.int32), 256, mask=fits)
        at_least = tl.cumsum(counts, 0, reverse=True)
        digit = tl.sum((at_least >= wanted).to(tl.int32), axis=0) - 1
        wanted -= tl.sum(tl.where(bins > digit, counts, 0), axis=0)
        found = (found << 8) | digit.to(tl.uint32)
    # a NaN ranks highest but is never above or equal to anything, so others fill its place; nothing is above or equal to a NaN
    room = tl.where(found == NAN_KEY, 0, wanted + n_nan)
    for first in range(0, n_keys, KEYS):
        key, masked, exists = _keys(scores, mask, first, n_keys, KEYS)
        equal = (key == found) & masked
        nth = tl.cumsum(equal.to(tl.int32), 0)
        taken = ((key > found) & (key != NAN_KEY)) | (equal & (nth <= room))
        tl.store(out + first + tl.arange(0, KEYS), taken.to(tl.uint8), mask=exists)
        room -= tl.sum(equal.to(tl.int32), axis=0)


def index_scores(q_BQHD: Tensor, keys_BSD: Tensor, weights_BQH: Tensor) -> Tensor:
    b, n_queries, n_heads, width = q_BQHD.shape
    n_keys = keys_BSD.shape[1]
    scores_BQS = q_BQHD.new_empty(b, n_queries, n_keys, dtype=torch.float32)
    op = "index_scores" if q_BQHD.dtype == torch.bfloat16 else "index_scores.float32"
    table = config(op)
    programs = b * triton.cdiv(n_queries, table["QUERIES"]) * triton.cdiv(n_keys, table["KEYS"])
    args = (q_BQHD, keys_BSD, weights_BQH, scores_BQS, n_queries, n_keys, n_heads, width)
    launch(op, _scores, programs, *args, ALIGNED=n_keys % 16 == 0, WIDTH=max(16, triton.next_power_of_2(width)))
    return scores_BQS


def index_select(scores_BQS: Tensor, mask_BQS: Tensor, top_k: int) -> Tensor:
    n_keys = scores_BQS.shape[2]
    if n_keys <= top_k:
        return mask_BQS.clone()
    selected_BQS = torch.empty_like(mask_BQS)
    rows = scores_BQS.shape[0] * scores_BQS.shape[1]
    args = (scores_BQS, mask_BQS.view(torch.uint8), selected_BQS.view(torch.uint8), n_keys, top_k)
    launch("index_select", _select, rows, *args, ALIGNED=n_keys % 16 == 0)
    return selected_BQS


OPS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (index_scores, index_select)}

_SIZES = dict.fromkeys(("n_queries", "n_keys", "n_heads", "width"), "i32")


_SELECT = {"scores": "*fp32", "mask": "*u8", "out": "*u8", "n_keys": "i32", "top_k": "i32"}


def _scores_aot(op: str, kind: str, tensor_core: str | None, aligned: bool) -> Aot:
    signature = {**_SIZES, "q": kind, "keys": kind, "weights": kind, "out": "*fp32"}
    entry = shipped(op, _scores, signature, bandwidth=aligned, ALIGNED=aligned, WIDTH=128)
    return replace(entry, tensor_core=tensor_core, async_loads=True)


AOT: list[Aot] = [
    *(_scores_aot("index_scores", "*bf16", "HGMMA", aligned) for aligned in (False, True)),
    *(_scores_aot("index_scores.float32", "*fp32", None, aligned) for aligned in (False, True)),
    *(shipped("index_select", _select, _SELECT, bandwidth=aligned, ALIGNED=aligned) for aligned in (False, True)),
]
