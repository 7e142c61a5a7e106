"""The MoE layer: router, routed experts, shared expert. How tokens reach the experts' ranks is the dispatcher's business.

Legend: T tokens, D hidden width, E experts, K experts per token, I inner width of an expert.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from prl.kernels.experts import Precision, experts
from prl.layers.mlp import MLP
from prl.layers.router import MoEConfig, Replay, Router


class Dispatcher(Protocol):
    def __call__(self, compute: Any, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Each token's weighted sum over its experts [T, D], wherever they are.

        `compute(x, ids, weights, codes, slots)` makes the sums over the experts held here, where an id of −1 is another rank's;
        `slots` of them are not.
        """
        ...


class Experts(nn.Module):
    """The routed experts' weights, stacked: gate and up fused [E, 2I, D], down [E, D, I]."""

    def __init__(self, n_experts: int, hidden: int, width: int):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(n_experts, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(n_experts, hidden, width))
        self.precision: Precision = "bf16"
        self.dispatcher: Dispatcher | None = None
        """None: all experts are here."""

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        # The dispatcher works inside of this module: gathered weights serve all chunks, gradients are reduced after the last.
        here = self.compute_here
        return here(x_TD, ids_TK, weights_TK) if self.dispatcher is None else self.dispatcher(here, x_TD, ids_TK, weights_TK)

    def compute_here(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        codes: tuple[Tensor, Tensor] | None = None,
        slots: int | None = None,
    ) -> Tensor:
        w = self.gate_up_proj, self.down_proj
        return experts(x_TD, ids_TK, weights_TK, *w, precision=self.precision, codes=codes, slots=slots)


class MoE(nn.Module):
    def __init__(self, config: MoEConfig):
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config.n_experts, config.hidden, config.width)
        self.shared_experts = MLP(config.hidden, config.shared_width) if config.shared_width else None

    def forward(self, x_TD: Tensor, replay: Replay) -> tuple[Tensor, Tensor, Tensor]:
        """(output [T, D], experts used int64 [T, K], tokens per expert int64 [E] without padding)."""
        routing = self.gate(x_TD, replay)
        y_TD = self.experts(x_TD, routing.ids_TK, routing.weights_TK)
        if self.shared_experts is not None:
            y_TD = y_TD + self.shared_experts(x_TD)
        return y_TD, routing.ids_TK, routing.counts_E
