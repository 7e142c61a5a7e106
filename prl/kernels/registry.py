"""Which backend runs each op. An op is one schema in `torch.ops.prl`; each backend has it under the same name.

* `reference`: plain torch, beside the schema; every op has it, float64 runs on nothing else.
* `cpu`: C++ of csrc/cpu, `torch.ops.prl_cpu`.
* `triton`: csrc/triton, the functions of `prl_triton.OPS`; on CPU tensors only under Triton's interpreter, on demand.
* `cuda`: csrc/cuda, through `prl.kernels.cuda.OPS`; GEMMs for Hopper.

`PRL_KERNELS=name` (`launch.kernels` sets it) takes that backend for every op that it should have, or nothing; `cuda` means
Triton for the ops that have no CUDA kernel. Other ops take the reference. Without it, or where it is empty, an op takes the
first of `PREFERENCE` that can run it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prl.config.named import SetupError

PREFERENCE = ("cuda", "triton", "cpu", "reference")
_LIBRARY = torch.library.Library("prl", "FRAGMENT")


class KernelError(SetupError):
    """No implementation of an op as demanded; the message names the op, the backend and what there is."""


class GradientError(RuntimeError):
    """A gradient that an op does not have."""


@dataclass(frozen=True)
class Op:
    name: str
    reference: Callable[..., Any]
    backends: tuple[str, ...]
    """Those that should have it, beside the reference."""
    differentiable: bool


_OPS: dict[str, Op] = {}


def define(
    schema: str,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    backends: Sequence[str] = ("triton", "cpu"),
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
) -> Any:
    """Register an op; returns `torch.ops.prl.<name>`. The schema has no defaults: every argument is always passed."""
    name = schema.partition("(")[0]
    _OPS[name] = Op(name, reference, tuple(backends), backward is not None)
    functions.cache_clear()  # a module of ops may be imported after a backend was first asked
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, functools.partial(_run, name), "CompositeExplicitAutograd")
    torch.library.register_fake(f"prl::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(f"prl::{name}", backward, setup_context=setup_context, lib=_LIBRARY)
    return getattr(torch.ops.prl, name)


def _run(name: str, *args: Any) -> Any:
    tensors = [a for a in args if isinstance(a, Tensor)]
    if not _OPS[name].differentiable and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise GradientError(f"kernel {name} has no gradient: detach its arguments, or call it under torch.no_grad()")
    exact = any(t.dtype == torch.float64 for t in tensors)
    return choose(name, tensors[0].device.type, exact)(*args)


def choose(name: str, device: str, exact: bool = False) -> Callable[..., Any]:
    """The implementation of op `name` for tensors on `device`; `exact`: float64. Raises KernelError."""
    return _chosen(name, device, exact, os.environ.get("PRL_KERNELS"))[1]


@functools.cache
def _chosen(name: str, device: str, exact: bool, demanded: str | None) -> tuple[str, Callable[..., Any]]:
    if name not in _OPS:
        raise KernelError(f"kernel {name}: no such op; there are {', '.join(sorted(_OPS))}")
    op = _OPS[name]
    if demanded and demanded not in PREFERENCE:
        raise KernelError(f"kernel {name}: no backend {demanded} (PRL_KERNELS); there are {', '.join(PREFERENCE)}")
    wanted = "triton" if demanded == "cuda" and "cuda" not in op.backends else demanded
    if not op.backends or wanted == "reference" or (wanted and wanted not in op.backends):
        return "reference", op.reference
    candidates = [wanted] if wanted else [b for b in PREFERENCE if b in op.backends or b == "reference"]
    reasons = []
    for backend in candidates:
        why = _why_not(name, backend, device, exact, demanded)
        if why is None:
            return backend, op.reference if backend == "reference" else functions(backend)[name]
        reasons.append(f"{backend}: {why}")
    mend = "unset PRL_KERNELS and launch.kernels to let each op choose"
    raise KernelError(f"kernel {name} on {device}: {'; '.join(reasons)} ({mend})")


def _why_not(name: str, backend: str, device: str, exact: bool, demanded: str | None) -> str | None:
    if backend == "reference":
        return None
    if exact:
        return "float64 runs on the reference only"
    why = unavailable(backend)
    if why is not None:
        return why
    on = "cpu" if backend == "cpu" or (backend == "triton" and demanded == "triton" and interpreting()) else "cuda"
    if device != on:
        return f"it takes {on} tensors"
    if name not in functions(backend):
        return "it has no such op"
    return _built_otherwise(name) if backend == "cpu" else None


def _built_otherwise(name: str) -> str | None:
    """Why the extension's op is not this one: an older build may still lie beside the package."""
    ours, built = (str(getattr(ops, name).default._schema).partition("::")[2] for ops in (torch.ops.prl, torch.ops.prl_cpu))
    return None if ours == built else f"prl._cpu was built from other sources, its op is {built}; install prl again"


