"""Attention over one latent per key, shared by all heads: multi-head latent attention in its absorbed form.

Legend: B sequences, Q queries, S keys, H heads, X width of a key (latent and rope part), C width of the latent = of a value.
DeepSeek-V2 (arXiv 2405.04434, section 2.1): the up projections of keys and values are applied to queries and outputs
instead, so cached and packed forwards share this one function and nothing is ever expanded to heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prl.kernels.precision import wide
from prl.kernels.registry import choose, implements


def latent_attention(q_BQHX: Tensor, keys_BSX: Tensor, mask_BQS: Tensor, value_width: int) -> Tensor:
    """[B, Q, H, C]: softmax of q·k (queries come scaled) over the keys of the mask, times the first C entries of the keys."""
    return choose("latent_attention")(q_BQHX, keys_BSX, mask_BQS, value_width)


@implements("latent_attention", "reference")
def _latent_attention(q_BQHX: Tensor, keys_BSX: Tensor, mask_BQS: Tensor, value_width: int) -> Tensor:
    shape_BQH = q_BQHX.shape[:3]
    scores = torch.bmm(q_BQHX.flatten(1, 2), keys_BSX.transpose(1, 2)).unflatten(1, shape_BQH[1:])
    scores = scores.to(wide(scores)).masked_fill(~mask_BQS[:, :, None], -torch.inf)
    probabilities = scores.softmax(-1).to(keys_BSX.dtype).flatten(1, 2)
    return torch.bmm(probabilities, keys_BSX[..., :value_width]).unflatten(1, shape_BQH[1:])
