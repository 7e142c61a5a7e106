"""Expert parallelism: tokens travel to the ranks that hold their experts, and the experts' sums travel back.

Legend: T tokens, D hidden width, K experts per token, R ranks of the expert group, S rows sent, N rows received.
A token goes once to each rank that holds one of its experts; rows arrive by source rank, then token; ids are those of the
receiving rank's own experts, −1 for others; `combine` is an unweighted sum in rank order. DeepEP has the same semantics.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from prl.kernels.permute import combine, permute


class Sent(NamedTuple):
    """What a dispatch remembers for its combine: slot source[s] = token · R + rank is row s; position [T, R] is the inverse."""

    source_S: Tensor
    position_TR: Tensor
    sent: list[int]
    received: list[int]


class AllToAll:
    """Over `all_to_all_single` of any backend; it waits for the counts, so the host and the device meet once a dispatch."""

    def __init__(self, group: dist.ProcessGroup, n_experts: int):
        self.group, self.ranks = group, group.size()
        self.n_local = n_experts // self.ranks

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor, Tensor, Sent]:
        t, r = len(x_TD), self.ranks
        owner_TK = torch.where(ids_TK < 0, r, ids_TK.div(self.n_local, rounding_mode="floor"))
        goes_RT = torch.zeros(t, r + 1, dtype=torch.bool, device=x_TD.device).scatter_(1, owner_TK, True).T[:r]
        to_S, token_S = goes_RT.nonzero(as_tuple=True)
        source_S = token_S * r + to_S
        place_RT = goes_RT.flatten().cumsum(0).view(r, t) - 1
        position_TR = torch.where(goes_RT, place_RT, -1).T.contiguous()
        counts_R = goes_RT.sum(1)
        arriving_R = torch.empty_like(counts_R)
        dist.all_to_all_single(arriving_R, counts_R, group=self.group)
        state = Sent(source_S, position_TR, counts_R.tolist(), arriving_R.tolist())
        ids_SK = torch.where(owner_TK[token_S] == to_S[:, None], ids_TK[token_S] - to_S[:, None] * self.n_local, -1)
        x_ND = _Exchange.apply(permute(x_TD, source_S, position_TR), state.sent, state.received, self.group)
        weights_NK = _Exchange.apply(weights_TK[token_S], state.sent, state.received, self.group)
        return x_ND, _exchange(ids_SK, state.sent, state.received, self.group), weights_NK, state

    def combine(self, y_ND: Tensor, state: Sent) -> Tensor:
        rows_SD = _Exchange.apply(y_ND, state.received, state.sent, self.group)
        return combine(rows_SD, None, state.source_S, state.position_TR)


def _exchange(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.args = received, sent, group
        return _exchange(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(grad, *ctx.args), None, None, None
