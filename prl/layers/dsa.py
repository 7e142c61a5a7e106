"""DeepSeek sparse attention: the lightning indexer that chooses each query's keys (arXiv 2512.02556). Frozen: no gradients.

Legend: T tokens, D hidden width, L width of the query latent, H index heads, W index width, B sequences, Q queries, S keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from prl.kernels.indexer import index_scores, index_select, selection_indices, selection_mask
from prl.kernels.numerics import wide
from prl.layers.block import LayerInput, Selection
from prl.layers.linear import Linear

SPARSE = 4096
"""Buckets of at least so many keys, and twice what the indexer keeps, are attended to by index, not by mask."""


class Indexer(nn.Module):
    def __init__(self, layer: int, hidden: int, q_latent: int, n_heads: int, width: int, rope_width: int, top_k: int):
        super().__init__()
        self.layer, self.n_heads, self.width, self.rope_width, self.top_k = layer, n_heads, width, rope_width, top_k
        self.wq_b = Linear(q_latent, n_heads * width, bias=False, never_fp8=True)
        self.wk = Linear(hidden, width, bias=False, never_fp8=True)
        self.k_norm = nn.LayerNorm(width, eps=1e-6)
        self.weights_proj = Linear(hidden, n_heads, bias=False, never_fp8=True)

    def _rotate(self, x_THW: Tensor, rotate: Callable[[Tensor], Tensor]) -> Tensor:
        rotated, rest = x_THW.split((self.rope_width, self.width - self.rope_width), dim=-1)
        return torch.cat((rotate(rotated), rest), -1)

    @torch.no_grad()
    def forward(self, x_TD: Tensor, q_TL: Tensor, inputs: LayerInput) -> Selection:
        layout, top_k = inputs.layout, self.top_k
        key_TW = self._rotate(self.k_norm(self.wk(x_TD))[:, None], inputs.rotate)[:, 0]
        # Computed whatever the lengths: sharded apart, its weight is gathered by all ranks or by none.
        weights_TH = self.weights_proj(x_TD.to(wide(x_TD))) * (self.n_heads * self.width) ** -0.5
        rows_GW = layout.keys(self.layer, "index", key_TW)
        n_keys = [b.key_positions_BS.shape[1] for b in layout.buckets]
        nothing = [None] * len(n_keys)
        queries: Sequence[Tensor | None] = nothing
        weights: Sequence[Tensor | None] = nothing
        if any(n > top_k for n in n_keys):
            q_THW = self._rotate(self.wq_b(q_TL).unflatten(-1, (self.n_heads, self.width)), inputs.rotate)
            queries, weights = layout.split(q_THW), layout.split(weights_TH)
        recorded = nothing if inputs.recorded_TK is None else layout.split(inputs.recorded_TK)
        kept, indices = [], []
        for b, n, q_BQHW, weights_BQH, recorded_BQK in zip(layout.buckets, n_keys, queries, weights, recorded, strict=True):
            mask_BQS = selected_BQS = b.mask_BQS
            if n > top_k and q_BQHW is not None and weights_BQH is not None:  # else every key is kept, whatever its score
                selected_BQS = index_select(index_scores(q_BQHW, b.keys(rows_GW), weights_BQH), mask_BQS, top_k)
            if recorded_BQK is not None:
                selected_BQS = selection_mask(recorded_BQK, b.key_positions_BS, selected_BQS) & mask_BQS
            if inputs.record_selections:
                indices.append(selection_indices(selected_BQS, b.key_positions_BS, top_k))
            if n >= max(SPARSE, 2 * top_k):
                place_BS = torch.arange(n, device=mask_BQS.device).expand(len(mask_BQS), -1)
                kept.append(selection_indices(selected_BQS, place_BS, top_k))
            else:
                kept.append(selected_BQS)
        return Selection(tuple(kept), layout.merge(indices) if indices else None)
