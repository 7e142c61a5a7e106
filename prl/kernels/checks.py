"""Arguments of the ops, checked before anything is launched. Every error names the op, the argument and what it expected."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from prl.kernels.numerics import BLOCK


class ArgumentError(ValueError):
    """An argument that no backend of the op takes."""


def fail(op: str, argument: str, expected: str, got: object) -> None:
    raise ArgumentError(f"{op}: {argument} must be {expected}, got {got}")


def tensor(op: str, argument: str, t: Tensor, shape: Sequence[int | None], dtypes: Sequence[torch.dtype]) -> None:
    """`shape` has None where any size goes; `dtypes` empty: any."""
    if not isinstance(t, Tensor):
        fail(op, argument, "a tensor", type(t).__name__)
    if t.dim() != len(shape) or any(want is not None and want != have for want, have in zip(shape, t.shape, strict=False)):
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        fail(op, argument, f"of shape [{wanted}]", list(t.shape))
    if dtypes and t.dtype not in dtypes:
        fail(op, argument, "of type " + " or ".join(str(d).removeprefix("torch.") for d in dtypes), t.dtype)
    if not t.is_contiguous():
        fail(op, argument, "contiguous", f"strides {t.stride()} for shape {list(t.shape)}")


def multiple(op: str, argument: str, size: int, of: int = BLOCK) -> None:
    if size % of:
        fail(op, argument, f"a multiple of {of}", size)


def same_device(op: str, **tensors: Tensor | None) -> None:
    given = {name: t.device for name, t in tensors.items() if isinstance(t, Tensor)}
    if len(set(given.values())) > 1:
        fail(op, "/".join(given), "on one device", {name: str(device) for name, device in given.items()})


def groups(op: str, starts_E1: Tensor, counts_E: Tensor, rows: int, align: int) -> None:
    """Groups of rows as `permute.sort_rows` lays them out. Their values are read on the CPU only: elsewhere that would wait.

    That `counts_E` is a vector is checked before: other shapes depend on it.
    """
    tensor(op, "starts_E1", starts_E1, [len(counts_E) + 1], [torch.int64])
    if starts_E1.device.type != "cpu" or torch.compiler.is_compiling():
        return
    starts, counts = starts_E1.tolist(), counts_E.tolist()
    room = [b - a for a, b in zip(starts, starts[1:], strict=False)]
    if starts[0] < 0 or starts[-1] > rows or any(c < 0 or c > r for c, r in zip(counts, room, strict=True)):
        fail(op, "starts_E1 and counts_E", f"groups that lie one after the other within {rows} rows", (starts, counts))
    if any(s % align for s in starts):
        fail(op, "starts_E1", f"multiples of {align}", starts)
