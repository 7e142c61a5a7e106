"""Attention in a fixed order: the result of a query depends on the keys it sees, in their order, and on nothing else.

Legend: B sequences, Q queries, S keys, K keys kept, H query heads, G key heads, X width of a key, C width of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from prl.kernels import checks
from prl.kernels.numerics import wide
from prl.kernels.registry import define

FLOATS = (torch.bfloat16, torch.float32, torch.float64)


def attention(
    q_BQHX: Tensor, keys_BSGX: Tensor, values_BSGC: Tensor | None, value_width: int, seen: Tensor, scale: float
) -> Tensor:
    """[B, Q, H, C]: softmax of scale · q·k over the keys seen, times the values; no gradient. H / G heads share a key head.

    `seen` is bool [B, Q, S], or int32 [B, Q, K]: which keys, ascending, −1 where fewer; every query sees one. Without values
    they are the first `value_width` entries of the keys. Scores, softmax and sums are in float32 or wider.
    On the backend `cpu` the bits are the same whatever else is in the batch, however it is padded, and for a mask and for the
    indices of its keys: sums go from the first key to the last, and a key that is not seen adds exactly nothing.
    """
    q_BQHX, keys_BSGX, seen = q_BQHX.contiguous(), keys_BSGX.contiguous(), seen.contiguous()  # caches are read in slices
    checks.tensor("attention", "q_BQHX", q_BQHX, [None] * 4, FLOATS)
    b, q, h, x = q_BQHX.shape
    checks.tensor("attention", "keys_BSGX", keys_BSGX, [b, None, None, x], [q_BQHX.dtype])
    s, g = keys_BSGX.shape[1:3]
    checks.multiple("attention", "H", h, g)
    if q_BQHX.dtype == torch.bfloat16:
        checks.multiple("attention", "X", x, 2)
    if values_BSGC is None:
        if not 0 < value_width <= x:
            checks.fail("attention", "value_width", f"1 to X, which is {x}", value_width)
    else:
        values_BSGC = values_BSGC.contiguous()
        checks.tensor("attention", "values_BSGC", values_BSGC, [b, s, g, value_width], [q_BQHX.dtype])
    checks.tensor("attention", "seen", seen, [b, q, s if seen.dtype == torch.bool else None], [torch.bool, torch.int32])
    checks.same_device("attention", q_BQHX=q_BQHX, keys_BSGX=keys_BSGX, values_BSGC=values_BSGC, seen=seen)
    return _attention_op(
        q_BQHX.detach(), keys_BSGX.detach(), None if values_BSGC is None else values_BSGC.detach(), value_width, seen, scale
    )


def attention_again(
    q_BQHX: Tensor,
    keys_BSGX: Tensor,
    values_BSGC: Tensor | None,
    value_width: int,
    seen: Tensor,
    scale: float,
    again: Callable[..., Tensor],
) -> Tensor:
    """`attention` with the gradient of `again(q, keys[, values])`, which is the same in torch's own order."""
    return _Attention.apply(q_BQHX, keys_BSGX, values_BSGC, value_width, seen, scale, again)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BQHX: Tensor,
        keys_BSGX: Tensor,
        values_BSGC: Tensor | None,
        value_width: int,
        seen: Tensor,
        scale: float,
        again: Callable[..., Tensor],
    ) -> Tensor:
        ctx.again = again
        ctx.save_for_backward(*(t for t in (q_BQHX, keys_BSGX, values_BSGC) if t is not None))
        return attention(q_BQHX, keys_BSGX, values_BSGC, value_width, seen, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BQHC: Tensor) -> tuple[Tensor | None, ...]:
        given = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.again(*given)
        grads = torch.autograd.grad(out, given, grad_BQHC)
        return *grads, *[None] * (7 - len(grads))


def _reference(
    q_BQHX: Tensor, keys_BSGX: Tensor, values_BSGC: Tensor | None, value_width: int, seen: Tensor, scale: float
) -> Tensor:
    dtype, groups = wide(q_BQHX), keys_BSGX.shape[2]
    values_BSGC = keys_BSGX[..., :value_width] if values_BSGC is None else values_BSGC
    if seen.dtype == torch.int32:
        kept, s = seen.long(), keys_BSGX.shape[1]
        seen = torch.zeros(*kept.shape[:2], s + 1, dtype=torch.bool, device=kept.device)
        seen = seen.scatter_(-1, torch.where(kept < 0, s, kept), True)[..., :s]
    q_BQGPX = q_BQHX.to(dtype).unflatten(2, (groups, -1))
    scores_BGPQS = torch.einsum("bqgpx,bsgx->bgpqs", q_BQGPX, keys_BSGX.to(dtype)) * scale
    p = scores_BGPQS.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
    return torch.einsum("bgpqs,bsgc->bqgpc", p, values_BSGC.to(dtype)).flatten(2, 3).to(q_BQHX.dtype)


def _fake(
    q_BQHX: Tensor, keys_BSGX: Tensor, values_BSGC: Tensor | None, value_width: int, seen: Tensor, scale: float
) -> Tensor:
    return q_BQHX.new_empty(*q_BQHX.shape[:3], value_width)


_attention_op = define(
    "attention(Tensor q_BQHX, Tensor keys_BSGX, Tensor? values_BSGC, int value_width, Tensor seen, float scale) -> Tensor",
    _reference,
    _fake,
    backends=("cpu",),
)
