"""Context parallelism: the ranks of a stream share each row. Who holds which tokens, and how rows travel between them.

Legend: T tokens of the whole row, L = T / R of a rank, R ranks of the context group, H heads, C width of a head, N rows that
lie on the ranks in any number each.

The split is a zigzag, which levels causal attention: of 2R chunks, place i holds the i-th and the i-th from the end.

    chunk    0  1  2  3  4  5  6  7        R = 4
    place    0  1  2  3  3  2  1  0

Gradients that meet are added in the order of places, in float32 or wider.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from prl.kernels.numerics import wide


def zigzag(length: int, ranks: int) -> Tensor:
    """int64 [R, L]: the tokens that each place holds, ascending. `length` is a multiple of 2R."""
    chunks = torch.arange(length).view(2 * ranks, -1)
    return torch.cat((chunks[:ranks], chunks[ranks:].flip(0)), 1)


def runs(tokens_L: Tensor) -> list[tuple[int, int]]:
    """(first, past the last) of the neighbours in an ascending index."""
    cuts = (tokens_L.diff() != 1).nonzero()[:, 0] + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in tokens_L.tensor_split(cuts)]


class Shard:
    """This rank's part of a row of `length` tokens."""

    def __init__(self, group: dist.ProcessGroup, length: int, device: torch.device | str = "cpu"):
        self.group, self.length = group, length
        self.ranks, self.place = group.size(), group.rank()
        self.places_RL = zigzag(length, self.ranks)
        """On the CPU, as `here_L`."""
        self.here_L = self.places_RL[self.place]
        self.by_place_T = self.places_RL.flatten().to(device)
        """The tokens in the order in which the ranks hold them."""
        self.by_token_T = self.by_place_T.argsort()
        """Where each token is in that order."""


def gather(x_L: Tensor, shard: Shard) -> Tensor:
    """[L, ...] of each rank → the whole row [T, ...]; each rank's gradients go to the owner, which adds them up."""
    return _Gather.apply(x_L, shard)


def gather_some(x_M: Tensor, counts: Sequence[int], order_N: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The first `counts[place]` rows of each rank's [M, ...], end to end and then in that order: [N, ...].

    Every rank is to compute the same from them. So backward takes this rank's part of the gradient, and adds nothing.
    """
    return _GatherSome.apply(x_M, counts, order_N, group)


def to_heads(x_LHC: Tensor, shard: Shard) -> Tensor:
    """[L, H, C] of this rank's tokens → [T, H / R, C], the whole row of this rank's heads."""
    return _Swap.apply(x_LHC, shard, _heads, _tokens)


def to_tokens(x_THC: Tensor, shard: Shard) -> Tensor:
    """[T, H / R, C] of this rank's heads → [L, H, C]: the inverse of `to_heads`."""
    return _Swap.apply(x_THC, shard, _tokens, _heads)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_L: Tensor, shard: Shard) -> Tensor:
        ctx.shard = shard
        out_T = x_L.new_empty(shard.length, *x_L.shape[1:])
        dist.all_gather_single(out_T, x_L.contiguous(), group=shard.group)
        return out_T.index_select(0, shard.by_token_T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None]:
        shard: Shard = ctx.shard
        sent_T = grad_T.index_select(0, shard.by_place_T)
        got_RL = torch.empty_like(sent_T)
        dist.all_to_all_single(got_RL, sent_T, group=shard.group)
        first, *others = got_RL.unflatten(0, (shard.ranks, -1)).unbind(0)
        total_L = first.to(wide(first))
        for part_L in others:
            total_L = total_L + part_L
        return total_L.to(grad_T.dtype), None


class _GatherSome(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_M: Tensor, counts: Sequence[int], order_N: Tensor, group: dist.ProcessGroup) -> Tensor:
        place, most = group.rank(), max(counts)
        ctx.rows, ctx.order_N, ctx.shape = slice(sum(counts[:place]), sum(counts[: place + 1])), order_N, x_M.shape
        padded = x_M.new_zeros(most, *x_M.shape[1:])
        padded[: counts[place]] = x_M[: counts[place]]
        parts = padded.new_empty(group.size() * most, *x_M.shape[1:])
        dist.all_gather_single(parts, padded, group=group)
        rows = torch.cat([p[:n] for p, n in zip(parts.split(most), counts, strict=True)])
        return rows.index_select(0, order_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None, None]:
        mine = torch.empty_like(grad_N).index_copy_(0, ctx.order_N, grad_N)[ctx.rows]
        out = grad_N.new_zeros(ctx.shape)
        out[: len(mine)] = mine
        return out, None, None, None


def _heads(x_LHC: Tensor, shard: Shard) -> Tensor:
    sent_RLHC = x_LHC.unflatten(1, (shard.ranks, -1)).transpose(0, 1).contiguous()
    got_RLHC = torch.empty_like(sent_RLHC)
    dist.all_to_all_single(got_RLHC, sent_RLHC, group=shard.group)
    return got_RLHC.flatten(0, 1).index_select(0, shard.by_token_T)


def _tokens(x_THC: Tensor, shard: Shard) -> Tensor:
    sent_THC = x_THC.index_select(0, shard.by_place_T)
    got_THC = torch.empty_like(sent_THC)
    dist.all_to_all_single(got_THC, sent_THC, group=shard.group)
    return got_THC.unflatten(0, (shard.ranks, -1)).transpose(0, 1).flatten(1, 2)


class _Swap(torch.autograd.Function):
    """`there`, an exchange of tokens and heads; `back` is its inverse and so its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shard: Shard, there: Callable[[Tensor, Shard], Tensor], back: Callable[[Tensor, Shard], Tensor]
    ) -> Tensor:
        ctx.shard, ctx.back = shard, back
        return there(x, shard)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grad, ctx.shard), None, None, None
