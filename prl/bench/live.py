"""Live tensor bytes of a process over time, by what they are: every storage that an operator gives out, from birth to its end.

Inside of operators written in C++ nothing is seen: their scratch is not tensors that anybody holds.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(slots=True)
class Known:
    """A storage."""

    kind: str
    size: int
    made_by: str


@dataclass(slots=True)
class Moment:
    """The state at a peak."""

    total: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)
    at: str = ""
    live: list[Known] = field(default_factory=list)


class Live(TorchDispatchMode):
    """While it is on, `kind` names what new storages are; `mark` renames one from its birth on."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = "activations: other"
        self.known: list[Known] = []
        self.log: list[tuple[int, int]] = []
        """(which storage, bytes more or fewer)."""
        self.places: list[tuple[int, str]] = []
        """(length of the log, what begins there)."""
        self._ids: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}

    def __enter__(self) -> Live:
        self._resize = UntypedStorage.resize_
        UntypedStorage.resize_ = lambda storage, size: self._resized(storage, size)  # type: ignore[method-assign,arg-type,assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it runs operators on its part, which come here again
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self.see(t, str(func))
        return out

    def place(self, name: str) -> None:
        """From here on the process is at `name`."""
        self.places.append((len(self.log), name))

    @contextmanager
    def making(self, kind: str) -> Iterator[None]:
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before

    def see(self, t: Tensor, made_by: str = "") -> int | None:
        if t.device.type == "meta" or type(t) not in (Tensor, torch.nn.Parameter):
            return None
        storage = t.untyped_storage()
        key = storage._cdata
        if (found := self._ids.get(key)) is not None and found[0]() is storage:
            return found[1]
        index = len(self.known)
        self.known.append(Known(self.kind, storage.nbytes(), f"{made_by} {list(t.shape)} {str(t.dtype)[6:]}"))
        self._ids[key] = weakref.ref(storage, lambda _: self._gone(key, index)), index
        self.log.append((index, storage.nbytes()))
        return index

    def mark(self, t: Tensor, kind: str) -> None:
        if (index := self.see(t)) is not None:
            self.known[index].kind = kind

    def _gone(self, key: int, index: int) -> None:
        self.log.append((index, -self.known[index].size))
        self.known[index].size = 0
        if (found := self._ids.get(key)) is not None and found[1] == index:
            del self._ids[key]

    def _resized(self, storage: UntypedStorage, size: int) -> UntypedStorage:
        out = self._resize(storage, size)
        if (found := self._ids.get(storage._cdata)) is not None and found[0]() is storage:
            known = self.known[found[1]]
            self.log.append((found[1], size - known.size))
            known.size = size
        return out

    def peaks(self) -> tuple[Moment, dict[str, int], dict[str, Moment]]:
        """(the moment of the most bytes, the most that each kind ever had, the peak within each place)."""
        sizes: Counter[int] = Counter()
        kinds: Counter[str] = Counter()
        most: dict[str, int] = {}
        total, place, at = 0, "", iter([*self.places, (len(self.log) + 1, "")])
        following = next(at)
        peaks: dict[str, tuple[int, Counter[str], int]] = {}
        for i, (index, change) in enumerate(self.log):
            while following[0] <= i:
                place, following = following[1], next(at)
            kind = self.known[index].kind
            sizes[index] += change
            kinds[kind] += change
            total += change
            most[kind] = max(most.get(kind, 0), kinds[kind])
            if place not in peaks or total > peaks[place][0]:
                peaks[place] = total, kinds.copy(), i
        moments = {name: Moment(t, k, name) for name, (t, k, _) in peaks.items()}
        top = max(peaks, key=lambda name: peaks[name][0])
        self.top = peaks[top][2]
        return moments[top], most, moments

    def live_at(self, end: int) -> list[tuple[int, Known]]:
        """(bytes, storage) of what lives after so many entries of the log, the largest first."""
        sizes: Counter[int] = Counter()
        for index, change in self.log[: end + 1]:
            sizes[index] += change
        return sorted(((n, self.known[i]) for i, n in sizes.items() if n), key=lambda x: -x[0])
