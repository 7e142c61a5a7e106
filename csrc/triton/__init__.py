"""Triton kernels, importable as `prl_triton`. OPS: op of `prl.kernels` → its launcher."""

from collections.abc import Callable
from typing import Any

OPS: dict[str, Callable[..., Any]] = {}
