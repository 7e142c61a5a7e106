"""Each op against its reference, in cases that any backend and any device can run: `check(case)`.

A case is an op, its arguments and how closely the results must agree; the arguments lie where the backend is to run, and the
reference runs there too. Imports only torch and prl.kernels, so that it serves on a bare GPU node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prl.kernels import grouped_gemm, indexer, lm_head, permute, quantise, registry, router, swiglu  # noqa: F401 (the ops)

Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    op: str
    label: str
    args: tuple[Any, ...]
    agree: Callable[[Outputs, Outputs], None]
    """Raises AssertionError where (got, wanted) do not agree."""

    def __str__(self) -> str:
        return f"{self.op}-{self.label}"


def check(case: Case, implementation: Callable[..., Any]) -> None:
    """Run `implementation` and the reference on copies of the arguments and compare all results, and what was written to."""
    got_args, want_args = (tuple(a.clone() if isinstance(a, Tensor) else a for a in case.args) for _ in range(2))
    got = outputs(implementation(*got_args))
    want = outputs(registry._OPS[case.op].reference(*want_args))
    assert [(g.shape, g.dtype) for g in got] == [(w.shape, w.dtype) for w in want], case
    assert all(g.is_contiguous() for g in got), case
    case.agree(got, want)
    for after, before, wanted in zip(got_args, case.args, want_args, strict=True):
        if isinstance(after, Tensor) and same(wanted, before):
            assert same(after, before), f"{case}: an argument was written to"


def outputs(result: Any) -> Outputs:
    return () if result is None else (result,) if isinstance(result, Tensor) else tuple(result)


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, but that a NaN equals any NaN."""
    if a.dtype == torch.float8_e4m3fn:
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    if not a.is_floating_point():
        return torch.equal(a, b)
    bits = torch.int16 if a.element_size() == 2 else torch.int32 if a.element_size() == 4 else torch.int64
    return bool(((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all())


def exactly(got: Outputs, want: Outputs) -> None:
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        if not same(g, w):
            g, w = (t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t for t in (g, w))
            different = (g != w) & ~((g != g) & (w != w))
            raise AssertionError(
                f"output {i}: {int(different.sum())} of {g.numel()} elements differ (or the sign of a zero), first at "
                f"{different.nonzero()[:3].tolist()}: {g[different][:3].tolist()} for {w[different][:3].tolist()}"
            )


def ulps(got: Tensor, want: Tensor) -> int:
    """The largest distance in units in the last place, 0 for two NaNs; denormals are that near to zero, too."""
    int_type, info = (torch.int32, 2**31) if got.dtype == torch.float32 else (torch.int16, 2**15)
    g, w = (t.view(int_type).long() for t in (got, want))
    g, w = (torch.where(t < 0, -info - t, t) for t in (g, w))
    far = torch.where(got.isnan() | want.isnan(), (got.isnan() ^ want.isnan()) * 2**31, (g - w).abs())
    return int(far.max()) if far.numel() else 0


def within(units: int) -> Callable[[Outputs, Outputs], None]:
    def agree(got: Outputs, want: Outputs) -> None:
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            if g.is_floating_point() and g.dtype != torch.float8_e4m3fn:
                assert ulps(g, w) <= units, f"output {i}: {ulps(g, w)} units in the last place, {units} allowed"
            else:
                exactly((g,), (w,))

    return agree


def normal(device: str, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Drawn on the CPU, so that it is the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def awkward(device: str, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Magnitudes from denormal to huge by row, and among them zeros of both signs, infinities and NaNs."""
    x = normal("cpu", *shape, seed=seed)
    if x.numel():
        flat = x.view(-1, shape[-1])
        flat *= torch.logspace(-44, 34, len(flat))[:, None]
        places = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(seed))[:6]
        special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45])
        flat.view(-1)[places] = special[: len(places)]
        flat[len(flat) // 2] = 0
    return x.to(dtype).to(device)


def quantisers(
    device: str, rows: int, columns: int, dtype: torch.dtype, make: Callable[..., Tensor] = normal
) -> Iterator[Case]:
    """`rows` x `columns`, each a multiple of 128; rows or columns alone also at a size that is none."""
    label = f"{rows}x{columns}-{str(dtype).removeprefix('torch.')}-{make.__name__}"
    for pow2 in (False, True):
        x = make(device, rows, columns, dtype=dtype)
        name = f"{label}-{'pow2' if pow2 else 'float'}"
        yield Case("quantise_rows", name, (x[: rows - rows // 3].contiguous(), pow2), exactly)
        yield Case("quantise_columns", name, (x[:, : columns - columns // 3].contiguous(), pow2), exactly)
        yield Case("quantise_both", name, (x, pow2), exactly)
        yield Case("quantise_blocks", name, (x.expand(2, -1, -1).contiguous(), pow2), exactly)


def transposes(device: str, experts: int, n: int, k: int) -> Iterator[Case]:
    codes = torch.arange(experts * n * k, dtype=torch.int64).remainder(251).to(torch.uint8).view(experts, n, k)
    yield Case("transpose_codes", f"{experts}x{n}x{k}", (codes.view(torch.float8_e4m3fn).to(device),), exactly)


def ids(device: str, tokens: int, k: int, experts: int, *, missing: bool = True, seed: int = 0) -> Tensor:
    """Skewed routes with repeats, some experts without any, and with `missing` some slots of no expert."""
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.rand(tokens, k, generator=generator) ** 3 * experts).long().clamp(max=max(experts - 1, 0))
    drawn = torch.where(drawn % 5 == 2, 0, drawn)
    if missing or not experts:
        drawn[torch.rand(tokens, k, generator=generator) < (0.2 if experts else 2)] = -1
    return drawn.to(device)


def sorts(device: str, tokens: int, k: int, experts: int) -> Iterator[Case]:
    for align in (1, 128):
        for missing in (False, True):
            args = (ids(device, tokens, k, experts, missing=missing), experts, align)
            yield Case("sort_rows", f"{tokens}x{k}-{experts}-align{align}{'-missing' * missing}", args, exactly)


def movements(device: str, tokens: int, k: int, experts: int, width: int, dtype: torch.dtype) -> Iterator[Case]:
    """permute, combine and its backward; with a width that is a multiple of 128 also permute_quantise."""
    label = f"{tokens}x{k}-{experts}-{width}-{str(dtype).removeprefix('torch.')}"
    routes = ids(device, tokens, k, experts)
    weights = normal(device, tokens, k, seed=1)
    source, position, _, _ = registry._OPS["sort_rows"].reference(routes, experts, 128)
    rows = normal(device, len(source), width, dtype=dtype, seed=2)
    yield Case("permute", label, (awkward(device, tokens, width, dtype=dtype), source, position), exactly)
    for given in (None, weights):
        yield Case("combine", f"{label}{'' if given is None else '-weighted'}", (rows, given, source, position), exactly)
    d_out = normal(device, tokens, width, dtype=dtype, seed=3)
    yield Case("combine_backward", label, (d_out, rows, weights, source, position), _combine_backward(width))
    if width % 128 == 0:
        for columns, pow2 in ((False, False), (True, False), (True, True)):
            x = awkward(device, tokens, width, dtype=dtype)
            name = f"{label}{'-columns' * columns}{'-pow2' * pow2}"
            yield Case("permute_quantise", name, (x, source, position, columns, pow2), exactly)


def _combine_backward(width: int) -> Callable[[Outputs, Outputs], None]:
    def agree(got: Outputs, want: Outputs) -> None:
        exactly(got[:1], want[:1])
        # sums of `width` products of normally distributed numbers, in another order
        torch.testing.assert_close(got[1], want[1], rtol=1e-6, atol=1e-6 * width**0.5)

    return agree