def no_gpu() -> str | None:
    """Why this process has no CUDA device; None where it has one."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; on a machine with a GPU install one that has it"
    return "no CUDA device"


def interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def damaged(path: Path) -> str | None:
    """What is wrong with a shared object whose segments are not all in the file: to load it kills the process (SIGBUS)."""
    with path.open("rb") as f:
        head = f.read(64)
        if len(head) < 64 or head[:5] != b"\x7fELF\x02":
            return f"{path}: not a 64-bit ELF object"
        ((offset,), (size, count)) = struct.unpack_from("<Q", head, 32), struct.unpack_from("<HH", head, 54)
        f.seek(offset)
        table = f.read(size * count)
        length = f.seek(0, os.SEEK_END)
    if len(table) < size * count or size < 56:  # of a program header: p_offset at 8, p_filesz at 32
        return f"{path}: cut short, its table of segments is beyond its {length} bytes"
    needed = max(
        (sum(struct.unpack_from("<Q", table, at + i)[0] for i in (8, 32)) for at in range(0, len(table), size)), default=0
    )
    return f"{path}: cut short, {length} bytes of {needed}" if length < needed else None


@functools.cache
def unavailable(backend: str) -> str | None:
    """Why `backend` cannot run in this process; None where it can."""
    if backend == "cpu":
        found = importlib.util.find_spec("prl._cpu")
        if found is not None and found.origin is not None and (why := damaged(Path(found.origin))):
            return f"{why}; install prl again where a C++ compiler is found"
        try:
            importlib.import_module("prl._cpu")
        except ImportError as e:
            return f"prl._cpu cannot be imported ({e}); install prl where a C++ compiler is found"
        return None
    if backend == "triton":
        try:
            importlib.import_module("prl_triton")
        except ImportError as e:
            mend = "; pip install prl, whose package prl_triton is csrc/triton" if e.name == "prl_triton" else ""
            return f"Triton's kernels cannot be imported ({e}){mend}"
        return None if interpreting() else no_gpu()
    if backend == "cuda":
        return importlib.import_module("prl.kernels.cuda").unavailable()
    return None


@functools.cache
def functions(backend: str) -> dict[str, Callable[..., Any]]:
    """Op → implementation of an available backend."""
    if backend == "cpu":
        return {name: getattr(torch.ops.prl_cpu, name) for name in _OPS if hasattr(torch.ops.prl_cpu, name)}
    module = "prl_triton" if backend == "triton" else "prl.kernels.cuda"
    return dict(importlib.import_module(module).OPS)


def backend_of(name: str, device: str = "cpu") -> str:
    """The name of the backend that runs op `name` there. Raises KernelError."""
    return _chosen(name, device, False, os.environ.get("PRL_KERNELS"))[0]


def backends(device: str = "cpu") -> dict[str, str]:
    """Op → backend in this process, for the metrics."""
    return {name: backend_of(name, device) for name in sorted(_OPS)}


def status(device: str) -> list[tuple[str, str, str]]:
    """(op, backend, "chosen", "available" or why it is not) for every op and every backend that should have it."""
    rows = []
    for name, op in sorted(_OPS.items()):
        try:
            chosen = backend_of(name, device)
        except KernelError:
            chosen = ""
        for backend in PREFERENCE:
            if backend == chosen:
                rows.append((name, backend, "chosen"))
            elif backend in (*op.backends, "reference"):
                rows.append((name, backend, _why_not(name, backend, device, False, backend) or "available"))
    return rows
