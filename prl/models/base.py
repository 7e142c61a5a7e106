"""What every model takes and gives. A model is plain maths over flat tokens; it does not know how it is sharded or cached.

Legend: T flat tokens, D hidden width, L MoE layers, K experts per token, E experts, A attention layers with an indexer,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from prl.kernels.router import check_routes
from prl.layers.block import Block, LayerInput, Selection
from prl.layers.layout import Layout
from prl.layers.norm import RMSNorm
from prl.layers.rope import Rope
from prl.layers.router import Replay
from prl.models.spec import ModelSpec


@dataclass(slots=True)
class ForwardInput:
    tokens_T: Tensor
    """int64 [T]."""
    positions_T: Tensor
    """int64 [T], position in the sequence (RoPE)."""
    layout: Layout
    routes_TLK: Tensor | None = None
    """Recorded experts, any integer type; used where `routed_T`."""
    routed_T: Tensor | None = None
    """bool [T]: whether the row is replayed; other rows take the model's own choice. None with routes: all rows."""
    padding_T: Tensor | None = None
    """bool [T]: padding rows; spread over the experts and left out of every count."""
    selections_TAS: Tensor | None = None
    """int32 [T, A, index_topk], −1 where fewer: the indexer's choice to replay (positions in the sequence). A row of −1
    takes the model's own choice."""
    record_selections: bool = False


@dataclass(slots=True)
class ForwardOutput:
    hidden_TD: Tensor
    """After the final norm; the LM head is apart (`model.lm_head_weight`, [V, D])."""
    routes_TLK: Tensor | None
    """int64 [T, L, K]: the experts used, in the router's order; None for dense models."""
    expert_counts_LE: Tensor | None
    """int64 [L, E]: tokens per expert, padding excluded."""
    selections_TAS: Tensor | None = None
    """int32 [T, A, index_topk], if asked for: positions of the keys used, ascending, then −1."""


class Backbone(nn.Module):
    """Everything but the LM head; it exists for Hugging Face's names (`model.…`)."""

    def __init__(self, spec: ModelSpec, block: Callable[[int], Block]):
        super().__init__()
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(block(i) for i in range(spec.n_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.raw["rms_norm_eps"])


class Model(nn.Module):
    def __init__(self, spec: ModelSpec, block: Callable[[int], Block]):
        """`block(i)` makes layer i of the architecture."""
        super().__init__()
        self.spec = spec
        self.rope = Rope(spec.rope)
        self.model = Backbone(spec, block)
        self.lm_head = None if spec.tied else nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.layers

    @property
    def lm_head_weight(self) -> Tensor:
        """[V, D]."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def cache_spec(self) -> list[tuple[int, str, tuple[int, ...]]]:
        """(layer, name, shape of a token's row) of everything that attention passes to `Layout.keys`."""
        return [entry for block in self.layers for entry in cast(Block, block).self_attn.cache_spec()]

    def forward(self, inputs: ForwardInput) -> ForwardOutput:
        """Raises RouteError for recorded routes that no router can have made."""
        spec = self.spec
        moe = {layer: n for n, layer in enumerate(spec.moe_layers)}
        indexed = {layer: n for n, layer in enumerate(spec.indexed_layers)}
        routes_TLK = inputs.routes_TLK if moe else None
        if routes_TLK is not None:
            check_routes(routes_TLK, inputs.routed_T, spec.n_experts)
        x_TD = self.model.embed_tokens(inputs.tokens_T)
        cos, sin = self.rope.angles(inputs.positions_T, x_TD.dtype)
        selection: Selection | None = None
        routes: list[Tensor] = []
        counts: list[Tensor] = []
        kept: list[Tensor] = []
        for i, block in enumerate(self.layers):
            replayed = inputs.selections_TAS if i in indexed else None
            given = LayerInput(
                rotate=lambda h: self.rope.rotate(h, cos, sin),
                layout=inputs.layout,
                selection=None if i in indexed else selection,  # what it does not read must not wait for its recomputation
                recorded_TK=None if replayed is None else replayed[:, indexed[i]],
                record_selections=inputs.record_selections,
                experts=Replay(
                    ids_TK=routes_TLK[:, moe[i]] if routes_TLK is not None and i in moe else None,
                    routed_T=inputs.routed_T,
                    padding_T=inputs.padding_T,
                ),
            )
            x_TD, selection, routes_TK, counts_E = block(x_TD, given)
            if routes_TK is not None and counts_E is not None:
                routes.append(routes_TK)
                counts.append(counts_E)
            if i in indexed and selection is not None and selection.indices_TK is not None:
                kept.append(selection.indices_TK)
        return ForwardOutput(
            hidden_TD=self.model.norm(x_TD),
            routes_TLK=torch.stack(routes, 1) if routes else None,
            expert_counts_LE=torch.stack(counts) if counts else None,
            selections_TAS=torch.stack(kept, 1) if kept else None,
        )
