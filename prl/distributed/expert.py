"""Expert parallelism: tokens travel to the ranks that hold their experts, and the experts' sums travel back.

Legend: T tokens, D hidden width, K experts per token, R ranks of the expert group, S rows sent, N rows received, B = D / 128.
A token goes once to each rank that holds one of its experts; rows arrive by source rank, then token; ids are those of the
receiving rank's own experts, −1 for others; what comes back is summed unweighted in rank order, in float32 or wider, and cast
once. An id of −1 goes nowhere. A rank without tokens, or that gets none, joins every collective. DeepEP has the same semantics.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from prl.kernels.numerics import FP8
from prl.kernels.permute import combine, permute
from prl.kernels.quantise import quantise_rows

Compute = Callable[[Tensor, Tensor, Tensor, tuple[Tensor, Tensor] | None, int], Tensor]
"""(tokens [N, D], ids of this rank's experts [N, K], weights [N, K], the tokens' FP8 codes and scales, how many ids are not −1)
→ sums [N, D]."""
Travel = Generator[None, None, Tensor]


class Dispatcher(ABC):
    """Tokens go in `chunks` parts: while the experts work on one, the next is on its way and the last on its way back.

    So it is in backward, where everything happens in reverse. With `fp8` tokens travel as FP8 codes, quantised once; gradients
    and what comes back do not.
    """

    def __init__(self, chunks: int = 1, fp8: bool = False):
        self.chunks, self.fp8 = chunks, fp8

    @abstractmethod
    def plans(self, ids_CTK: tuple[Tensor, ...]) -> list[Any]:
        """Where the tokens of each chunk go."""

    @abstractmethod
    def travel(self, compute: Compute, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, plan: Any) -> Travel:
        """A chunk's way: sent at the first step; received, computed and sent back at the second; collected at the third."""

    def __call__(self, compute: Compute, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        split = [t.tensor_split(self.chunks) for t in (x_TD, ids_TK, weights_TK)]
        chunks = [self.travel(compute, *args) for args in zip(*split, self.plans(split[1]), strict=True)]
        next(chunks[0])
        for chunk, following in zip(chunks, [*chunks[1:], None], strict=True):
            if following is not None:
                next(following)
            next(chunk)
        out = [_returned(chunk) for chunk in chunks]
        return out[0] if len(out) == 1 else torch.cat(out)


def _returned(chunk: Travel) -> Tensor:
    try:
        next(chunk)
    except StopIteration as end:
        return end.value
    raise AssertionError("a chunk has three steps")


class Journey(Protocol):
    """Tensors under way to other ranks, and their gradients under way back. Nothing that is under way may be read."""

    gradients: tuple[Tensor | None, ...]

    def go(self, *tensors: Tensor | None) -> tuple[Tensor | None, ...]: ...

    def go_back(self, *gradients: Tensor | None) -> tuple[Tensor | None, ...]: ...

    def wait(self, *tensors: Tensor | None) -> None:
        """Until what was started last has arrived."""


class Start(torch.autograd.Function):
    """In backward it waits for the gradients that `Arrive` has started."""

    @staticmethod
    def forward(ctx: Any, journey: Journey, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.journey = journey
        return journey.go(*tensors)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients, ctx.journey.gradients = ctx.journey.gradients, ()
        ctx.journey.wait(*gradients)
        return None, *gradients


class Arrive(torch.autograd.Function):
    """In backward it starts the gradients; they are of other shapes than its inputs, so `Start` gets them past autograd."""

    @staticmethod
    def forward(ctx: Any, journey: Journey, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.journey = journey
        journey.wait(*tensors)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.journey.gradients = ctx.journey.go_back(*gradients)
        return None, *(None if g is None else placeholder(g, len(g)) for g in gradients)


def placeholder(x: Tensor, rows: int) -> Tensor:
    """[rows, …] of x's type in no memory: it carries a gradient, and nothing reads it."""
    return x.new_zeros(()).expand(rows, *x.shape[1:])


class Rows(torch.autograd.Function):
    """`permute` of tokens that travel as codes: a placeholder forward, the sum over their rows backward."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, source_S: Tensor, position_TR: Tensor) -> Tensor:
        ctx.save_for_backward(source_S, position_TR)
        return placeholder(x_TD, len(source_S))

    @staticmethod
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None, None]:
        return combine(grad_SD, None, *ctx.saved_tensors), None, None


class AllToAll(Dispatcher):
    """Over `all_to_all_single` of any backend. The counts of all chunks are exchanged in one: there host and device meet."""

    def __init__(self, group: dist.ProcessGroup, n_experts: int, chunks: int = 1, fp8: bool = False):
        super().__init__(chunks, fp8)
        self.group, self.ranks = group, group.size()
        self.n_local = n_experts // self.ranks

    def plans(self, ids_CTK: tuple[Tensor, ...]) -> list[tuple[Tensor, list[int], list[int], int]]:
        r, c = self.ranks, len(ids_CTK)
        goes, counts = [], []
        for ids_TK in ids_CTK:
            owner_TK = torch.where(ids_TK < 0, r, ids_TK.div(self.n_local, rounding_mode="floor"))
            goes.append(ids_TK.new_zeros(len(ids_TK), r + 1, dtype=torch.bool).scatter_(1, owner_TK, True)[:, :r])
            owner_S = owner_TK.flatten()
            counts.append(ids_TK.new_zeros(r + 1).scatter_add_(0, owner_S, torch.ones_like(owner_S))[:r])
        sent_RC = torch.stack([*(goes_TR.sum(0) for goes_TR in goes), *counts], 1)  # tokens of each chunk, then slots
        received_RC = _wait(_start(sent_RC, [1] * r, [1] * r, self.group.group_name))
        sent, received = torch.stack((sent_RC, received_RC)).transpose(1, 2).tolist()
        return list(zip(goes, sent[:c], received[:c], map(sum, received[c:]), strict=True))

    def travel(self, compute: Compute, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, plan: Any) -> Travel:
        goes_TR, sent, received, slots = plan
        (t, r), (_, k), s = goes_TR.shape, ids_TK.shape, sum(sent)
        # Row s is slot source[s] = token · R + rank; rows are by rank, then token. Position [T, R] is the inverse.
        place_TR = goes_TR.T.flatten().cumsum(0).view(r, t).T - 1
        position_TR = torch.where(goes_TR, place_TR, -1).contiguous()
        slots_TR = torch.arange(t * r, device=ids_TK.device)
        source_S = ids_TK.new_empty(s + 1).scatter_(0, torch.where(goes_TR, place_TR, s).flatten(), slots_TR)[:s]
        token_S, to_S = source_S // r, source_S % r
        ids_SK = ids_TK[token_S] - to_S[:, None] * self.n_local
        ids_SK = torch.where((ids_SK >= 0) & (ids_SK < self.n_local), ids_SK, -1)
        small = [weights_TK[token_S], ids_SK.to(weights_TK.dtype)]  # one exchange: ids are small, floats hold them
        codes_SD = None
        if self.fp8:
            codes_TD, scales_BT = quantise_rows(x_TD.detach())
            codes_SD = codes_TD.view(torch.uint8)[token_S]  # gloo knows no float8
            small.append(scales_BT.T[token_S])
            x_SD = Rows.apply(x_TD, source_S, position_TR)
        else:
            x_SD = permute(x_TD, source_S, position_TR)
        journey = Exchange(sent, received, self.group, coded=self.fp8)
        pending = Start.apply(journey, x_SD, torch.cat(small, 1), codes_SD)
        yield
        x_ND, small_N, codes_ND = Arrive.apply(journey, *pending)
        weights_NK, ids_NK, scales_NB = small_N.tensor_split((k, 2 * k), 1)
        codes = None if codes_ND is None else (codes_ND.view(FP8), scales_NB.detach().contiguous())
        y_ND = compute(x_ND, ids_NK.detach().long(), weights_NK.contiguous(), codes, slots)
        journey = Exchange(received, sent, self.group)
        pending = Start.apply(journey, y_ND)
        yield
        (y_SD,) = Arrive.apply(journey, *pending)
        return combine(y_SD, None, source_S, position_TR)


class Exchange:
    """Rows in rank order, `sent[r]` of them to rank r. Of tokens that travel as codes (`coded`) the gradient alone does."""

    def __init__(self, sent: list[int], received: list[int], group: dist.ProcessGroup, *, coded: bool = False):
        self.sent, self.received, self.group, self.coded = sent, received, group.group_name, coded
        self.gradients: tuple[Tensor | None, ...] = ()

    def go(self, x: Tensor, *others: Tensor | None) -> tuple[Tensor | None, ...]:
        to = self.received, self.sent, self.group
        first = placeholder(x, sum(self.received)) if self.coded else _start(x, *to)
        return first, *(None if t is None else _start(t, *to) for t in others)

    def go_back(self, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if g is None else _start(g, self.sent, self.received, self.group) for g in gradients)

    def wait(self, *tensors: Tensor | None) -> None:
        for t in tensors:
            if t is not None:
                _wait(t)


def _start(t: Tensor, received: list[int], sent: list[int], group: str) -> Tensor:
    # An op that is functional: selective recomputation can keep its result, and does not send again.
    return torch.ops._c10d_functional.all_to_all_single(t.contiguous(), received, sent, group)


def _wait(t: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(t)
