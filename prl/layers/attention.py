"""Grouped-query attention (arXiv 2305.13245) with what Llama, Qwen3 and GLM-4.5 differ in: biases, QK-norm, partial rotary.

Legend: T flat tokens, D hidden width, H query heads, G key heads, C width of a head, B Q S as in `layout`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from prl.layers.block import AttentionLayer, LayerInput, Selection
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


class Attention(AttentionLayer):
    def __init__(self, config: AttentionConfig, layer: int):
        super().__init__()
        c = self.config = config
        self.layer = layer
        self.q_proj = nn.Linear(c.hidden, c.heads * c.head_dim, bias=c.qkv_bias)
        self.k_proj = nn.Linear(c.hidden, c.key_heads * c.head_dim, bias=c.qkv_bias)
        self.v_proj = nn.Linear(c.hidden, c.key_heads * c.head_dim, bias=c.qkv_bias)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.hidden, bias=c.output_bias)
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
        c = self.config
        q_THC, k_TGC, v_TGC = self.project(x_TD, inputs.rotate)
        parts = []
        for bucket in inputs.layout.buckets:
            q_BHQC = bucket.queries(q_THC).transpose(1, 2)
            k_BGSC = bucket.keys(self.layer, "k", k_TGC).transpose(1, 2)
            v_BGSC = bucket.keys(self.layer, "v", v_TGC).transpose(1, 2)
            y_BHQC = F.scaled_dot_product_attention(
                q_BHQC, k_BGSC, v_BGSC, attn_mask=bucket.mask_BQS[:, None], enable_gqa=c.key_heads < c.heads
            )
            parts.append(y_BHQC.transpose(1, 2).flatten(2))
        return self.o_proj(inputs.layout.merge(parts)), inputs.selection
