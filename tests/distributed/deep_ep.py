"""A stand-in for the module `deep_ep`: the training interface of its `Buffer`, over gloo on the CPU.

It refuses what the real one is documented to refuse, but takes float32 and float64 tokens besides bfloat16, which the tests of
invariance need. What it returns is complete only after the event was waited for: until then it holds NaN. The semantics are
written down here a second time, rank by rank, on purpose. `Buffer.calls` names the calls of this process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
WIDE = (torch.float32, torch.float64)


def install() -> None:
    """Be the module `deep_ep` of this process, and a CPU what it runs on."""
    from prl.distributed import deepep

    sys.modules["deep_ep"] = sys.modules[__name__]
    deepep.DEVICES.add("cpu")


@dataclass
class Config:
    ranks: int

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks if num_ranks > 8 else 0


class EventOverlap:
    def __init__(self, finish: Callable[[], None] | None = None):
        self.finish = finish

    def current_stream_wait(self) -> None:
        assert self.finish is not None, "an event of a call that was not asynchronous"
        self.finish()


class Buffer:
    calls: list[str] = []

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0):
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        assert num_nvl_bytes > 0 and (num_rdma_bytes > 0) == (self.ranks > 8)
        dist.all_gather_object([None] * self.ranks, self.rank, group)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in RANKS, f"Unsupported number of EP ranks: {num_ranks}"
        return Config(num_ranks)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        self.calls.append("layout")
        assert topk_idx.dtype == torch.int64 and topk_idx.dim() == 2 and topk_idx.is_contiguous()
        assert num_experts % self.ranks == 0 and not async_finish
        local = num_experts // self.ranks
        in_rank = torch.zeros(len(topk_idx), self.ranks, dtype=torch.bool)
        per_expert = torch.zeros(num_experts, dtype=torch.int32)
        for t, ids in enumerate(topk_idx.tolist()):
            for e in set(ids) - {-1}:
                in_rank[t, e // local] = True
                per_expert[e] += 1
        return in_rank.sum(0).int(), None, per_expert, in_rank, EventOverlap()

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        handle: tuple[Tensor, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, Tensor | None, Tensor | None, list[int] | None, tuple[Tensor, ...] | None, EventOverlap]:
        self.calls.append("dispatch" if handle is None else "dispatch again")
        assert num_tokens_per_rdma_rank is None and num_worst_tokens == 0 and config is None
        assert not allocate_on_comm_stream or (previous_event is not None and async_finish)
        payload = self._payload(x)
        tokens = len(payload[0])
        if handle is not None:
            given = num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights
            assert all(g is None for g in given), "cached mode takes no layout and no topk arguments"
            in_rank, arriving = handle
            assert in_rank.shape == (tokens, self.ranks)
            sends = [in_rank[:, r].nonzero()[:, 0] for r in range(self.ranks)]
            works, (out,) = self._exchange(payload[:1], sends, arriving.tolist())
            assert len(payload) == 1
            return out, None, None, None, None, self._event(works, async_finish)
        assert num_tokens_per_rank is not None and is_token_in_rank is not None and num_tokens_per_expert is not None
        for t, dtype, shape in (
            (num_tokens_per_rank, torch.int32, (self.ranks,)),
            (is_token_in_rank, torch.bool, (tokens, self.ranks)),
        ):
            assert t.dtype == dtype and t.shape == shape and t.is_contiguous(), (t.dtype, t.shape)
        assert num_tokens_per_expert.dtype == torch.int32
        assert (topk_idx is None) == (topk_weights is None)
        assert topk_idx is not None and topk_weights is not None
        assert topk_idx.dtype == torch.int64 and topk_idx.is_contiguous() and len(topk_idx) == tokens
        self._weights(topk_weights, payload[0], topk_idx.shape)
        assert torch.equal(is_token_in_rank.sum(0).int(), num_tokens_per_rank)
        local = len(num_tokens_per_expert) // self.ranks

        counts = [torch.zeros_like(num_tokens_per_rank) for _ in range(self.ranks)]
        dist.all_gather(counts, num_tokens_per_rank, group=self.group)
        arriving = torch.stack([c[self.rank] for c in counts])
        of_experts = [torch.zeros_like(num_tokens_per_expert) for _ in range(self.ranks)]
        dist.all_gather(of_experts, num_tokens_per_expert, group=self.group)
        per_expert = torch.stack(of_experts).sum(0)[self.rank * local :][:local].tolist()  # the host has waited for it
        sends = [is_token_in_rank[:, r].nonzero()[:, 0] for r in range(self.ranks)]
        works, (ids, weights, *received) = self._exchange([topk_idx, topk_weights, *payload], sends, arriving.tolist())
        first = self.rank * local

        def finish() -> None:  # on .data: kernels move no version counter
            ids.data.sub_(first)
            ids.data[(ids < 0) | (ids >= local)] = -1
            weights.data[ids < 0] = 0

        event = self._event(works, async_finish, finish)
        out = received[0] if len(received) == 1 else (received[0].view(torch.float8_e4m3fn), received[1])
        return out, ids, weights, per_expert, (is_token_in_rank, arriving), event

    def combine(
        self,
        x: Tensor,
        handle: tuple[Tensor, ...],
        topk_weights: Tensor | None = None,
        bias: Tensor | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        self.calls.append("combine")
        assert bias is None and config is None and isinstance(handle, tuple)
        in_rank, arriving = handle
        assert isinstance(x, Tensor) and x.dtype in (torch.bfloat16, *WIDE), "combine takes no FP8"
        (x,) = self._payload(x)
        assert len(x) == arriving.sum()
        if topk_weights is not None:
            self._weights(topk_weights, x, (len(x), topk_weights.shape[1]))
        sent_back = list(torch.arange(len(x)).split(arriving.tolist()))
        returning = [int(n) for n in in_rank.sum(0)]
        works, received = self._exchange([x] if topk_weights is None else [x, topk_weights], sent_back, returning)
        out = [r.new_full((len(in_rank), r.shape[1]), torch.nan) for r in received]

        def finish() -> None:
            for rows, total in zip(received, out, strict=True):
                wide = torch.zeros(total.shape, dtype=torch.promote_types(rows.dtype, torch.float32))
                for r, part in enumerate(rows.split(returning)):
                    wide[in_rank[:, r]] += part.to(wide.dtype)
                total.data.copy_(wide)

        return out[0], out[1] if len(out) > 1 else None, self._event(works, async_finish, finish)

    def _payload(self, x: Tensor | tuple[Tensor, Tensor]) -> list[Tensor]:
        """What travels, FP8 as bytes: gloo knows no float8."""
        tokens = x[0] if isinstance(x, tuple) else x
        assert tokens.dim() == 2 and tokens.is_contiguous() and tokens.shape[1] * tokens.element_size() % 16 == 0
        if not isinstance(x, tuple):
            assert x.dtype in (torch.bfloat16, *WIDE)
            return [x]
        assert tokens.dtype == torch.float8_e4m3fn and tokens.shape[1] % 128 == 0
        assert x[1].dtype == torch.float32 and x[1].shape == (len(tokens), tokens.shape[1] // 128) and x[1].is_contiguous()
        return [tokens.view(torch.uint8), x[1]]

    def _weights(self, weights: Tensor, x: Tensor, shape: tuple[int, ...]) -> None:
        expected = torch.float64 if x.dtype == torch.float64 else torch.float32
        assert weights.dtype == expected and weights.shape == shape and weights.is_contiguous()

    def _exchange(self, tensors: list[Tensor], sends: list[Tensor], arriving: list[int]) -> tuple[list[Any], list[Tensor]]:
        works, received = [], []
        for t in tensors:
            out = torch.full((sum(arriving), t.shape[1]), torch.nan if t.is_floating_point() else 99, dtype=t.dtype)
            rows = t[torch.cat(sends)].contiguous()
            counts = [len(s) for s in sends]
            works.append(dist.all_to_all_single(out, rows, arriving, counts, group=self.group, async_op=True))
            received.append(out)
        return works, received

    def _event(self, works: list[Any], asynchronous: bool, finish: Callable[[], None] | None = None) -> EventOverlap:
        def end() -> None:
            for work in works:
                work.wait()
            if finish is not None:
                finish()

        if asynchronous:
            return EventOverlap(end)
        end()
        return EventOverlap()
