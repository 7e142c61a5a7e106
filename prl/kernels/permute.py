"""Token movement of an MoE layer: rows sorted by expert, and the weighted sum that undoes it.

Legend: T tokens, K experts per token, R = T·K rows, D hidden width.
Both directions are gathers with a fixed order of summation (slot 0 … K−1), so the result does not depend on threads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prl.kernels.precision import wide
from prl.kernels.registry import choose, implements


def sort_rows(ids_TK: Tensor) -> tuple[Tensor, Tensor]:
    """The stable order of the T·K (token, slot) rows by expert.

    Returns (source int64 [R], the flat slot t·K + k of each sorted row; position int64 [T, K], the sorted row of each slot).
    """
    return choose("sort_rows")(ids_TK)


def permute(x_TD: Tensor, source_R: Tensor, position_TK: Tensor) -> Tensor:
    """[R, D]: each token's row once per expert, in the order of `sort_rows`."""
    return choose("permute")(x_TD, source_R, position_TK)


def combine(rows_RD: Tensor, weights_TK: Tensor, source_R: Tensor, position_TK: Tensor) -> Tensor:
    """[T, D]: Σ_k weights[t, k] · rows[position[t, k]], summed in float32 or wider, cast once to the rows' type."""
    return choose("combine")(rows_RD, weights_TK, source_R, position_TK)


@implements("sort_rows", "reference")
def _sort_rows(ids_TK: Tensor) -> tuple[Tensor, Tensor]:
    source_R = ids_TK.flatten().argsort(stable=True)
    position_R = torch.empty_like(source_R)
    position_R[source_R] = torch.arange(len(source_R), device=source_R.device)
    return source_R, position_R.view(ids_TK.shape)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, source_R: Tensor, position_TK: Tensor) -> Tensor:
        ctx.save_for_backward(position_TK)
        return x_TD.index_select(0, source_R // position_TK.shape[1])

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        (position_TK,) = ctx.saved_tensors
        return _weighted_sum(grad_RD, position_TK, None), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, weights_TK: Tensor, source_R: Tensor, position_TK: Tensor) -> Tensor:
        ctx.save_for_backward(rows_RD, weights_TK, source_R, position_TK)
        return _weighted_sum(rows_RD, position_TK, weights_TK)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows_RD, weights_TK, source_R, position_TK = ctx.saved_tensors
        grad_RD = grad_TD.index_select(0, source_R // position_TK.shape[1]).to(weights_TK.dtype)
        weights_R = weights_TK.flatten().index_select(0, source_R)
        slope_R = (grad_RD * rows_RD).sum(-1)
        d_weights_TK = slope_R.index_select(0, position_TK.flatten()).view(weights_TK.shape)
        return grad_RD.mul_(weights_R[:, None]).to(rows_RD.dtype), d_weights_TK, None, None


def _weighted_sum(rows_RD: Tensor, position_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """The sum of K gathered rows; embedding_bag does it without the [T, K, D] in between."""
    dtype = wide(rows_RD)
    return F.embedding_bag(position_TK, rows_RD.to(dtype), mode="sum", per_sample_weights=weights_TK).to(rows_RD.dtype)


@implements("permute", "reference")
def _permute(x_TD: Tensor, source_R: Tensor, position_TK: Tensor) -> Tensor:
    return _Permute.apply(x_TD, source_R, position_TK)


@implements("combine", "reference")
def _combine(rows_RD: Tensor, weights_TK: Tensor, source_R: Tensor, position_TK: Tensor) -> Tensor:
    return _Combine.apply(rows_RD, weights_TK, source_R, position_TK)
