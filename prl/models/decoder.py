"""The decoder that Llama, Qwen3, Qwen3-MoE and GLM-4.5 share: pre-norm blocks of grouped-query attention and SwiGLU or MoE.

Legend: T flat tokens, D hidden width, L MoE layers, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from prl.layers.attention import Attention, AttentionConfig
from prl.layers.layout import Layout
from prl.layers.mlp import MLP
from prl.layers.moe import MoE
from prl.layers.norm import RMSNorm
from prl.layers.rope import Rope
from prl.layers.router import MoEConfig, Replay
from prl.models.base import ForwardInput, ForwardOutput, Model
from prl.models.spec import ModelSpec


class Block(nn.Module):
    def __init__(self, spec: ModelSpec, layer: int, attention: AttentionConfig, moe: MoEConfig | None):
        super().__init__()
        self.self_attn = Attention(attention, layer)
        self.mlp = MoE(moe) if moe is not None else MLP(spec.hidden_size, spec.raw["intermediate_size"])
        self.input_layernorm = RMSNorm(spec.hidden_size, attention.norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, attention.norm_eps)

    def forward(
        self, x_TD: Tensor, rotate: Callable[[Tensor], Tensor], layout: Layout, replay: Replay
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """([T, D], experts used [T, K], tokens per expert [E]), the last two None in a dense block."""
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), rotate, layout)
        h_TD = self.post_attention_layernorm(x_TD)
        if isinstance(self.mlp, MLP):
            return x_TD + self.mlp(h_TD), None, None
        y_TD, ids_TK, counts_E = self.mlp(h_TD, replay)
        return x_TD + y_TD, ids_TK, counts_E


class Backbone(nn.Module):
    def __init__(self, spec: ModelSpec, attention: AttentionConfig, moe: MoEConfig | None):
        super().__init__()
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(
            Block(spec, i, attention, moe if i in spec.moe_layers else None) for i in range(spec.n_layers)
        )
        self.norm = RMSNorm(spec.hidden_size, attention.norm_eps)


class Decoder(Model):
    def __init__(self, spec: ModelSpec, attention: AttentionConfig, moe: MoEConfig | None = None):
        super().__init__()
        self.spec = spec
        self.rope = Rope(spec.rope)
        self.model = Backbone(spec, attention, moe)
        if not spec.tied:
            self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.layers

    @property
    def lm_head_weight(self) -> Tensor:
        """[V, D]."""
        return self.model.embed_tokens.weight if self.spec.tied else self.lm_head.weight

    def cache_spec(self) -> list[tuple[int, str, tuple[int, ...]]]:
        """(layer, name, shape of a token's row) of everything that attention caches."""
        return [entry for module in self.modules() if isinstance(module, Attention) for entry in module.cache_spec()]

    def forward(self, given: ForwardInput) -> ForwardOutput:
        x_TD = self.model.embed_tokens(given.tokens_T)
        cos, sin = self.rope.angles(given.positions_T, x_TD.dtype)
        routes: list[Tensor] = []
        counts: list[Tensor] = []
        for block in self.layers:
            recorded = given.routes_TLK[:, len(routes)] if given.routes_TLK is not None and isinstance(block.mlp, MoE) else None
            replay = Replay(recorded, given.routed_T, given.padding_T)
            x_TD, ids_TK, counts_E = block(x_TD, lambda h: self.rope.rotate(h, cos, sin), given.layout, replay)
            if ids_TK is not None:
                routes.append(ids_TK)
                counts.append(counts_E)
        return ForwardOutput(
            self.model.norm(x_TD), torch.stack(routes, 1) if routes else None, torch.stack(counts) if counts else None
        )
