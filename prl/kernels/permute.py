"""Token movement of an MoE layer: rows sorted by expert, and the weighted sum that undoes it.

Legend: T tokens, K experts per token, S = T·K slots, E experts, R rows, D hidden width, B = D / 128, C = R / 128.
Both directions are gathers with a fixed order of summation (slot 0 … K − 1), so nothing depends on threads. An id of −1 is an
expert that is elsewhere: its slot has no row (position −1) and adds nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prl.kernels import checks
from prl.kernels.numerics import FP8, wide
from prl.kernels.quantise import columns_fake, columns_reference, no_columns, rows_fake, rows_reference
from prl.kernels.registry import define

FLOATS = (torch.bfloat16, torch.float32, torch.float64)


def sort_rows(
    ids_TK: Tensor, n_experts: int, *, align: int = 1, slots: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The stable order of the slots by expert, each expert's rows starting at a multiple of `align`. No host synchronisation.

    Returns int64 (source [R], the flat slot t·K + k of each row, −1 for padding; position [T, K], the row of each slot;
    starts [E + 1], the first row of each expert; counts [E], its rows without padding). R is the most that any ids can need,
    `row_bound` of all slots, or of `slots`, those with an expert, where the host knows how many they are.
    Ids are −1 … n_experts − 1; elsewhere than on the CPU neither they nor their number is read here: validate them before.
    """
    checks.tensor("sort_rows", "ids_TK", ids_TK, [None, None], [torch.int64])
    if n_experts < 0 or align < 1:
        checks.fail("sort_rows", "n_experts and align", "at least 0 and 1", (n_experts, align))
    source_R, position_TK, starts_E1, counts_E = _sort_op(ids_TK, n_experts, align)
    if slots is not None and slots < ids_TK.numel():
        if ids_TK.device.type == "cpu" and int(counts_E.sum()) != slots:
            checks.fail("sort_rows", "slots", f"the {int(counts_E.sum())} of ids_TK that are not -1", slots)
        source_R = source_R[: row_bound(slots, n_experts, align)].clone()  # the rest is padding
    return source_R, position_TK, starts_E1, counts_E


def row_bound(n_slots: int, n_experts: int, align: int) -> int:
    """Rows that `n_slots` slots need at most: every expert that has any wastes up to align − 1."""
    return (n_slots + min(n_slots, n_experts) * (align - 1)) // align * align


def permute(x_TD: Tensor, source_R: Tensor, position_TK: Tensor) -> Tensor:
    """[R, D]: each token's row once per expert, in the order of `sort_rows`; padding rows are 0. Differentiable."""
    checks.tensor("permute", "x_TD", x_TD, [None, None], FLOATS)
    _layout("permute", source_R, position_TK, len(x_TD))
    checks.same_device("permute", x_TD=x_TD, source_R=source_R, position_TK=position_TK)
    return _permute_op(x_TD, source_R, position_TK)


