"""Activation offload: what autograd keeps of a block waits for backward in host memory.

Whole storages move, so that views and aliases of one stay so. On CUDA they travel on a stream of their own, from and to pinned
memory; the compute stream waits for a copy only where it frees or needs what was copied. On a CPU copies are made at once.

At most `in_flight` blocks are on the device beside the one that computes: in forward those whose way out may not be over, in
backward those fetched ahead. The last ones of a forward are there still when backward starts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks

from prl.models.base import Model

LEAST_BYTES = 4096
"""Smaller storages stay where they are."""


class Held:
    """One storage of a block, on the device, on the host, or both."""

    def __init__(self, stage: Stage, storage: UntypedStorage):
        self.stage = stage
        self.device: UntypedStorage | None = storage
        self.host: Tensor | None = None


class View(NamedTuple):
    """What autograd holds instead of a tensor."""

    held: Held
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Stage:
    """What autograd keeps of one block in one forward."""

    def __init__(self, forward: Forward, block: int, weights: set[int]):
        self.forward, self.block, self.weights = forward, block, weights
        self.held: WeakValueDictionary[int, Held] = WeakValueDictionary()
        """By address on the device; autograd's views keep them."""
        self.done: Any = None
        """CUDA event: the last copies of this stage are over."""

    @property
    def here(self) -> bool:
        return all(h.device is not None for h in self.held.values())

    def keep(self, t: Tensor) -> Tensor | View:
        storage = t.untyped_storage() if type(t) is Tensor else None
        if (
            storage is None
            or not (t.is_floating_point() or t.is_complex())
            or t.is_conj()
            or t.is_neg()
            or storage.nbytes() < LEAST_BYTES
            or isinstance(t._base, nn.Parameter)
            or storage.data_ptr() in self.weights
        ):
            return t
        held = self.held.get(storage.data_ptr())  # alive, so the address is its own
        if held is None:
            held = self.held[storage.data_ptr()] = Held(self, storage)
        return View(held, t.dtype, t.size(), t.stride(), int(t.storage_offset()))

    def move_out(self) -> None:
        offload = self.forward.offload
        with offload.aside():
            for h in self.held.values():
                assert h.device is not None
                h.host = torch.empty(h.device.nbytes(), dtype=torch.uint8, pin_memory=offload.stream is not None)
                h.host.copy_(_flat(h.device), non_blocking=True)
        self.done = offload.event()
        offload.log("out", self)

    def free(self) -> None:
        """Memory of the device; what needs it next comes after the copy."""
        self.forward.offload.wait(self.done)
        for h in self.held.values():
            h.device = None
        self.forward.offload.log("free", self)

    def move_in(self) -> None:
        offload = self.forward.offload
        for h in self.held.values():
            assert h.host is not None
            h.device = torch.empty(len(h.host), dtype=torch.uint8, device=offload.device).untyped_storage()
        with offload.aside():
            for h in self.held.values():
                assert h.host is not None and h.device is not None
                _flat(h.device).copy_(h.host, non_blocking=True)
        self.done = offload.event()
        offload.log("in", self)


class Forward:
    """The stages of one forward and where its backward is."""

    def __init__(self, offload: Offload):
        self.offload = offload
        self.stages: list[Stage] = []
        self.used: Stage | None = None

    def end(self, stage: Stage) -> None:
        self.stages.append(stage)
        stage.move_out()
        if len(self.stages) > self.offload.in_flight:
            self.stages[-1 - self.offload.in_flight].free()

    def give(self, packed: Tensor | View) -> Tensor:
        if not isinstance(packed, View):
            return packed
        stage, offload = packed.held.stage, self.offload
        if stage is not self.used:
            if self.used is not None:
                self.used.free()
            self.used = stage
            at = stage.block
            for ahead in reversed(self.stages[max(at - offload.in_flight, 0) : at + 1]):
                if not ahead.here:
                    ahead.move_in()
            offload.wait(stage.done)
            offload.log("use", stage)
        storage = packed.held.device
        assert storage is not None
        empty = torch.empty(0, dtype=packed.dtype, device=storage.device)
        return empty.set_(storage, packed.offset, packed.size, packed.stride)


class Offload:
    def __init__(self, device: torch.device, in_flight: int, log: Callable[[str, Stage], None] = lambda what, stage: None):
        """`log` is told of each move: out, free, in, use."""
        self.device, self.in_flight, self.log = device, in_flight, log
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.forward: Forward | None = None

    def wrap(self, model: Model) -> None:
        """Inside FSDP's hooks, and around what is computed again."""
        self.last = model.layers[-1]
        for i, block in enumerate(model.layers):
            block.forward = functools.partial(self._run, block, i, block.forward)

    def _run(self, block: nn.Module, i: int, forward: Callable[..., Any], *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args)
        if i == 0:
            self.forward = Forward(self)
        assert self.forward is not None
        weights = {p.untyped_storage().data_ptr() for p in block.parameters() if type(p) in (Tensor, nn.Parameter)}
        stage = Stage(self.forward, i, weights)
        with saved_tensors_hooks(stage.keep, self.forward.give):
            out = forward(*args)
        self.forward.end(stage)
        if block is self.last:
            self.forward = None
        return out

    def aside(self) -> Any:
        """On the copies' stream, after all that was asked of the device so far."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.stream)

    def event(self) -> Any:
        return None if self.stream is None else self.stream.record_event()

    def wait(self, event: Any) -> None:
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


def _flat(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
