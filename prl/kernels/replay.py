"""Router replay: the engine's recorded experts instead of the trainer's own choice.

Legend: T tokens, L MoE layers, K experts per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prl.kernels.registry import choose, implements


class RouteError(ValueError):
    """Recorded routes that no router can have made; the message counts them by kind and names the first."""


def replay_select(own_TK: Tensor, recorded_TK: Tensor, routed_T: Tensor | None) -> Tensor:
    """int64 [T, K]: the recorded experts where `routed_T` (None: everywhere), else the model's own."""
    return choose("replay_select")(own_TK, recorded_TK, routed_T)


def check_routes(routes_TLK: Tensor, routed_T: Tensor | None, n_experts: int) -> None:
    """Raise RouteError if a replayed row has an expert id out of range or twice. One host sync."""
    ids = routes_TLK if routed_T is None else routes_TLK[routed_T]
    ids = ids.long() if ids.dtype in (torch.uint16, torch.uint32) else ids  # few operations know these types
    outside = ((ids < 0) | (ids >= n_experts)).any(-1)
    ordered = ids.sort(dim=-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1) & ~outside
    bad = outside | twice
    if bad.any():
        row, layer = (int(i) for i in bad.nonzero()[0])
        token = row if routed_T is None else int(routed_T.nonzero()[row])
        raise RouteError(
            f"router replay: {int(outside.sum())} rows with expert ids outside 0…{n_experts - 1}, {int(twice.sum())} rows with "
            f"an expert twice, of {bad.numel()}; first at token {token}, MoE layer {layer}: {ids[row, layer].tolist()}. "
            "The routes must come from a model with the same experts, by MoE ordinal."
        )


@implements("replay_select", "reference")
def _replay(own_TK: Tensor, recorded_TK: Tensor, routed_T: Tensor | None) -> Tensor:
    recorded_TK = recorded_TK.long()
    return recorded_TK if routed_T is None else torch.where(routed_T[:, None], recorded_TK, own_TK)