def permute_quantise(
    x_TD: Tensor, source_R: Tensor, position_TK: Tensor, *, columns: bool, pow2: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`permute` and `quantise_both` in one pass: (codes [R, D], scales [B, R], codes [D, R], scales [C, D]).

    R and D must be multiples of 128. Without `columns` the last two are empty.
    """
    checks.tensor("permute_quantise", "x_TD", x_TD, [None, None], FLOATS[:2])
    checks.multiple("permute_quantise", "D", x_TD.shape[1])
    _layout("permute_quantise", source_R, position_TK, len(x_TD))
    checks.multiple("permute_quantise", "R", len(source_R))
    checks.same_device("permute_quantise", x_TD=x_TD, source_R=source_R, position_TK=position_TK)
    return _permute_quantise_op(x_TD, source_R, position_TK, columns, pow2)


def permute_codes(codes_TD: Tensor, scales_TB: Tensor, source_R: Tensor, position_TK: Tensor) -> tuple[Tensor, Tensor]:
    """(codes [R, D], scales [B, R]) of tokens that are quantised by row already: as `permute_quantise` of the tokens gives."""
    checks.tensor("permute_codes", "codes_TD", codes_TD, [None, None], [FP8])
    checks.tensor("permute_codes", "scales_TB", scales_TB, [len(codes_TD), None], [torch.float32])
    _layout("permute_codes", source_R, position_TK, len(codes_TD))
    token_R, absent_R1 = source_R.clamp(min=0) // max(position_TK.shape[1], 1), (source_R < 0)[:, None]
    codes_RD = codes_TD.view(torch.uint8).index_select(0, token_R).masked_fill_(absent_R1, 0).view(FP8)
    return codes_RD, scales_TB.index_select(0, token_R).masked_fill_(absent_R1, 1).T.contiguous()  # 0 has the scale 1


def combine(rows_RD: Tensor, weights_TK: Tensor | None, source_R: Tensor, position_TK: Tensor) -> Tensor:
    """[T, D]: Σ_k weights[t, k] · rows[position[t, k]], summed in float32 or wider, cast once to the rows' type.

    Weights are float32 or wider; None: all 1, which is the gradient of `permute`. Differentiable.
    """
    _layout("combine", source_R, position_TK, None)
    checks.tensor("combine", "rows_RD", rows_RD, [len(source_R), None], FLOATS)
    if weights_TK is not None:
        checks.tensor("combine", "weights_TK", weights_TK, list(position_TK.shape), [wide(rows_RD)])
    checks.same_device("combine", rows_RD=rows_RD, weights_TK=weights_TK, source_R=source_R, position_TK=position_TK)
    return _combine_op(rows_RD, weights_TK, source_R, position_TK)


def _layout(op: str, source_R: Tensor, position_TK: Tensor, tokens: int | None) -> None:
    checks.tensor(op, "source_R", source_R, [None], [torch.int64])
    checks.tensor(op, "position_TK", position_TK, [tokens, None], [torch.int64])


def _sort_reference(ids_TK: Tensor, n_experts: int, align: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ids_S = ids_TK.flatten()
    if ids_S.device.type == "cpu" and bool(((ids_S < -1) | (ids_S >= n_experts)).any()):
        checks.fail("sort_rows", "ids_TK", f"-1 to {n_experts - 1}", f"{int(ids_S.min())} to {int(ids_S.max())}")
    key_S = torch.where(ids_S < 0, n_experts, ids_S)
    counts_E = torch.bincount(key_S, minlength=n_experts + 1)[:n_experts]
    padded_E = (counts_E + align - 1) // align * align
    starts_E1 = torch.nn.functional.pad(padded_E.cumsum(0), (1, 0))
    order_S = key_S.argsort(stable=True)  # slots by expert, those of no expert last
    sorted_S = key_S[order_S]
    first_E1 = torch.nn.functional.pad(counts_E.cumsum(0), (1, 0))
    row_S = starts_E1[sorted_S] + torch.arange(len(ids_S), device=ids_TK.device) - first_E1[sorted_S]
    row_S = torch.where(sorted_S < n_experts, row_S, -1)
    position_S = torch.empty_like(ids_S)
    position_S[order_S] = row_S
    source_R = ids_S.new_full((row_bound(len(ids_S), n_experts, align) + 1,), -1)
    source_R[row_S] = order_S  # row −1 is the one too many, cut off again
    return source_R[:-1].contiguous(), position_S.view(ids_TK.shape), starts_E1, counts_E


def _sort_fake(ids_TK: Tensor, n_experts: int, align: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = row_bound(ids_TK.shape[0] * ids_TK.shape[1], n_experts, align)
    new = ids_TK.new_empty
    return new(rows), torch.empty_like(ids_TK), new(n_experts + 1), new(n_experts)


def _permute_reference(x_TD: Tensor, source_R: Tensor, position_TK: Tensor) -> Tensor:
    token_R = source_R.clamp(min=0) // max(position_TK.shape[1], 1)
    return x_TD.index_select(0, token_R).masked_fill_((source_R < 0)[:, None], 0)


def _permute_fake(x_TD: Tensor, source_R: Tensor, position_TK: Tensor) -> Tensor:
    return x_TD.new_empty(source_R.shape[0], x_TD.shape[1])


def _permute_setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, source_R, position_TK = inputs
    ctx.save_for_backward(source_R, position_TK)


def _permute_backward(ctx: Any, d_rows_RD: Tensor) -> tuple[Tensor, None, None]:
    source_R, position_TK = ctx.saved_tensors
    return _combine_op(d_rows_RD.contiguous(), None, source_R, position_TK), None, None


def _permute_quantise_reference(
    x_TD: Tensor, source_R: Tensor, position_TK: Tensor, columns: bool, pow2: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows_RD = _permute_reference(x_TD, source_R, position_TK)
    by_column = columns_reference(rows_RD, pow2) if columns else no_columns(x_TD)
    return *rows_reference(rows_RD, pow2), *by_column


def _permute_quantise_fake(
    x_TD: Tensor, source_R: Tensor, position_TK: Tensor, columns: bool, pow2: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows_RD = _permute_fake(x_TD, source_R, position_TK)
    return *rows_fake(rows_RD, pow2), *(columns_fake(rows_RD, pow2) if columns else no_columns(x_TD))


def _combine_reference(rows_RD: Tensor, weights_TK: Tensor | None, source_R: Tensor, position_TK: Tensor) -> Tensor:
    total_TD = rows_RD.new_zeros(len(position_TK), rows_RD.shape[1], dtype=wide(rows_RD))
    for k, position_T in enumerate(position_TK.unbind(1)):
        part_TD = rows_RD.index_select(0, position_T.clamp(min=0)).to(total_TD.dtype) if len(rows_RD) else total_TD
        if weights_TK is not None:
            part_TD = part_TD * weights_TK[:, k, None]
        total_TD = total_TD + part_TD.masked_fill((position_T < 0)[:, None], 0)
    return total_TD.to(rows_RD.dtype)


def _combine_fake(rows_RD: Tensor, weights_TK: Tensor | None, source_R: Tensor, position_TK: Tensor) -> Tensor:
    return rows_RD.new_empty(position_TK.shape[0], rows_RD.shape[1])


def _combine_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.weighted = inputs[1] is not None
    ctx.save_for_backward(*(inputs if ctx.weighted else inputs[2:]))  # only the weights' gradient reads the rows


def _combine_backward(ctx: Any, d_out_TD: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
    if not ctx.weighted:
        source_R, position_TK = ctx.saved_tensors
        return _permute_op(d_out_TD.contiguous(), source_R, position_TK), None, None, None
    d_rows_RD, d_weights_TK = _combine_backward_op(d_out_TD.contiguous(), *ctx.saved_tensors)
    return d_rows_RD, d_weights_TK, None, None


def _combine_backward_reference(
    d_out_TD: Tensor, rows_RD: Tensor, weights_TK: Tensor, source_R: Tensor, position_TK: Tensor
) -> tuple[Tensor, Tensor]:
    """d_rows[r] = weight · d_out[its token], d_weights[t, k] = ⟨d_out[t], rows[position]⟩."""
    d_out_RD = _permute_reference(d_out_TD, source_R, position_TK).to(weights_TK.dtype)
    weights_R = weights_TK.flatten().index_select(0, source_R.clamp(min=0)).masked_fill_(source_R < 0, 0)
    slope_R = (d_out_RD * rows_RD).sum(-1)
    found_TK = slope_R[position_TK.clamp(min=0)] if len(slope_R) else torch.zeros_like(weights_TK)
    d_weights_TK = found_TK.masked_fill(position_TK < 0, 0)
    return d_out_RD.mul_(weights_R[:, None]).to(rows_RD.dtype), d_weights_TK


def _combine_backward_fake(
    d_out_TD: Tensor, rows_RD: Tensor, weights_TK: Tensor, source_R: Tensor, position_TK: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows_RD), torch.empty_like(weights_TK)


_sort_op = define(
    "sort_rows(Tensor ids_TK, int n_experts, int align) -> (Tensor, Tensor, Tensor, Tensor)", _sort_reference, _sort_fake
)
_permute_op = define(
    "permute(Tensor x_TD, Tensor source_R, Tensor position_TK) -> Tensor",
    _permute_reference,
    _permute_fake,
    setup_context=_permute_setup,
    backward=_permute_backward,
)
_permute_quantise_op = define(
    "permute_quantise(Tensor x_TD, Tensor source_R, Tensor position_TK, bool columns, bool pow2)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _permute_quantise_reference,
    _permute_quantise_fake,
)
_combine_op = define(
    "combine(Tensor rows_RD, Tensor? weights_TK, Tensor source_R, Tensor position_TK) -> Tensor",
    _combine_reference,
    _combine_fake,
    setup_context=_combine_setup,
    backward=_combine_backward,
)
_combine_backward_op = define(
    "combine_backward(Tensor d_out_TD, Tensor rows_RD, Tensor weights_TK, Tensor source_R, Tensor position_TK)"
    " -> (Tensor, Tensor)",
    _combine_backward_reference,
    _combine_backward_fake,
)
