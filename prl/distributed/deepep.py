"""DeepEP's training kernels (`deep_ep.Buffer`, an optional import) as a dispatcher: what `AllToAll` does, over NVLink and RDMA.

Legend: as in `prl.distributed.expert`.
"""

from __future__ import annotations

import importlib
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prl.config.named import SetupError
from prl.distributed.expert import Arrive, Compute, Dispatcher, Start, Travel, placeholder
from prl.kernels.quantise import quantise_rows

DEVICES = {"cuda"}
_dispatchers: weakref.WeakValueDictionary[str, DeepEP] = weakref.WeakValueDictionary()
"""By the name of their group, which an op can take."""
_events: list[Any] = []
"""Of the op that was called last: events cannot pass through an op."""


class DispatcherError(SetupError):
    """A dispatcher that cannot run here."""


class DeepEP(Dispatcher):
    """For tokens of width `hidden`. Its buffer is for all layers and chunks; making it is a collective.

    DispatcherError where it cannot run.
    """

    def __init__(
        self, group: dist.ProcessGroup, n_experts: int, hidden: int, device: torch.device, chunks: int = 1, fp8: bool = False
    ):
        super().__init__(chunks, fp8)
        wish = "trainer.mesh.dispatcher: deepep"
        if device.type not in DEVICES:
            raise DispatcherError(f"{wish} moves tokens between GPUs, this rank is on {device.type}: set all_to_all")
        try:
            module = importlib.import_module("deep_ep")
        except ImportError as e:
            raise DispatcherError(
                f"{wish} needs the module deep_ep, which cannot be imported ({e}): install DeepEP or set all_to_all"
            ) from e
        self.group, self.n_experts = group.group_name, n_experts
        self.buffer = _buffer(module.Buffer, group, hidden)
        _dispatchers[self.group] = self

    def plans(self, ids_CTK: tuple[Tensor, ...]) -> list[None]:
        return [None] * len(ids_CTK)  # the buffer computes a chunk's as it is sent

    def travel(self, compute: Compute, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, plan: Any) -> Travel:
        there = There(self, ids_TK)
        codes, scales = None, None
        if self.fp8:
            codes, scales_BT = quantise_rows(x_TD.detach())
            scales = scales_BT.T.contiguous()
        pending = Start.apply(there, x_TD, weights_TK, codes, scales)
        yield
        x_ND, weights_NK, codes, scales = Arrive.apply(there, *pending)
        y_ND = compute(x_ND, there.ids_NK, weights_NK, None if codes is None else (codes, scales), there.slots)
        back = Back(self, there.handle)
        pending = Start.apply(back, y_ND)
        yield
        (y_TD,) = Arrive.apply(back, *pending)
        return y_TD


class _Journey:
    """Waits are for the event of what was started last."""

    def __init__(self, dispatcher: DeepEP):
        self.dispatcher, self.event = dispatcher, None
        self.gradients: tuple[Tensor | None, ...] = ()

    def wait(self, *_: Tensor | None) -> None:
        if self.event is not None:
            self.event.current_stream_wait()
            self.event = None


class There(_Journey):
    """Dispatch; its gradient is a combine."""

    ids_NK: Tensor
    handle: list[Tensor]
    slots: int

    def __init__(self, dispatcher: DeepEP, ids_TK: Tensor):
        super().__init__(dispatcher)
        self.ids_TK = ids_TK

    def go(self, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        x_TD, weights_TK, codes_TD, scales_TB = tensors
        assert x_TD is not None and weights_TK is not None
        payload = x_TD if codes_TD is None else codes_TD
        x_ND, scales_NB, self.ids_NK, weights_NK, self.handle, self.slots = torch.ops.prl.deepep_dispatch(
            payload.contiguous(), scales_TB, self.ids_TK.contiguous(), weights_TK.contiguous(), self.dispatcher.group
        )
        self.event = _events.pop() if _events else None  # none where the op's kept result stood in for it
        if codes_TD is None:
            return x_ND, weights_NK, None, None
        return placeholder(x_TD, len(x_ND)), weights_NK, x_ND, scales_NB

    def go_back(self, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        d_x_ND, d_weights_NK, *rest = gradients
        assert d_x_ND is not None
        weights = None if d_weights_NK is None else d_weights_NK.contiguous()
        d_x_TD, d_weights_TK, self.event = self.dispatcher.buffer.combine(
            d_x_ND.contiguous(), tuple(self.handle), topk_weights=weights, async_finish=True
        )
        return d_x_TD, d_weights_TK, *rest


class Back(_Journey):
    """Combine; its gradient is a dispatch by the same handle."""

    def __init__(self, dispatcher: DeepEP, handle: list[Tensor]):
        super().__init__(dispatcher)
        self.handle = handle

    def go(self, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        (y_ND,) = tensors
        assert y_ND is not None
        y_TD = torch.ops.prl.deepep_combine(y_ND.contiguous(), self.handle, self.dispatcher.group)
        self.event = _events.pop() if _events else None
        return (y_TD,)

    def go_back(self, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (d_y_TD,) = gradients
        assert d_y_TD is not None
        d_y_ND, *_, self.event = self.dispatcher.buffer.dispatch(
            d_y_TD.contiguous(), handle=tuple(self.handle), async_finish=True
        )
        return (d_y_ND,)


def _buffer(kind: Any, group: dist.ProcessGroup, hidden: int) -> Any:
    ranks, row_bytes = group.size(), hidden * 2
    configs = kind.get_dispatch_config(ranks), kind.get_combine_config(ranks)
    return kind(
        group,
        max(c.get_nvl_buffer_size_hint(row_bytes, ranks) for c in configs),
        max(c.get_rdma_buffer_size_hint(row_bytes, ranks) for c in configs),
    )


@torch.library.custom_op("prl::deepep_dispatch", mutates_args=())
def _dispatch(
    x: Tensor, scales: Tensor | None, ids: Tensor, weights: Tensor, group: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor], int]:
    buffer, n_experts = _dispatchers[group].buffer, _dispatchers[group].n_experts
    per_rank, per_rdma_rank, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, n_experts)
    received, ids_NK, weights_NK, per_local_expert, handle, event = buffer.dispatch(
        x if scales is None else (x, scales),
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_rdma_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=ids,
        topk_weights=weights,
        async_finish=True,
    )
    _events[:] = [event]
    x_ND, scales_NB = received if scales is not None else (received, weights.new_empty(0))
    return x_ND, scales_NB, ids_NK, weights_NK, list(handle), sum(per_local_expert)


@torch.library.custom_op("prl::deepep_combine", mutates_args=())
def _combine(y: Tensor, handle: list[Tensor], group: str) -> Tensor:
    y_TD, _, event = _dispatchers[group].buffer.combine(y, tuple(handle), async_finish=True)
    _events[:] = [event]
    return y_TD
