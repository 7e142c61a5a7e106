"""The router of an MoE layer: which experts a token goes to and with what weights, chosen or replayed.

Legend: T tokens, D hidden width, E experts, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from prl.kernels.router import Routing, route, router_logits


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """What the supported architectures' MoE layers differ in."""

    hidden: int
    width: int
    """Inner width of one expert."""
    n_experts: int
    top_k: int
    scoring: Literal["sigmoid", "softmax"]
    correction_bias: bool
    n_group: int = 1
    topk_group: int = 1
    normalise: bool = True
    """Weights of the chosen experts sum to one before `scale`."""
    scale: float = 1.0
    shared_width: int = 0
    """Inner width of the shared expert, 0 for none."""


@dataclass(slots=True)
class Replay:
    """What a forward prescribes for one MoE layer."""

    ids_TK: Tensor | None = None
    """Recorded experts; None: the model's own choice everywhere."""
    routed_T: Tensor | None = None
    """bool [T]: rows to replay; None: all."""
    padding_T: Tensor | None = None
    """bool [T]."""


class Router(nn.Module):
    e_score_correction_bias: Tensor | None

    def __init__(self, config: MoEConfig):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_experts, config.hidden))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_experts) if config.correction_bias else None)

    def forward(self, x_TD: Tensor, replay: Replay) -> Routing:
        c = self.config
        return route(
            router_logits(x_TD, self.weight),
            self.e_score_correction_bias,
            None if replay.ids_TK is None else replay.ids_TK.contiguous(),  # one layer's of [T, L, K]
            replay.routed_T,
            replay.padding_T,
            scoring=c.scoring,
            top_k=c.top_k,
            n_group=c.n_group,
            topk_group=c.topk_group,
            normalise=c.normalise,
            scale=c.scale,
        )


@torch.no_grad()
def update_correction_bias(bias_E: Tensor, counts_E: Tensor, rate: float) -> None:
    """Auxiliary-loss-free balancing (arXiv 2408.15664): raise the bias of experts below the mean count, lower the others.

    `counts_E` are the true tokens per expert of a whole optimizer step, over all ranks and micro-batches, padding excluded.
    """
    counts_E = counts_E.to(bias_E.dtype)
    bias_E.add_(torch.sign(counts_E.mean() - counts_E), alpha=rate)
