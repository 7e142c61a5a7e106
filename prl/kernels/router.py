"""The router: dense scores, selection, weights and counts. All in float32 or wider.

Legend: T tokens, D hidden width, E experts, K experts per token, G groups of experts.
Selection: DeepSeek-V3 (arXiv 2412.19437, section 2.1.2): the correction bias moves the choice, never the weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from prl.kernels.precision import wide
from prl.kernels.registry import choose, implements


def router_scores(x_TD: Tensor, weight_ED: Tensor, scoring: str) -> Tensor:
    """Dense scores [T, E] of every expert; `scoring` is sigmoid or softmax."""
    return choose("router_scores")(x_TD, weight_ED, scoring)


def router_select(scores_TE: Tensor, bias_E: Tensor | None, top_k: int, n_group: int = 1, topk_group: int = 1) -> Tensor:
    """int64 [T, K]: the best experts, best first, the lowest index first among equals.

    With groups, only the `topk_group` groups whose two best experts sum highest take part.
    """
    return choose("router_select")(scores_TE, bias_E, top_k, n_group, topk_group)


def router_weights(scores_TE: Tensor, ids_TK: Tensor, normalise: bool, scale: float) -> Tensor:
    """Weights [T, K] of chosen or replayed experts, gathered from the dense scores, so that the router gets its gradient."""
    return choose("router_weights")(scores_TE, ids_TK, normalise, scale)


def expert_counts(ids_TK: Tensor, n_experts: int) -> Tensor:
    """int64 [E]: how often each expert occurs."""
    return choose("expert_counts")(ids_TK, n_experts)


def spread_padding(ids_TK: Tensor, padding_T: Tensor, n_experts: int) -> Tensor:
    """`ids_TK` with the padding rows dealt out to the experts in turn, so that they crowd none."""
    return choose("spread_padding")(ids_TK, padding_T, n_experts)


def top_k_stable(x: Tensor, k: int) -> Tensor:
    """int64 [..., k]: indices of the largest of the last dimension, descending, the lowest index first among equals."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :k]


@implements("router_scores", "reference")
def _scores(x_TD: Tensor, weight_ED: Tensor, scoring: str) -> Tensor:
    dtype = wide(x_TD)
    logits_TE = F.linear(x_TD.to(dtype), weight_ED.to(dtype))
    return logits_TE.sigmoid() if scoring == "sigmoid" else logits_TE.softmax(-1)


@implements("router_select", "reference")
@torch.no_grad()
def _select(scores_TE: Tensor, bias_E: Tensor | None, top_k: int, n_group: int, topk_group: int) -> Tensor:
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if topk_group < n_group:
        choice_TGE = choice_TE.unflatten(-1, (n_group, -1))
        group_TG = choice_TGE.topk(2, dim=-1).values.sum(-1)
        keep_TG = torch.zeros_like(group_TG, dtype=torch.bool).scatter_(1, top_k_stable(group_TG, topk_group), True)
        choice_TE = choice_TGE.masked_fill(~keep_TG[..., None], -torch.inf).flatten(-2)
    return top_k_stable(choice_TE, top_k)


@implements("router_weights", "reference")
def _weights(scores_TE: Tensor, ids_TK: Tensor, normalise: bool, scale: float) -> Tensor:
    weights_TK = scores_TE.gather(1, ids_TK)
    if normalise:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return weights_TK if scale == 1.0 else weights_TK * scale


@implements("expert_counts", "reference")
def _counts(ids_TK: Tensor, n_experts: int) -> Tensor:
    return torch.bincount(ids_TK.flatten(), minlength=n_experts)


@implements("spread_padding", "reference")
def _spread(ids_TK: Tensor, padding_T: Tensor, n_experts: int) -> Tensor:
    k = ids_TK.shape[1]
    nth_T = padding_T.cumsum(0) - 1
    dealt_TK = (nth_T[:, None] * k + torch.arange(k, device=ids_TK.device)) % n_experts
    return torch.where(padding_T[:, None], dealt_TK, ids_TK)
