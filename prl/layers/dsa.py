"""DeepSeek sparse attention: the lightning indexer that chooses each query's keys (arXiv 2512.02556). Frozen: no gradients.

Legend: T tokens, D hidden width, L width of the query latent, H index heads, W index width, B sequences, Q queries, S keys.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from prl.kernels.indexer import index_scores, index_select, selection_indices, selection_mask
from prl.kernels.numerics import wide
from prl.layers.block import LayerInput, Selection


class Indexer(nn.Module):
    def __init__(self, layer: int, hidden: int, q_latent: int, n_heads: int, width: int, rope_width: int, top_k: int):
        super().__init__()
        self.layer, self.n_heads, self.width, self.rope_width, self.top_k = layer, n_heads, width, rope_width, top_k
        self.wq_b = nn.Linear(q_latent, n_heads * width, bias=False)
        self.wk = nn.Linear(hidden, width, bias=False)
        self.k_norm = nn.LayerNorm(width, eps=1e-6)
        self.weights_proj = nn.Linear(hidden, n_heads, bias=False)

    def _rotate(self, x_THW: Tensor, rotate: Callable[[Tensor], Tensor]) -> Tensor:
        rotated, rest = x_THW.split((self.rope_width, self.width - self.rope_width), dim=-1)
        return torch.cat((rotate(rotated), rest), -1)

    @torch.no_grad()
    def forward(self, x_TD: Tensor, q_TL: Tensor, inputs: LayerInput) -> Selection:
        buckets = inputs.layout.buckets
        key_TW = self._rotate(self.k_norm(self.wk(x_TD))[:, None], inputs.rotate)[:, 0]
        keys = [b.keys(self.layer, "index", key_TW) for b in buckets]
        # Computed whatever the lengths: sharded apart, its weight is gathered by all ranks or by none.
        weights_TH = self.weights_proj(x_TD.to(wide(x_TD))) * (self.n_heads * self.width) ** -0.5
        if all(k.shape[1] <= self.top_k for k in keys):
            masks = [b.mask_BQS for b in buckets]  # every key is kept, whatever its score
        else:
            q_THW = self._rotate(self.wq_b(q_TL).unflatten(-1, (self.n_heads, self.width)), inputs.rotate)
            masks = [
                index_select(index_scores(b.queries(q_THW), k, b.queries(weights_TH)), b.mask_BQS, self.top_k)
                if k.shape[1] > self.top_k
                else b.mask_BQS
                for b, k in zip(buckets, keys, strict=True)
            ]
        if inputs.recorded_TK is not None:
            masks = [
                selection_mask(b.queries(inputs.recorded_TK), b.key_positions_BS, m) & b.mask_BQS
                for b, m in zip(buckets, masks, strict=True)
            ]
        indices_TK = None
        if inputs.record_selections:
            parts = [selection_indices(m, b.key_positions_BS, self.top_k) for b, m in zip(buckets, masks, strict=True)]
            indices_TK = inputs.layout.merge(parts)
        return Selection(tuple(masks), indices_TK)
