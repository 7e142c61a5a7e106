"""Attention over one latent per key, shared by all heads: multi-head latent attention in its absorbed form.

Legend: B sequences, Q queries, S keys, K keys kept, H heads, X width of a key (latent and rope part), C width of the latent
= of a value, R = Q·H, N queries of a chunk, G = B·S.
DeepSeek-V2 (arXiv 2405.04434, section 2.1): the up projections of keys and values are applied to queries and outputs
instead, so cached and packed forwards share this one function and nothing is ever expanded to heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from prl.kernels.numerics import wide

KEEP = 1 << 24
"""Most probabilities that exist at once, and that are kept for backward: more queries go in chunks, computed again there."""
CHUNK = 1 << 24
"""Most numbers of gathered keys that exist at once."""


def latent_attention(q_BQHX: Tensor, keys_BSX: Tensor, mask_BQS: Tensor, value_width: int, scale: float) -> Tensor:
    """[B, Q, H, C]: softmax of scale · q·k over the keys of the mask, times the first C entries of the keys.

    Every query must see a key. The softmax is in float32 or wider.
    """
    return _LatentAttention.apply(q_BQHX, keys_BSX, mask_BQS, value_width, scale)


def sparse_latent_attention(q_BQHX: Tensor, keys_BSX: Tensor, kept_BQK: Tensor, value_width: int, scale: float) -> Tensor:
    """`latent_attention` over the keys that each query kept: int32, distinct, −1 where fewer, at least one.

    Work and memory grow with Q·K, not with Q·S: queries go in chunks, which backward computes again. A key's gradient is the
    sum over queries in their order, in float32 or wider.
    """
    return _SparseLatentAttention.apply(q_BQHX, keys_BSX, kept_BQK, value_width, scale)


def _probabilities(q_BRX: Tensor, keys_BSX: Tensor, mask_BQS: Tensor, scale: float) -> Tensor:
    """[B, R, S] in float32 or wider."""
    scores = torch.bmm(q_BRX, keys_BSX.transpose(1, 2))
    scores = scores.to(wide(scores)).mul_(scale)
    scores.unflatten(1, (mask_BQS.shape[1], -1)).masked_fill_(~mask_BQS[:, :, None], -torch.inf)
    return scores.softmax(-1)


class _LatentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BQHX: Tensor, keys_BSX: Tensor, mask_BQS: Tensor, value_width: int, scale: float) -> Tensor:
        ctx.value_width, ctx.scale = value_width, scale
        ctx.chunk = max(1, KEEP // (mask_BQS[:, :1].numel() * q_BQHX.shape[2]))
        ctx.keeps = ctx.chunk >= q_BQHX.shape[1]
        values_BSC = keys_BSX[..., :value_width]
        parts = []
        for q, mask in zip(q_BQHX.split(ctx.chunk, 1), mask_BQS.split(ctx.chunk, 1), strict=True):
            p = _probabilities(q.flatten(1, 2), keys_BSX, mask, scale)
            parts.append(torch.bmm(p.to(keys_BSX.dtype), values_BSC).unflatten(1, q.shape[1:3]))
        ctx.save_for_backward(q_BQHX, keys_BSX, p if ctx.keeps else mask_BQS)
        return parts[0] if ctx.keeps else torch.cat(parts, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BQHC: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        q_BQHX, keys_BSX, kept = ctx.saved_tensors
        if ctx.keeps:
            d_q, d_keys = _gradients(grad_BQHC, q_BQHX, keys_BSX, kept, ctx.value_width, ctx.scale)
            return d_q, d_keys, None, None, None
        d_q, d_keys = torch.empty_like(q_BQHX), torch.zeros_like(keys_BSX, dtype=wide(keys_BSX))
        for d, grad, q, mask in zip(*(t.split(ctx.chunk, 1) for t in (d_q, grad_BQHC, q_BQHX, kept)), strict=True):
            p = _probabilities(q.flatten(1, 2), keys_BSX, mask, ctx.scale)
            d[:], added = _gradients(grad, q, keys_BSX, p, ctx.value_width, ctx.scale)
            d_keys += added
        return d_q, d_keys.to(keys_BSX.dtype), None, None, None


def _gradients(
    grad_BQHC: Tensor, q_BQHX: Tensor, keys_BSX: Tensor, p_BRS: Tensor, value_width: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Of queries and keys. What the mask excludes has p = 0, so its score gets no gradient without masking again."""
    grad_BRC, q_BRX = grad_BQHC.flatten(1, 2), q_BQHX.flatten(1, 2)
    d_p = torch.bmm(grad_BRC, keys_BSX[..., :value_width].transpose(1, 2)).to(p_BRS.dtype)
    d_scores = torch.ops.aten._softmax_backward_data(d_p, p_BRS, -1, p_BRS.dtype).mul_(scale).to(keys_BSX.dtype)
    d_keys = torch.bmm(d_scores.transpose(1, 2), q_BRX)
    d_keys[..., :value_width] += torch.bmm(p_BRS.to(keys_BSX.dtype).transpose(1, 2), grad_BRC)
    return torch.bmm(d_scores, keys_BSX).view(q_BQHX.shape), d_keys


