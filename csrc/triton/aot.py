"""What is compiled ahead of time to see, without a GPU, that every kernel compiles for Hopper and into which instructions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from prl_triton.configs import config

HOPPER = 90


@dataclass(frozen=True)
class Aot:
    """One kernel in one shipped configuration, and what its machine code must show."""

    name: str
    function: Any
    """The `@triton.jit` function."""
    signature: dict[str, str]
    """Argument → type (`*bf16`, `*u8`, `i32`, `i64`, `fp32`, `tensordesc<...>`) of all that are not in `constexprs`."""
    constexprs: dict[str, Any]
    aligned: tuple[str, ...] = ()
    """Arguments that are multiples of 16, pointers included."""
    num_warps: int = 4
    num_stages: int = 1
    options: dict[str, Any] = field(default_factory=lambda: {"enable_fp_fusion": False})
    """Further launch options, as the launcher passes them."""
    sixteen_byte_access: bool = False
    """Large tensors are read by LDG.E.128 or LDGSTS.E.128 and written by STG.E.128."""
    tensor_core: str | None = None
    """QGMMA or HGMMA."""
    async_loads: bool = False
    """LDGSTS or UTMALDG."""


def shipped(op: str, function: Any, signature: dict[str, str], *, bandwidth: bool = True, **constexprs: Any) -> Aot:
    """A kernel of `op` in its shipped configuration. Aligned: pointers, and the arguments that the kernel is specialised on.

    `bandwidth`: it moves large tensors, so 16 bytes at a time.
    """
    table = config(op)
    warps, stages = table.pop("num_warps"), table.pop("num_stages", 1)
    options = {"enable_fp_fusion": False} | ({"maxnreg": table.pop("maxnreg")} if "maxnreg" in table else {})
    general = {p.name for p in getattr(function, "params", ()) if p.do_not_specialize}
    aligned = tuple(n for n, kind in signature.items() if kind != "fp32" and n not in general)
    label = ",".join((f"{op}.{function.__name__}", *signature.values(), *(f"{k}={v}" for k, v in constexprs.items())))
    return Aot(
        label, function, signature, {**table, **constexprs}, aligned, warps, stages, options, sixteen_byte_access=bandwidth
    )


def compile_for_hopper(aot: Aot) -> Any:
    """The compiled kernel (`.asm["ptx"]`, `.asm["cubin"]`, `.metadata.shared`); needs no GPU. Not under the interpreter."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = aot.function.arg_names
    missing = set(names) ^ (aot.signature.keys() | aot.constexprs.keys())
    if missing:
        raise ValueError(f"{aot.name}: arguments in the kernel or in the entry, not in both: {', '.join(sorted(missing))}")
    source = ASTSource(
        fn=aot.function,
        signature={n: aot.signature.get(n, "constexpr") for n in names},
        constexprs={(names.index(n),): value for n, value in aot.constexprs.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aot.aligned},
    )
    options = {"num_warps": aot.num_warps, "num_stages": aot.num_stages, **aot.options}
    return triton.compile(source, target=GPUTarget("cuda", HOPPER, 32), options=options)
