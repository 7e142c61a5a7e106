"""What every model takes and gives. A model is plain maths over flat tokens; it does not know how it is sharded or cached.

Legend: T flat tokens, D hidden width, L MoE layers, K experts per token, E experts, A attention layers with an indexer,
V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from prl.layers.layout import Layout
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
    """int32 [T, A, index_topk], −1 where fewer: the indexer's choice to replay (positions in the sequence)."""
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
    """int32 [T, A, index_topk], if asked for."""


class Model(nn.Module):
    """A model of any architecture; parameter names are Hugging Face's, but the experts of a layer are stacked."""

    spec: ModelSpec

    @property
    def layers(self) -> nn.ModuleList:
        """The blocks, in order."""
        raise NotImplementedError

    @property
    def lm_head_weight(self) -> Tensor:
        """[V, D]; the embedding where they are tied."""
        raise NotImplementedError

    def cache_spec(self) -> list[tuple[int, str, tuple[int, ...]]]:
        """(layer, name, shape of a token's row) of everything that attention passes to `Bucket.keys`."""
        raise NotImplementedError

    def forward(self, given: ForwardInput) -> ForwardOutput:
        raise NotImplementedError
