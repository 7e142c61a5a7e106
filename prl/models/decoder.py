"""The decoder that Llama, Qwen3, Qwen3-MoE and GLM-4.5 share: pre-norm blocks of grouped-query attention and SwiGLU or MoE."""

from __future__ import annotations

from prl.layers.attention import Attention, AttentionConfig
from prl.layers.block import Block
from prl.layers.mlp import MLP
from prl.layers.moe import MoE
from prl.layers.router import MoEConfig
from prl.models.base import Model
from prl.models.spec import ModelSpec


class Decoder(Model):
    def __init__(self, spec: ModelSpec, attention: AttentionConfig, moe: MoEConfig | None = None):
        def block(layer: int) -> Block:
            mlp = (
                MoE(moe)
                if moe is not None and layer in spec.moe_layers
                else MLP(spec.hidden_size, spec.raw["intermediate_size"])
            )
            return Block(Attention(attention, layer), mlp, spec.hidden_size, attention.norm_eps)

        super().__init__(spec, block)
