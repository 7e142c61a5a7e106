"""The router after its logits: the choice or the replayed experts with weights and counts, and the gradient.

A program has a few tokens and all experts. The best expert is the largest of keys that hold the score, in integers ordered as
floats are, above the index, so that ties are broken in the same reduction. Counts are integers added atomically: their order
does not matter.
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
from prl_triton.exponential import exp, sigmoid
from prl_triton.launch import launch

TAKEN = tl.constexpr(-(2**63))
GENERAL = ["n_tokens", "n_rows", "routes", "recorded", "routed", "padding"]
"""What kernels are not compiled anew for: numbers of rows, and where in a batch its routes and masks lie."""


@triton.jit
def ordered(x):
    """int32 ordered as float32 x is, NaN above all and the zeros equal; never the smallest int32."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def _as_float(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _with_index(key, index, LAST: tl.constexpr):
    """int64 with `key` above and `index` below, the lower index the larger."""
    return (key.to(tl.int64) << 32) - index + LAST


@triton.jit
def _index_of(best, LAST: tl.constexpr):
    return -(best & 0x7FFFFFFF).to(tl.int32) + LAST


@triton.jit
def _load_logits(logits, token, n_tokens, n_experts, EXPERTS: tl.constexpr):
    """[tokens, EXPERTS]: −inf where there is no expert, 0 where there is no token."""
    experts = tl.arange(0, EXPERTS)[None, :]
    inside = (token < n_tokens)[:, None] & (experts < n_experts)
    x = tl.load(logits + token[:, None] * n_experts + experts, mask=inside, other=float("-inf"))
    return tl.where((token < n_tokens)[:, None], x, 0.0)


@triton.jit
def _softmax_of(x):
    """The largest logit of each row, and the sum of the powers taken from there."""
    top = tl.max(x, axis=1)[:, None]
    return top, tl.sum(exp(x - top), axis=1)[:, None]


@triton.jit
def _score(x, top, total, SCORING: tl.constexpr):
    """The scores of logits, those of a whole row or of some, in the same bits; `top` and `total` are the softmax's."""
    if SCORING == "sigmoid":
        return sigmoid(x)
    elif SCORING == "softmax":
        return tl.math.div_rn(exp(x - top), total)
    else:
        return x


