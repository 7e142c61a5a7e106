"""Attention over one latent per key, shared by all heads: multi-head latent attention in its absorbed form.

Legend: B sequences, Q queries, S keys, H heads, X width of a key (latent and rope part), C width of the latent = of a value,
R = Q·H.
DeepSeek-V2 (arXiv 2405.04434, section 2.1): the up projections of keys and values are applied to queries and outputs
instead, so cached and packed forwards share this one function and nothing is ever expanded to heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from prl.kernels.numerics import wide


def latent_attention(q_BQHX: Tensor, keys_BSX: Tensor, mask_BQS: Tensor, value_width: int, scale: float) -> Tensor:
    """[B, Q, H, C]: softmax of scale · q·k over the keys of the mask, times the first C entries of the keys.

    Every query must see a key. The softmax is in float32 or wider.
    """
    return _LatentAttention.apply(q_BQHX, keys_BSX, mask_BQS, value_width, scale)


def _probabilities(q_BRX: Tensor, keys_BSX: Tensor, mask_BQS: Tensor, scale: float) -> Tensor:
    """[B, R, S] in float32 or wider."""
    scores = torch.bmm(q_BRX, keys_BSX.transpose(1, 2))
    scores = scores.to(wide(scores)).mul_(scale)
    scores.unflatten(1, (mask_BQS.shape[1], -1)).masked_fill_(~mask_BQS[:, :, None], -torch.inf)
    return scores.softmax(-1)


class _LatentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BQHX: Tensor, keys_BSX: Tensor, mask_BQS: Tensor, value_width: int, scale: float) -> Tensor:
        p = _probabilities(q_BQHX.flatten(1, 2), keys_BSX, mask_BQS, scale)
        ctx.save_for_backward(q_BQHX, keys_BSX, p)
        ctx.value_width, ctx.scale = value_width, scale
        return torch.bmm(p.to(keys_BSX.dtype), keys_BSX[..., :value_width]).unflatten(1, q_BQHX.shape[1:3])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BQHC: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        q_BQHX, keys_BSX, p = ctx.saved_tensors
        values_BSC, grad_BRC = keys_BSX[..., : ctx.value_width], grad_BQHC.flatten(1, 2)
        # What the mask excludes has p = 0, so its score gets no gradient without masking again.
        d_p = torch.bmm(grad_BRC, values_BSC.transpose(1, 2)).to(p.dtype)
        d_scores = torch.ops.aten._softmax_backward_data(d_p, p, -1, p.dtype).mul_(ctx.scale).to(keys_BSX.dtype)
        d_keys = torch.bmm(d_scores.transpose(1, 2), q_BQHX.flatten(1, 2))
        d_keys[..., : ctx.value_width] += torch.bmm(p.to(keys_BSX.dtype).transpose(1, 2), grad_BRC)
        return torch.bmm(d_scores, keys_BSX).view(q_BQHX.shape), d_keys, None, None, None
