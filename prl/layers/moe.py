"""The MoE layer: router, routed experts, shared expert. How rows reach the experts is the dispatcher's business.

Legend: T tokens, D hidden width, E experts, K experts per token, R rows, I inner width of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from prl.kernels.experts import experts
from prl.kernels.permute import combine, permute, sort_rows
from prl.layers.mlp import MLP
from prl.layers.router import MoEConfig, Replay, Router


class Dispatcher(Protocol):
    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, counts_E: Tensor) -> tuple[Tensor, Sequence[int], Any]:
        """(rows [R, D] sorted by the experts held here, rows of each of them, what `combine` needs)."""
        ...

    def combine(self, rows_RD: Tensor, weights_TK: Tensor, state: Any) -> Tensor:
        """The experts' rows back with their tokens, weighted and summed in float32 or wider: [T, D]."""
        ...


class LocalDispatcher:
    """All experts are here: sort the rows, one host sync for the counts."""

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, counts_E: Tensor) -> tuple[Tensor, Sequence[int], Any]:
        source_R, position_TK = sort_rows(ids_TK)
        return permute(x_TD, source_R, position_TK), counts_E.tolist(), (source_R, position_TK)

    def combine(self, rows_RD: Tensor, weights_TK: Tensor, state: Any) -> Tensor:
        return combine(rows_RD, weights_TK, *state)


class Experts(nn.Module):
    """The routed experts' weights, stacked: gate and up fused [E, 2I, D], down [E, D, I]."""

    def __init__(self, n_experts: int, hidden: int, width: int):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(n_experts, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(n_experts, hidden, width))

    def forward(self, rows_RD: Tensor, counts: Sequence[int]) -> Tensor:
        return experts(rows_RD, self.gate_up_proj, self.down_proj, counts)


class MoE(nn.Module):
    def __init__(self, config: MoEConfig, *, dispatcher: Dispatcher | None = None):
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config.n_experts, config.hidden, config.width)
        self.shared_experts = MLP(config.hidden, config.shared_width) if config.shared_width else None
        self.dispatcher: Dispatcher = dispatcher or LocalDispatcher()

    def forward(self, x_TD: Tensor, replay: Replay) -> tuple[Tensor, Tensor, Tensor]:
        """(output [T, D], experts used int64 [T, K], tokens per expert int64 [E] without padding)."""
        ids_TK, weights_TK, rows_E, true_E = self.gate(x_TD, replay)
        rows_RD, counts, state = self.dispatcher.dispatch(x_TD, ids_TK, rows_E)
        y_TD = self.dispatcher.combine(self.experts(rows_RD, counts), weights_TK, state)
        if self.shared_experts is not None:
            y_TD = y_TD + self.shared_experts(x_TD)
        return y_TD, ids_TK, true_E
