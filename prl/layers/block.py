"""The transformer block that all supported architectures share, and what passes between blocks.

Legend: T tokens, D hidden width, E experts, K experts per token, B sequences, Q queries, S keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn

from prl.layers.layout import Layout
from prl.layers.mlp import MLP
from prl.layers.moe import MoE
from prl.layers.norm import RMSNorm
from prl.layers.router import Replay


@dataclass(slots=True, frozen=True)
class Selection:
    """The keys that a DSA layer kept."""

    kept: tuple[Tensor, ...]
    """Per bucket, bool [B, Q, S]: the layout's mask and the selection; of long buckets, int32 [B, Q, index_topk]: which of the
    S keys, ascending, then −1."""
    indices_TK: Tensor | None
    """int32 [T, index_topk], where asked for."""


@dataclass(slots=True)
class LayerInput:
    """What a block needs besides its hidden states."""

    rotate: Callable[[Tensor], Tensor]
    """The rotary embedding of [T, heads, width] at these tokens' positions."""
    layout: Layout
    selection: Selection | None = None
    """Of the last DSA layer with an indexer of its own."""
    recorded_TK: Tensor | None = None
    """int32 [T, index_topk]: the indexer's selections to replay."""
    record_selections: bool = False
    experts: Replay = field(default_factory=Replay)


class LayerOutput(NamedTuple):
    x_TD: Tensor
    selection: Selection | None
    """Of this layer, where it has an indexer, else the one it was given."""
    routes_TK: Tensor | None
    """int64; None without experts, as `counts_E`."""
    counts_E: Tensor | None


class AttentionLayer(nn.Module):
    """Base of the attention layers."""

    def cache_spec(self) -> list[tuple[int, str, tuple[int, ...]]]:
        """(layer, name, shape of a token's row) of everything that `forward` passes to `Layout.keys`."""
        raise NotImplementedError

    def forward(self, x_TD: Tensor, inputs: LayerInput) -> tuple[Tensor, Selection | None]:
        """(output [T, D], selection: its own where it has an indexer, else the one in `inputs`)."""
        raise NotImplementedError


class Block(nn.Module):
    def __init__(self, attention: AttentionLayer, mlp: MLP | MoE, hidden: int, eps: float):
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)

    def forward(self, x_TD: Tensor, inputs: LayerInput) -> LayerOutput:
        y_TD, selection = self.self_attn(self.input_layernorm(x_TD), inputs)
        x_TD = x_TD + y_TD
        y_TD = self.post_attention_layernorm(x_TD)
        if isinstance(self.mlp, MoE):
            y_TD, routes_TK, counts_E = self.mlp(y_TD, inputs.experts)
            return LayerOutput(x_TD + y_TD, selection, routes_TK, counts_E)
        return LayerOutput(x_TD + self.mlp(y_TD), selection, None, None)
