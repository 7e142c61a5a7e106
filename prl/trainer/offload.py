"""Parameters and gradients brought to the host for an update there, and the parameters back, while the update goes on.

On CUDA the copies run on streams of their own from and to pinned memory; on the CPU the same code copies in place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from prl.distributed.sharded import local

AHEAD = 2
"""Chunks whose copies are under way or done before they are used."""


class Part(NamedTuple):
    of: nn.Parameter
    value: Tensor
    """This rank's part of the parameter, or its copy on the host."""
    grad: Tensor


def in_place(chunks: Iterable[Sequence[nn.Parameter]], values: bool = True) -> Iterator[list[Part]]:
    """No copies: what is updated is the parameters themselves."""
    for chunk in chunks:
        yield [Part(p, local(p), _gradient(p)) for p in chunk]


class Transfer:
    def __init__(self, device: torch.device):
        self.api: Any = torch.get_device_module(device)
        self.pin = device.type != "cpu"
        self.down, self.up = self.api.Stream(), self.api.Stream()

    def __call__(self, chunks: Iterable[Sequence[nn.Parameter]], values: bool = True) -> Iterator[list[Part]]:
        """The chunks one by one on the host, the next `AHEAD` under way; with `values`, what they hold when the following one
        is asked for goes back to the parameters. The device waits for that where the last chunk has been asked for."""
        rest, coming = iter(chunks), deque[tuple[list[Part], Any]]()
        self.down.wait_stream(self.api.current_stream())  # gradients
        self.up.wait_stream(self.api.current_stream())
        coming.extend(self._fetch(chunk, values) for chunk in islice(rest, AHEAD))
        while coming:
            parts, arrived = coming.popleft()
            arrived.synchronize()
            yield parts
            if values:
                with self.api.stream(self.up):
                    for part in parts:
                        local(part.of).copy_(part.value, non_blocking=True)
            coming.extend(self._fetch(chunk, values) for chunk in islice(rest, 1))
        self.api.current_stream().wait_stream(self.up)

    def _fetch(self, chunk: Sequence[nn.Parameter], values: bool) -> tuple[list[Part], Any]:
        arrived = self.api.Event()
        with self.api.stream(self.down):
            parts = [Part(p, self._host(local(p)) if values else local(p), self._host(_gradient(p))) for p in chunk]
            arrived.record(self.down)
        return parts, arrived

    def _host(self, x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=self.pin).copy_(x, non_blocking=True)


def _gradient(p: nn.Parameter) -> Tensor:
    assert p.grad is not None
    return local(p.grad)
