"""Which backend runs each op. An op is a name with one implementation per backend; `reference` (plain torch) has them all.

`PRL_KERNELS=name` demands a backend for every op; without it the first of `PREFERENCE` that has the op is taken.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

PREFERENCE = ("reference",)
F = TypeVar("F", bound=Callable[..., Any])
_OPS: dict[str, dict[str, Callable[..., Any]]] = {}


class KernelError(Exception):
    """No implementation of an op as demanded; the message names the op, the backend and what there is."""


def implements(op: str, backend: str) -> Callable[[F], F]:
    """Decorator: register a function as `backend`'s implementation of `op`."""

    def register(function: F) -> F:
        _OPS.setdefault(op, {})[backend] = function
        choose.cache_clear()
        return function

    return register


@functools.cache
def choose(op: str) -> Callable[..., Any]:
    """The implementation of `op` for this process; the choice is made once. Raises KernelError."""
    name = backend_of(op)
    return _OPS[op][name]


def backend_of(op: str) -> str:
    """The name of the backend that runs `op`. Raises KernelError."""
    have = _OPS.get(op, {})
    demanded = os.environ.get("PRL_KERNELS")
    for name in (demanded,) if demanded else PREFERENCE:
        if name in have:
            return name
    raise KernelError(
        f"kernel {op}: no backend {demanded or ' or '.join(PREFERENCE)}; it has {', '.join(sorted(have)) or 'none'} "
        "(unset PRL_KERNELS to let each op choose)"
    )


def backends() -> dict[str, str]:
    """Op → backend in this process, for the metrics."""
    return {op: backend_of(op) for op in sorted(_OPS)}