@triton.jit
def _within_groups(key, experts, n_experts, N_GROUP: tl.constexpr, TOPK_GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """`key` with that of −inf for the experts outside the TOPK_GROUP groups whose two best sum highest."""
    size = n_experts // N_GROUP
    last: tl.constexpr = key.shape[1] - 1
    groups = tl.arange(0, GROUPS)[None, :]
    packed = tl.full((key.shape[0], GROUPS), TAKEN, tl.int64)
    for group in range(N_GROUP):
        members = tl.where(experts // size == group, _with_index(key, experts, last), TAKEN)
        first = tl.max(members, axis=1)
        second = tl.max(tl.where(members == first[:, None], TAKEN, members), axis=1)
        total = _as_float((first >> 32).to(tl.int32))
        total = tl.where(second == TAKEN, total, total + _as_float((second >> 32).to(tl.int32)))
        packed = tl.where(groups == group, _with_index(ordered(total), group, GROUPS - 1)[:, None], packed)
    keep = key != key
    for _ in range(TOPK_GROUP):
        best = tl.max(packed, axis=1)
        keep = keep | (experts // size == _index_of(best, GROUPS - 1)[:, None])
        packed = tl.where(packed == best[:, None], TAKEN, packed)
    return tl.where(keep, key, -0x7F800001)


@triton.jit
def _choose(key, experts, slots, K: tl.constexpr):
    """[tokens, slots]: the K experts with the largest keys, the lowest index first among equals."""
    last: tl.constexpr = key.shape[1] - 1
    packed = _with_index(key, experts, last)
    ids = tl.zeros((key.shape[0], slots.shape[1]), tl.int32)
    for k in range(K):
        best = tl.max(packed, axis=1)
        ids = tl.where(slots == k, _index_of(best, last)[:, None], ids)
        packed = tl.where(packed == best[:, None], TAKEN, packed)
    return ids


@triton.jit
def _sum_in_order(x, slots, K: tl.constexpr):
    total = tl.zeros((x.shape[0],), tl.float32)
    for k in range(K):
        total += tl.sum(tl.where(slots == k, x, 0.0), axis=1)
    return total


@triton.jit(do_not_specialize=GENERAL)
def _route(
    logits, bias, recorded, routed, padding, nth_padding, ids_out, weights_out, counts_out, n_tokens, n_experts, scale,
    SCORING: tl.constexpr, HAS_BIAS: tl.constexpr, REPLAY: tl.constexpr, HAS_ROUTED: tl.constexpr, HAS_PADDING: tl.constexpr,
    NORMALISE: tl.constexpr, K: tl.constexpr, N_GROUP: tl.constexpr, TOPK_GROUP: tl.constexpr, TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr, SLOTS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    exists = token < n_tokens
    experts, slots = tl.arange(0, EXPERTS)[None, :], tl.arange(0, SLOTS)[None, :]
    here = token[:, None] * K + slots
    filled = exists[:, None] & (slots < K)
    ids = tl.zeros((TOKENS, SLOTS), tl.int64)
    decided = exists == 0
    is_padding = tl.load(padding + token, mask=exists, other=0) != 0 if HAS_PADDING else token < 0
    if REPLAY:
        ids = tl.load(recorded + here, mask=filled, other=0).to(tl.int64)
        outside = tl.max(((ids < 0) | (ids >= n_experts)).to(tl.int32), axis=1) > 0
        replay = tl.load(routed + token, mask=exists, other=0) != 0 if HAS_ROUTED else exists
        decided = decided | (replay & (outside == 0))
    if HAS_PADDING:
        nth = tl.load(nth_padding + token, mask=exists, other=0)[:, None] - 1
        ids = tl.where(is_padding[:, None], (nth * K + slots) % n_experts, ids)
        decided = decided | is_padding

    top, total = 0.0, 0.0
    if SCORING == "softmax":
        top, total = _softmax_of(_load_logits(logits, token, n_tokens, n_experts, EXPERTS))
    if tl.min(decided.to(tl.int32), axis=0) == 0:  # else nothing but the logits of the chosen is read
        choice = _score(_load_logits(logits, token, n_tokens, n_experts, EXPERTS), top, total, SCORING)
        if HAS_BIAS:
            choice += tl.load(bias + experts, mask=experts < n_experts, other=0.0)
        key = ordered(choice)
        if TOPK_GROUP < N_GROUP:
            key = _within_groups(key, experts, n_experts, N_GROUP, TOPK_GROUP, GROUPS)
        key = tl.where(experts < n_experts, key, -0x7FFFFFFF - 1)
        ids = tl.where(decided[:, None], ids, _choose(key, experts, slots, K).to(tl.int64))

    chosen = tl.load(logits + token[:, None] * n_experts + ids, mask=filled, other=0.0)
    weights = _score(chosen, top, total, SCORING)
    if NORMALISE:
        weights = tl.math.div_rn(weights, (_sum_in_order(weights, slots, K) + 1e-20)[:, None])
    tl.store(ids_out + here, ids, mask=filled)
    tl.store(weights_out + here, weights * scale, mask=filled)

    counted = filled & (is_padding == 0)[:, None]
    counts = tl.zeros((TOKENS, EXPERTS), tl.int32)
    for k in range(K):
        expert = tl.sum(tl.where((slots == k) & counted, ids + 1, 0), axis=1) - 1
        counts += (experts == expert[:, None]).to(tl.int32)
    n = tl.sum(counts, axis=0)
    tl.atomic_add(counts_out + tl.arange(0, EXPERTS), n.to(tl.int64), mask=n > 0)


@triton.jit(do_not_specialize=["n_tokens"])
def _route_backward(
    d_weights, logits, ids, d_logits, n_tokens, n_experts, scale, SCORING: tl.constexpr, NORMALISE: tl.constexpr,
    K: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    experts, slots = tl.arange(0, EXPERTS)[None, :], tl.arange(0, SLOTS)[None, :]
    filled = (token < n_tokens)[:, None] & (slots < K)
    here = token[:, None] * K + slots
    chosen = tl.load(ids + here, mask=filled, other=-1)
    d = tl.load(d_weights + here, mask=filled, other=0.0) * scale
    scores, top, total = 0.0, 0.0, 0.0
    if SCORING == "softmax":
        x = _load_logits(logits, token, n_tokens, n_experts, EXPERTS)
        top, total = _softmax_of(x)
        scores = _score(x, top, total, SCORING)
    score = _score(tl.load(logits + token[:, None] * n_experts + chosen, mask=filled, other=0.0), top, total, SCORING)
    if NORMALISE:
        below = (_sum_in_order(score, slots, K) + 1e-20)[:, None]
        d = tl.math.div_rn(d - _sum_in_order(d * tl.math.div_rn(score, below), slots, K)[:, None], below)
    if SCORING == "sigmoid":
        d = d * (score * (1.0 - score))
    dense = tl.zeros((TOKENS, EXPERTS), tl.float32)
    for k in range(K):  # an expert that stands twice gets both
        expert = tl.sum(tl.where(slots == k, chosen, 0), axis=1)[:, None]
        dense += tl.where(experts == expert, tl.sum(tl.where(slots == k, d, 0.0), axis=1)[:, None], 0.0)
    if SCORING == "softmax":
        dense = scores * (dense - _sum_in_order(d * score, slots, K)[:, None])
    inside = (token < n_tokens)[:, None] & (experts < n_experts)
    tl.store(d_logits + token[:, None] * n_experts + experts, dense, mask=inside)


@triton.jit
def _faults(ids, slots, n_experts, K: tl.constexpr, SLOTS: tl.constexpr):
    """Of each row of `ids` [rows, SLOTS], int64: whether one is out of range, and whether one stands twice in a row without."""
    outside = tl.max(((slots < K) & ((ids < 0) | (ids >= n_experts))).to(tl.int32), axis=1) > 0
    index = tl.arange(0, SLOTS)
    earlier = (index[None, :, None] < index[None, None, :]) & (index[None, None, :] < K)
    equal = ((ids[:, :, None] == ids[:, None, :]) & earlier).to(tl.int32)
    return outside, (tl.max(tl.max(equal, axis=2), axis=1) > 0) & (outside == 0)


@triton.jit(do_not_specialize=GENERAL)
def _inspect(
    routes, routed, found, n_rows, n_layers, n_experts, HAS_ROUTED: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    slots = tl.arange(0, SLOTS)[None, :]
    exists = row < n_rows
    ids = tl.load(routes + row[:, None] * K + slots, mask=exists[:, None] & (slots < K), other=0).to(tl.int64)
    outside, twice = _faults(ids, slots, n_experts, K, SLOTS)
    if HAS_ROUTED:
        exists = exists & (tl.load(routed + row // n_layers, mask=exists, other=0) != 0)
    outside, twice = outside & exists, twice & exists
    tl.atomic_add(found, tl.sum(outside.to(tl.int64), axis=0))
    tl.atomic_add(found + 1, tl.sum(twice.to(tl.int64), axis=0))
    tl.atomic_min(found + 2, tl.min(tl.where(outside | twice, row, n_rows), axis=0))


def route(
    logits_TE: Tensor,
    scoring: str,
    bias_E: Tensor | None,
    recorded_TK: Tensor | None,
    routed_T: Tensor | None,
    padding_T: Tensor | None,
    top_k: int,
    n_group: int,
    topk_group: int,
    normalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, experts = logits_TE.shape
    ids_TK = logits_TE.new_empty(tokens, top_k, dtype=torch.int64)
    weights_TK = logits_TE.new_empty(tokens, top_k)
    counts_E = ids_TK.new_zeros(experts)
    nth_T = None if padding_T is None else padding_T.cumsum(0)
    optional = (bias_E, recorded_TK, _bytes(routed_T), _bytes(padding_T), nth_T)
    launch(
        "route",
        _route,
        triton.cdiv(tokens, config("route")["TOKENS"]),
        logits_TE,
        *(ids_TK if x is None else x for x in optional),
        ids_TK,
        weights_TK,
        counts_E,
        tokens,
        experts,
        scale,
        SCORING=scoring,
        HAS_BIAS=bias_E is not None,
        REPLAY=recorded_TK is not None,
        HAS_ROUTED=routed_T is not None,
        HAS_PADDING=padding_T is not None,
        NORMALISE=normalise,
        K=top_k,
        N_GROUP=n_group,
        TOPK_GROUP=topk_group,
        GROUPS=triton.next_power_of_2(n_group),
        **_padded(experts, top_k),
    )
    return ids_TK, weights_TK, counts_E


def route_backward(
    d_weights_TK: Tensor, logits_TE: Tensor, scoring: str, ids_TK: Tensor, normalise: bool, scale: float
) -> Tensor:
    tokens, experts = logits_TE.shape
    k = ids_TK.shape[1]
    d_logits_TE = torch.empty_like(logits_TE)
    args = (d_weights_TK, logits_TE, ids_TK, d_logits_TE, tokens, experts, scale)
    programs = triton.cdiv(tokens, config("route_backward")["TOKENS"])
    constexprs = {"SCORING": scoring, "NORMALISE": normalise, "K": k, **_padded(experts, k)}
    launch("route_backward", _route_backward, programs, *args, **constexprs)
    return d_logits_TE


def inspect_routes(routes_TLK: Tensor, routed_T: Tensor | None, n_experts: int) -> Tensor:
    tokens, layers, k = routes_TLK.shape
    rows = tokens * layers
    found = torch.zeros(3, dtype=torch.int64, device=routes_TLK.device)
    found[2] = rows
    if k:
        routed = routes_TLK if routed_T is None else _bytes(routed_T)
        constexprs = {"HAS_ROUTED": routed_T is not None, "K": k, "SLOTS": triton.next_power_of_2(k)}
        programs = triton.cdiv(rows, config("inspect_routes")["ROWS"])
        launch("inspect_routes", _inspect, programs, routes_TLK, routed, found, rows, layers, n_experts, **constexprs)
    found[2] = torch.where(found[2] < rows, found[2], -1)
    return found


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.view(torch.uint8)


def _padded(experts: int, k: int) -> dict[str, int]:
    return {"EXPERTS": triton.next_power_of_2(experts), "SLOTS": triton.next_power_of_2(k)}


OPS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (route, route_backward, inspect_routes)}

_TABLE = {"n_tokens": "i32", "n_experts": "i32"}
_ROUTE = {
    **_TABLE,
    **dict.fromkeys(("logits", "bias", "weights_out"), "*fp32"),
    **dict.fromkeys(("nth_padding", "ids_out", "counts_out"), "*i64"),
    **dict.fromkeys(("recorded", "routed", "padding"), "*u8"),
    "scale": "fp32",
}


def _route_aot(scoring: str, n_group: int, topk_group: int, replay: bool) -> Aot:
    return shipped(
        "route",
        _route,
        _ROUTE,
        bandwidth=False,
        SCORING=scoring,
        HAS_BIAS=scoring == "sigmoid",
        REPLAY=replay,
        HAS_ROUTED=replay,
        HAS_PADDING=replay,
        NORMALISE=True,
        K=8,
        N_GROUP=n_group,
        TOPK_GROUP=topk_group,
        GROUPS=triton.next_power_of_2(n_group),
        **_padded(256, 8),
    )


def _backward_aot(scoring: str) -> Aot:
    return shipped(
        "route_backward",
        _route_backward,
        {**_TABLE, "d_weights": "*fp32", "logits": "*fp32", "ids": "*i64", "d_logits": "*fp32", "scale": "fp32"},
        bandwidth=False,
        SCORING=scoring,
        NORMALISE=True,
        K=8,
        **_padded(256, 8),
    )


AOT: list[Aot] = [
    *(_route_aot(scoring, 1, 1, replay) for scoring in ("sigmoid", "softmax") for replay in (False, True)),
    _route_aot("sigmoid", 8, 4, True),
    *(_backward_aot(scoring) for scoring in ("sigmoid", "softmax")),
    shipped(
        "inspect_routes",
        _inspect,
        {"routes": "*u8", "routed": "*u8", "found": "*i64", "n_rows": "i32", "n_layers": "i32", "n_experts": "i32"},
        bandwidth=False,
        HAS_ROUTED=True,
        K=8,
        SLOTS=8,
    ),
]
