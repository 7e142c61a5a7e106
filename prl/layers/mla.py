"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) in the absorbed form, with DSA's choice of keys.

Legend: T tokens, D hidden width, H heads, N width of a head without position, R with, V of a value, L query latent,
C key and value latent, X = C + R width of a cached key.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from prl.kernels.attention import attention_again
from prl.kernels.dense import per_head
from prl.kernels.latent_attention import latent_attention, sparse_latent_attention
from prl.layers.block import AttentionLayer, LayerInput, Selection
from prl.layers.dsa import Indexer
from prl.layers.layout import Layout
from prl.layers.linear import Linear
from prl.layers.norm import RMSNorm


class MLA(AttentionLayer):
    in_order = False
    """Whether everything is computed in a fixed order (`prl.models.bitwise`)."""

    def __init__(
        self,
        layer: int,
        hidden: int,
        *,
        n_heads: int,
        q_latent: int,
        kv_latent: int,
        nope_width: int,
        rope_width: int,
        value_width: int,
        bias: bool,
        indexer: Indexer | None,
    ):
        """`indexer` None: the selection of the layers before is used."""
        super().__init__()
        self.layer, self.n_heads, self.kv_latent = layer, n_heads, kv_latent
        self.nope_width, self.rope_width, self.value_width = nope_width, rope_width, value_width
        self.q_a_proj = Linear(hidden, q_latent, bias=bias)
        self.q_a_layernorm = RMSNorm(q_latent, 1e-6)
        self.q_b_proj = Linear(q_latent, n_heads * (nope_width + rope_width), bias=False)
        self.kv_a_proj_with_mqa = Linear(hidden, kv_latent + rope_width, bias=bias)
        self.kv_a_layernorm = RMSNorm(kv_latent, 1e-6)
        self.kv_b_proj = Linear(kv_latent, n_heads * (nope_width + value_width), bias=False, never_fp8=True)
        self.o_proj = Linear(n_heads * value_width, hidden, bias=bias)
        self.indexer = indexer

    def cache_spec(self) -> list[tuple[int, str, tuple[int, ...]]]:
        kv = (self.layer, "kv", (self.kv_latent + self.rope_width,))
        return [kv] if self.indexer is None else [kv, (self.layer, "index", (self.indexer.width,))]

    def project(self, x_TD: Tensor, rotate: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Query latents [T, L] and keys [T, X]."""
        latent_TC, rope_TR = self.kv_a_proj_with_mqa(x_TD).split((self.kv_latent, self.rope_width), dim=-1)
        key_TX = torch.cat((self.kv_a_layernorm(latent_TC), rotate(rope_TR[:, None])[:, 0]), -1)
        return self.q_a_layernorm(self.q_a_proj(x_TD)), key_TX

    def expand(self, q_TL: Tensor, up_HNC: Tensor, rotate: Callable[[Tensor], Tensor]) -> Tensor:
        """Queries of the cached keys [T, H, X]."""
        nope_THN, rope_THR = (
            self.q_b_proj(q_TL).unflatten(-1, (self.n_heads, -1)).split((self.nope_width, self.rope_width), dim=-1)
        )
        if self.in_order:
            latent_THC = per_head(nope_THN, up_HNC, transposed=True)
        else:
            latent_THC = torch.bmm(nope_THN.transpose(0, 1), up_HNC).transpose(0, 1)
        return torch.cat((latent_THC, rotate(rope_THR)), -1)

    def forward(self, x_TD: Tensor, inputs: LayerInput) -> tuple[Tensor, Selection | None]:
        q_TL, key_TX = self.project(x_TD, inputs.rotate)
        selection = inputs.selection if self.indexer is None else self.indexer(x_TD, q_TL, inputs)
        if selection is None:
            raise ValueError(f"layer {self.layer} shares an indexer's selection, but no layer before it has an indexer")
        up_HNC, up_HVC = self.kv_b_proj.weight.unflatten(0, (self.n_heads, -1)).split(
            (self.nope_width, self.value_width), dim=1
        )
        y_TE = self.attend(self.expand(q_TL, up_HNC, inputs.rotate), key_TX, up_HVC, selection, inputs.layout)
        return self.o_proj(y_TE), selection

    def attend(self, q_THX: Tensor, key_TX: Tensor, up_HVC: Tensor, selection: Selection, layout: Layout) -> Tensor:
        """Values of all heads [T, H · V]."""
        scale = (self.nope_width + self.rope_width) ** -0.5
        parts = []
        rows_GX = layout.keys(self.layer, "kv", key_TX)
        for bucket, q_BQHX, kept in zip(layout.buckets, layout.split(q_THX), selection.kept, strict=True):
            attend = latent_attention if kept.dtype == torch.bool else sparse_latent_attention
            keys_BSX, c = bucket.keys(rows_GX), self.kv_latent
            if self.in_order:
                again = functools.partial(_again, attend, kept, c, scale)
                out_PHC = attention_again(q_BQHX, keys_BSX[:, :, None], None, c, kept, scale, again).flatten(0, 1)
                out_PHV = per_head(out_PHC, up_HVC)
            else:
                out_PHC = attend(q_BQHX, keys_BSX, kept, c, scale).flatten(0, 1)
                out_PHV = torch.bmm(out_PHC.transpose(0, 1), up_HVC.transpose(1, 2)).transpose(0, 1)
            parts.append(out_PHV.reshape(*q_BQHX.shape[:2], -1))
        return layout.merge(parts)


def _again(
    attend: Callable[..., Tensor], kept: Tensor, value_width: int, scale: float, q_BQHX: Tensor, keys_BSGX: Tensor
) -> Tensor:
    return attend(q_BQHX, keys_BSGX[:, :, 0], kept, value_width, scale)
