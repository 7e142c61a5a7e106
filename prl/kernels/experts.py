"""The routed experts: two grouped GEMMs with SwiGLU between them (arXiv 2002.05202), over rows sorted by expert.

Legend: R rows, D hidden width, I inner width, E experts.
The reference goes expert by expert, so that what lies between the GEMMs stays in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prl.kernels.registry import choose, implements
from prl.kernels.swiglu import swiglu_backward


def experts(rows_RD: Tensor, gate_up_EJD: Tensor, down_EDI: Tensor, counts: Sequence[int]) -> Tensor:
    """[R, D]: rows of expert e (`counts[e]` of them, in order) through that expert; J = 2I, the gate's rows first.

    GEMMs and SwiGLU are in the rows' type.
    """
    if sum(counts) != len(rows_RD) or len(counts) != len(gate_up_EJD):
        raise ValueError(f"experts: counts {list(counts)} for {len(rows_RD)} rows and {len(gate_up_EJD)} experts")
    return choose("experts")(rows_RD, gate_up_EJD, down_EDI, counts)


def _forward(rows_RD: Tensor, gate_up_EJD: Tensor, down_EDI: Tensor, counts: Sequence[int], inner_RJ: Tensor | None) -> Tensor:
    """Fills `inner_RJ`, the gate and up projections, where backward needs them."""
    out_RD = torch.empty_like(rows_RD)
    sizes = list(counts)
    inners = [None] * len(sizes) if inner_RJ is None else inner_RJ.split(sizes)
    weights = zip(gate_up_EJD.transpose(1, 2).unbind(0), down_EDI.transpose(1, 2).unbind(0), strict=True)
    parts = zip(weights, rows_RD.split(sizes), inners, out_RD.split(sizes), strict=True)
    for (gate_up_DJ, down_ID), rows, inner, out in parts:
        if len(rows):
            gate, up = torch.mm(rows, gate_up_DJ, out=inner).chunk(2, dim=-1)
            torch.mm(F.silu(gate).mul_(up), down_ID, out=out)
    return out_RD


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, gate_up_EJD: Tensor, down_EDI: Tensor, counts: Sequence[int]) -> Tensor:
        inner_RJ = rows_RD.new_empty(len(rows_RD), gate_up_EJD.shape[1])
        ctx.save_for_backward(rows_RD, gate_up_EJD, down_EDI, inner_RJ)
        ctx.counts = counts
        return _forward(rows_RD, gate_up_EJD, down_EDI, counts, inner_RJ)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        rows_RD, gate_up_EJD, down_EDI, inner_RJ = ctx.saved_tensors
        d_rows = torch.empty_like(rows_RD)
        d_gate_up = torch.zeros_like(gate_up_EJD) if ctx.needs_input_grad[1] else None
        d_down = torch.zeros_like(down_EDI) if ctx.needs_input_grad[2] else None
        sizes = list(ctx.counts)
        parts = zip(*(t.split(sizes) for t in (rows_RD, inner_RJ, grad_RD, d_rows)), strict=True)
        for e, (rows, inner, grad, d_row) in enumerate(parts):
            if not len(rows):
                continue
            d_inner = torch.empty_like(inner)
            (gate, up), (d_gate, d_up) = inner.chunk(2, dim=-1), d_inner.chunk(2, dim=-1)
            act = swiglu_backward(gate, up, torch.mm(grad, down_EDI[e]), d_gate, d_up)
            if d_down is not None:
                torch.mm(grad.t(), act, out=d_down[e])
            if d_gate_up is not None:
                torch.mm(d_inner.t(), rows, out=d_gate_up[e])
            torch.mm(d_inner, gate_up_EJD[e], out=d_row)
        return d_rows, d_gate_up, d_down, None


@implements("experts", "reference")
def _experts(rows_RD: Tensor, gate_up_EJD: Tensor, down_EDI: Tensor, counts: Sequence[int]) -> Tensor:
    if torch.is_grad_enabled():
        return _Experts.apply(rows_RD, gate_up_EJD, down_EDI, counts)
    return _forward(rows_RD, gate_up_EJD, down_EDI, counts, None)
