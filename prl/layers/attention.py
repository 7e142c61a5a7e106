"""Grouped-query attention (arXiv 2305.13245) with what Llama, Qwen3 and GLM-4.5 differ in: biases, QK-norm, partial rotary.

Legend: T flat tokens, D hidden width, H query heads, G key heads, C width of a head, B Q S as in `layout`, R rows with keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from prl.kernels.attention import attention_again
from prl.layers.block import AttentionLayer, LayerInput, Selection
from prl.layers.layout import Bucket, Layout
from prl.layers.linear import Linear
from prl.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    hidden: int
    heads: int
    key_heads: int
    head_dim: int
    norm_eps: float
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    """RMSNorm of every query and key head before the rotation."""


KEEP = 1 << 20
"""Most query-key pairs of a bucket whose attention keeps what backward needs; of larger ones it is computed again."""


class Core(Protocol):
    """How heads attend, rotated and before the output projection; where ranks share a row, it is theirs."""

    def __call__(self, layer: int, q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor, layout: Layout, /) -> Tensor:
        """[T, H, C]."""
        ...


def attend(layer: int, q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor, layout: Layout) -> Tensor:
    """Torch's attention, bucket by bucket."""
    k_RGC, v_RGC = layout.keys(layer, "k", k_TGC), layout.keys(layer, "v", v_TGC)
    parts = []
    for bucket, q_BQHC in zip(layout.buckets, layout.split(q_THC), strict=True):
        args = bucket, q_BQHC, bucket.keys(k_RGC), bucket.keys(v_RGC)
        large = q_BQHC.shape[0] * q_BQHC.shape[1] * args[2].shape[1] > KEEP
        parts.append(checkpoint(_attend, *args, use_reentrant=False) if large and torch.is_grad_enabled() else _attend(*args))
    return layout.merge(parts)


def _attend(bucket: Bucket, q_BQHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BQHC, k_BSGC, v_BSGC))
    grouped = k.shape[1] < q.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bucket.mask_BQS[:, None], enable_gqa=grouped).transpose(1, 2)


def attend_in_order(layer: int, q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor, layout: Layout) -> Tensor:
    """`attend` in a fixed order. Ranks that share a row gather its keys and values."""
    k_RGC, v_RGC = layout.keys(layer, "k", k_TGC), layout.keys(layer, "v", v_TGC)
    width = v_TGC.shape[-1]
    parts = []
    for bucket, q_BQHC in zip(layout.buckets, layout.split(q_THC), strict=True):
        args = q_BQHC, bucket.keys(k_RGC), bucket.keys(v_RGC), width, bucket.mask_BQS, width**-0.5
        parts.append(attention_again(*args, functools.partial(_attend, bucket)))
    return layout.merge(parts)


class Attention(AttentionLayer):
    def __init__(self, config: AttentionConfig, layer: int):
        super().__init__()
        c = self.config = config
        self.layer = layer
        self.core: Core = attend
        self.q_proj = Linear(c.hidden, c.heads * c.head_dim, bias=c.qkv_bias)
        self.k_proj = Linear(c.hidden, c.key_heads * c.head_dim, bias=c.qkv_bias)
        self.v_proj = Linear(c.hidden, c.key_heads * c.head_dim, bias=c.qkv_bias)
        self.o_proj = Linear(c.heads * c.head_dim, c.hidden, bias=c.output_bias)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else None

    def cache_spec(self) -> list[tuple[int, str, tuple[int, ...]]]:
        # Keys are cached rotated.
        width = (self.config.key_heads, self.config.head_dim)
        return [(self.layer, "k", width), (self.layer, "v", width)]

    def project(self, x_TD: Tensor, rotate: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, H, C], keys and values [T, G, C]; queries and keys are rotated."""
        c = self.config
        q_THC = self.q_proj(x_TD).unflatten(-1, (c.heads, c.head_dim))
        k_TGC = self.k_proj(x_TD).unflatten(-1, (c.key_heads, c.head_dim))
        v_TGC = self.v_proj(x_TD).unflatten(-1, (c.key_heads, c.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_THC, k_TGC = self.q_norm(q_THC), self.k_norm(k_TGC)
        return rotate(q_THC), rotate(k_TGC), v_TGC

    def forward(self, x_TD: Tensor, inputs: LayerInput) -> tuple[Tensor, Selection | None]:
        q_THC, k_TGC, v_TGC = self.project(x_TD, inputs.rotate)
        return self.o_proj(self.attend(q_THC, k_TGC, v_TGC, inputs.layout)), inputs.selection

    def attend(self, q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor, layout: Layout) -> Tensor:
        """Values of all heads [T, H · C]."""
        return self.core(self.layer, q_THC, k_TGC, v_TGC, layout).flatten(1)