class _SparseLatentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BQHX: Tensor, keys_BSX: Tensor, kept_BQK: Tensor, value_width: int, scale: float) -> Tensor:
        ctx.save_for_backward(q_BQHX, keys_BSX, kept_BQK)
        ctx.value_width, ctx.scale = value_width, scale
        out = q_BQHX.new_empty(*q_BQHX.shape[:3], value_width)
        for out_NHC, q_NHX, kept_NK in _chunks(keys_BSX, kept_BQK, out, q_BQHX):
            keys_NKX, mask_N1K = _gathered(keys_BSX, kept_NK)
            p = _probabilities(q_NHX, keys_NKX, mask_N1K, scale)
            torch.bmm(p.to(keys_NKX.dtype), keys_NKX[..., :value_width], out=out_NHC)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BQHC: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        q_BQHX, keys_BSX, kept_BQK = ctx.saved_tensors
        d_q = torch.empty_like(q_BQHX)
        d_keys_GX = torch.zeros_like(keys_BSX, dtype=wide(keys_BSX)).flatten(0, 1)
        for d_q_NHX, grad_NHC, q_NHX, kept_NK in _chunks(keys_BSX, kept_BQK, d_q, grad_BQHC, q_BQHX):
            keys_NKX, mask_N1K = _gathered(keys_BSX, kept_NK)
            p = _probabilities(q_NHX, keys_NKX, mask_N1K, ctx.scale)
            d_q_N1HX, d_keys_NKX = _gradients(grad_NHC[:, None], q_NHX[:, None], keys_NKX, p, ctx.value_width, ctx.scale)
            d_q_NHX[:] = d_q_N1HX[:, 0]
            rows, added = kept_NK.clamp(min=0).flatten(), d_keys_NKX.flatten(0, 1).to(d_keys_GX.dtype)
            if added.is_cuda:
                d_keys_GX.index_put_((rows,), added, accumulate=True)  # it sorts, where index_add_ races
            else:
                d_keys_GX.index_add_(0, rows, added)
        return d_q, d_keys_GX.view(keys_BSX.shape).to(keys_BSX.dtype), None, None, None


def _chunks(keys_BSX: Tensor, kept_BQK: Tensor, *tensors_BQ: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Each tensor and at last the keys kept, as rows of the flattened keys, in chunks of queries."""
    b, s, x = keys_BSX.shape
    first_B = torch.arange(0, b * s, s, device=kept_BQK.device)
    kept_BQK = torch.where(kept_BQK < 0, -1, kept_BQK + first_B[:, None, None])
    n = max(1, CHUNK // (kept_BQK.shape[-1] * x))
    return zip(*(t.flatten(0, 1).split(n) for t in (*tensors_BQ, kept_BQK)), strict=True)


def _gathered(keys_BSX: Tensor, kept_NK: Tensor) -> tuple[Tensor, Tensor]:
    """(their keys [N, K, X], which of them are real, bool [N, 1, K]: one query a sequence)."""
    keys = keys_BSX.flatten(0, 1).index_select(0, kept_NK.clamp(min=0).flatten())
    return keys.unflatten(0, kept_NK.shape), (kept_NK >= 0)[:, None]
