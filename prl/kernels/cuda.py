"""The CUDA backend: GEMMs for Hopper out of csrc/cuda, an object of its own with a plain C interface. None is built yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

OPS: dict[str, Callable[..., Any]] = {}


def unavailable() -> str | None:
    return "no CUDA kernels are built"
