"""Each op against its reference, in cases that any backend and any device can run: `check(case)`.

A case is an op, its arguments and how closely the results must agree; the arguments lie where the backend is to run, and the
reference runs there too. Imports only torch and prl.kernels, so that it serves on a bare GPU node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prl.kernels import grouped_gemm, indexer, lm_head, permute, quantise, registry, router, swiglu  # noqa: F401 (the ops)
from prl.kernels.numerics import BLOCK, calc_diff

Outputs = tuple[Tensor, ...]
Ops = Mapping[str, Callable[..., Any]]
"""A backend: op → implementation."""


@dataclass(frozen=True)
class Case:
    op: str
    label: str
    args: tuple[Any, ...]
    agree: Callable[[Outputs, Outputs], None]
    """Raises AssertionError where (got, wanted) do not agree."""
    wanted: Callable[[Ops], Outputs] | None = None
    """What to compare with if not the reference; it may use the backend's other ops."""

    def __str__(self) -> str:
        return f"{self.op}-{self.label}"


def check(case: Case, ops: Ops) -> None:
    """Run the op of `ops` on copies of the arguments; compare results, and arguments that the reference does not write to."""
    got_args, want_args = (tuple(a.clone() if isinstance(a, Tensor) else a for a in case.args) for _ in range(2))
    got = outputs(ops[case.op](*got_args)) + written(case.op, got_args)
    want = case.wanted(ops) if case.wanted else outputs(reference(case.op)(*want_args)) + written(case.op, want_args)
    assert [(g.shape, g.dtype) for g in got] == [(w.shape, w.dtype) for w in want], case
    assert all(g.is_contiguous() for g in got), case
    case.agree(got, want)
    for after, before, wanted in zip(got_args, case.args, want_args, strict=True):
        if isinstance(after, Tensor) and same(wanted, before):
            assert same(after, before), f"{case}: an argument was written to"


def reference(op: str) -> Callable[..., Any]:
    return registry._OPS[op].reference


def outputs(result: Any) -> Outputs:
    return () if result is None else (result,) if isinstance(result, Tensor) else tuple(result)


def written(op: str, args: tuple[Any, ...]) -> Outputs:
    """The arguments that the op's schema says it writes to."""
    schema = getattr(torch.ops.prl, op).default._schema
    return tuple(a for a, of in zip(args, schema.arguments, strict=True) if of.alias_info and of.alias_info.is_write)


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


def ulps(got: Tensor, want: Tensor) -> Tensor:
    """The distance in units in the last place, 0 for two NaNs; denormals are that near to zero, too."""
    int_type, info = (torch.int32, 2**31) if got.dtype == torch.float32 else (torch.int16, 2**15)
    g, w = (t.view(int_type).long() for t in (got, want))
    g, w = (torch.where(t < 0, -info - t, t) for t in (g, w))
    return torch.where(got.isnan() | want.isnan(), (got.isnan() ^ want.isnan()) * 2**31, (g - w).abs())


def within(units: int, exact: Tensor | None = None) -> Callable[[Outputs, Outputs], None]:
    """So many units in the last place from the only output, or from the float64 result: the reference is up to three off."""

    def agree(got: Outputs, want: Outputs) -> None:
        far = ulps(got[0], want[0])
        if exact is not None:
            far = torch.minimum(far, ulps(got[0], exact.to(got[0].dtype)))
        assert not far.numel() or int(far.max()) <= units, f"{int(far.max())} units in the last place, {units} allowed"

    return agree


def error(x: Tensor, exact: Tensor) -> float:
    """|x − exact| / |exact| over all elements."""
    return float((x.double() - exact).norm() / exact.norm().clamp(min=1e-300))


def accurate(exact: Outputs, floor: float = 2.0**-22) -> Callable[[Outputs, Outputs], None]:
    """As near to the float64 results as 1.5 times the reference, or as `floor`; on tensor cores a calc_diff of 1e-6 will do.

    Where the reference has an exact zero or a NaN, so it must be.
    """

    def agree(got: Outputs, want: Outputs) -> None:
        for i, (g, w, e) in enumerate(zip(got, want, exact, strict=True)):
            assert torch.equal(g.isnan(), w.isnan()), f"output {i}: NaN in other places"
            assert not ((w == 0) & (g != 0)).any(), f"output {i}: not zero where it must be"
            known = ~w.isnan() & ~e.isnan()
            g, w, e = (torch.where(known, t, 0) for t in (g, w, e))
            most = max(1.5 * error(w, e), floor)
            if g.is_cuda and error(g, e) > most:
                assert calc_diff(g, e) <= 1e-6, f"output {i}: calc_diff {calc_diff(g, e)}, the reference has {calc_diff(w, e)}"
            else:
                assert error(g, e) <= most, f"output {i}: error {error(g, e)}, {most} allowed"

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
    weights = normal(device, tokens, k, seed=1).masked_fill_(routes < 0, torch.nan)  # a slot of no expert adds nothing at all
    source, position, _, _ = reference("sort_rows")(routes, experts, 128)
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


def swiglus(device: str, rows: int, width: int, dtype: torch.dtype) -> Iterator[Case]:
    """swiglu and its gradient; with a width and rows that are multiples of 128 also the quantising ones."""
    label = f"{rows}x{width}-{str(dtype).removeprefix('torch.')}"
    units = 4 if dtype == torch.float32 else 1
    gate_up, grad = 3 * normal("cpu", rows, 2 * width), normal("cpu", rows, width, seed=1)
    gate_up, grad, weights = gate_up.to(dtype).to(device), grad.to(dtype).to(device), normal(device, rows, seed=2)
    for x, name in ((gate_up, label), (awkward(device, rows, 2 * width, dtype=dtype), f"{label}-awkward")):
        yield Case("swiglu", name, (x,), within(units, reference("swiglu")(x.double())))
        if width % 128 == 0:
            for pow2 in (False, True):
                args = (x, False, pow2)
                yield Case("swiglu_quantise", f"{name}{'-pow2' * pow2}", args, exactly, _quantised_product(x, False, pow2))
        if width % 128 == 0 and rows % 128 == 0:
            for pow2 in (False, True):
                args, wanted = (x, True, pow2), _quantised_product(x, True, pow2)
                yield Case("swiglu_quantise", f"{name}-columns{'-pow2' * pow2}", args, exactly, wanted)
                wanted = _quantised_gradients(x, grad, weights, pow2)
                backward = (x, grad, weights, pow2)
                yield Case("swiglu_backward_quantise", f"{name}{'-pow2' * pow2}", backward, _all_but_a_sum, wanted)
    yield Case("swiglu_backward", label, (gate_up, grad), _slopes(gate_up, grad))


def _quantised_product(x: Tensor, columns: bool, pow2: bool) -> Callable[[Ops], Outputs]:
    """The reference's codes of the backend's own float32 product."""

    def wanted(ops: Ops) -> Outputs:
        product = ops["swiglu"](x.float())
        none = (product.new_empty(0, 0, dtype=torch.float8_e4m3fn), product.new_empty(0, 0))
        return *quantise.rows_reference(product, pow2), *(quantise.columns_reference(product, pow2) if columns else none)

    return wanted


def _quantised_gradients(x: Tensor, grad: Tensor, weights: Tensor, pow2: bool) -> Callable[[Ops], Outputs]:
    def wanted(ops: Ops) -> Outputs:
        product, weighted = ops["swiglu"](x.float()), grad.float() * weights[:, None]
        d = ops["swiglu_backward"](x.float(), weighted)
        by_column = quantise.columns_reference(product * weights[:, None], pow2)
        d_weights = (product.double() * grad.double()).sum(1).float()
        return *quantise.rows_reference(d, pow2), *quantise.columns_reference(d, pow2), *by_column, d_weights

    return wanted


def _all_but_a_sum(got: Outputs, want: Outputs) -> None:
    """The last is a sum in another order, of terms that are no larger than what the blocks' scales let one see."""
    exactly(got[:-1], want[:-1])
    finite = want[-1].abs() < 1e30
    torch.testing.assert_close(got[-1][finite], want[-1][finite], rtol=1e-4, atol=1e-4)


def _slopes(gate_up: Tensor, grad: Tensor) -> Callable[[Outputs, Outputs], None]:
    """Against float64, in units of |grad · up| · (2 + |gate|) and of the result: its two terms may cancel."""

    def agree(got: Outputs, want: Outputs) -> None:
        exact = reference("swiglu_backward")(gate_up.double(), grad.double())
        gate, up = gate_up.double().abs().chunk(2, 1)
        bound = 2**-22 * torch.cat((grad.double().abs() * up * (2 + gate), grad.double().abs() * gate), 1)
        bound += (2**-21 if got[0].dtype == torch.float32 else 2**-8) * exact.abs()
        assert bool(((got[0].double() - exact).abs() <= bound).all())

    return agree


def exact_scores(logits: Tensor, scoring: str) -> Tensor:
    """In float64, of the float32 differences to the largest logit that a softmax exponentiates.

    torch's own softmax is up to 7 units in the last place from it (3,000 random rows of up to 300 experts).
    """
    if scoring == "sigmoid":
        return logits.double().sigmoid()
    powers = (logits - logits.amax(-1, keepdim=True)).double().exp() if logits.numel() else logits.double()
    return powers / powers.sum(-1, keepdim=True)


def scores_of(route: Callable[..., Any], logits: Tensor, scoring: str) -> Tensor:
    """The dense scores of a backend, by replaying all experts."""
    every = torch.arange(logits.shape[1], device=logits.device).expand(logits.shape).contiguous()
    return route(logits, scoring, None, every, None, None, logits.shape[1], 1, 1, False, 1.0)[1]


def scorings(device: str, tokens: int, experts: int, top_k: int) -> Iterator[Case]:
    """Scores of logits; then all that follows from a backend's own scores, in the bits that the reference has for these."""
    for scoring in ("sigmoid", "softmax"):
        logits = 4 * normal("cpu", tokens, experts)
        awkward = logits.clone()
        if tokens > 4:
            awkward[0], awkward[1, 0], awkward[2, 0], awkward[3, 0] = -torch.inf, torch.nan, torch.inf, -torch.inf
            awkward[4] *= 30
        for x, name in ((logits.to(device), scoring), (awkward.to(device), f"{scoring}-awkward")):
            label, every = f"{tokens}x{experts}-{name}", torch.arange(experts, device=device).expand(tokens, -1).contiguous()
            args: tuple[Any, ...] = (x, scoring, None, every, None, None, experts, 1, 1, False, 1.0)
            yield Case("route", f"{label}-every", args, _within_weights(exact_scores(x, scoring)))
            bias, recorded = normal(device, experts, seed=1), every[:, :top_k].flip(1).contiguous()
            routed = torch.arange(tokens, device=device) % 3 == 0
            for given, mask, kind in ((None, None, "chosen"), (recorded, None, "replayed"), (recorded, routed, "partly")):
                args = (x, scoring, bias, given, mask, None, top_k, 1, 1, True, 2.5)
                yield Case("route", f"{label}-{kind}", args, exactly, _given_own_scores(args))
    chosen = ids(device, tokens, top_k, experts, missing=False)  # with repeats
    yield from route_slopes(normal(device, tokens, top_k, seed=2), 4 * normal(device, tokens, experts, seed=3), chosen)


def route_slopes(d_weights: Tensor, logits: Tensor, chosen: Tensor) -> Iterator[Case]:
    """As near to float64 as scores within four units and sums of K terms allow."""
    for scoring in router.SCORINGS:
        x = logits.sigmoid() if scoring == "none" else logits
        total = router._scores(x.double(), scoring).gather(1, chosen).sum(1, keepdim=True)
        for normalise in (True, False):
            args = (d_weights, x, scoring, chosen, normalise, 2.5)
            exact = reference("route_backward")(d_weights.double(), x.double(), *args[2:])
            bound = (16 + chosen.shape[1]) * 2**-24 * d_weights.norm(dim=1, keepdim=True) / (total if normalise else 1)
            label = f"{'x'.join(map(str, logits.shape))}-top{chosen.shape[1]}-{scoring}{'' if normalise else '-as-is'}"
            yield Case("route_backward", label, args, near(exact, bound))


def _within_weights(exact: Tensor) -> Callable[[Outputs, Outputs], None]:
    def agree(got: Outputs, want: Outputs) -> None:
        within(4, exact)(got[1:2], want[1:2])
        exactly((got[0], got[2]), (want[0], want[2]))

    return agree


def _given_own_scores(args: tuple[Any, ...]) -> Callable[[Ops], Outputs]:
    def wanted(ops: Ops) -> Outputs:
        logits, scoring, *rest = args
        return outputs(reference("route")(scores_of(ops["route"], logits, scoring), "none", *rest))

    return wanted


def routings(
    device: str, tokens: int, experts: int, top_k: int, n_group: int = 1, topk_group: int = 1, dtype: torch.dtype = torch.uint8
) -> Iterator[Case]:
    """Many ties, some scores that are no numbers; replay with repeated ids, and padding rows.

    An id out of range where nothing is replayed is not looked at.
    """
    generator = torch.Generator().manual_seed(0)
    label = f"{tokens}x{experts}-top{top_k}" + f"-{topk_group}of{n_group}" * (n_group > 1)
    scores = (8 * normal("cpu", tokens, experts).sigmoid()).round() / 8
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    for row in range(min(tokens - 1, 8)):
        places = torch.randint(0, experts, (3,), generator=generator)
        scores[row, places] = odd[torch.randint(0, 4, (3,), generator=generator)]
    scores[-1:], scores[-1:, :1] = 0.0, -0.0
    bias = (4 * normal("cpu", experts, seed=1)).round() / 8
    recorded = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k].clone()
    recorded[2::5, -1:] = recorded[2::5, :1]
    routed, padding = (torch.rand(tokens, generator=generator) < share for share in (0.7, 0.4))
    beyond = torch.where((routed & ~padding)[:, None], recorded, experts).to(dtype).to(device)
    scores, bias, recorded, routed, padding = (t.to(device) for t in (scores, bias, recorded.to(dtype), routed, padding))
    choices = {
        "plain": (None, None, None, None),
        "bias": (bias, None, None, None),
        "replay": (bias, recorded, None, None),
        "partly": (None, recorded, routed, None),
        "padding": (bias, None, None, padding),
        "all": (bias, beyond, routed, padding),
    }
    for name, optional in choices.items():
        for normalise in (True, False):
            args = (scores, "none", *optional, top_k, n_group, topk_group, normalise, 2.5)
            yield Case("route", f"{label}-{name}{'' if normalise else '-as-is'}", args, exactly)


def inspections(device: str, tokens: int, layers: int, k: int, ids: torch.dtype) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    for faulty in (False, True):
        routes = torch.rand(tokens, layers, 100, generator=generator).argsort(-1)[..., :k].clone()
        if faulty:
            routes[torch.rand(tokens, layers, k, generator=generator) < 0.01] = 100 if ids == torch.uint8 else -1
            routes[1::7, :, :1] = routes[1::7, :, -1:]
        routed = (torch.rand(tokens, generator=generator) < 0.5).to(device)
        for mask in (None, routed):
            label = (
                f"{tokens}x{layers}x{k}-{str(ids).removeprefix('torch.')}{'-faulty' * faulty}{'-partly' * (mask is not None)}"
            )
            yield Case("inspect_routes", label, (routes.to(ids).to(device), mask, 100), exactly)


def indexes(device: str, batch: int, queries: int, keys: int, heads: int, width: int, dtype: torch.dtype) -> Iterator[Case]:
    q, k = normal(device, batch, queries, heads, width, dtype=dtype), normal(device, batch, keys, width, dtype=dtype, seed=1)
    weights = normal(device, batch, queries, heads, seed=2)
    label = f"{batch}x{queries}x{keys}-{heads}x{width}-{str(dtype).removeprefix('torch.')}"
    exact = reference("index_scores")(q.double(), k.double(), weights.double())
    # sums of `width` products, then of `heads`
    products = q.double().abs().flatten(1, 2) @ k.double().abs().transpose(1, 2)
    bound = 2**-20 * (products.unflatten(1, (queries, heads)) * weights.double().abs()[..., None]).sum(2)
    yield Case("index_scores", label, (q, k, weights), near(exact, bound))


def selections(device: str, queries: int, keys: int, top_k: int) -> Iterator[Case]:
    """Few values and so many ties; rows of one value, of few candidates, and with scores that are no numbers."""
    generator = torch.Generator().manual_seed(0)
    scores = (2 * normal("cpu", 2, queries, keys)).round()
    scores[:, ::3] += normal("cpu", 2, queries, keys, seed=1)[:, ::3]
    mask = torch.rand(2, queries, keys, generator=generator) < 0.8
    scores[0, :1], mask[0, 1:2] = 0.0, False
    mask[0, 2:4, 3:] = False
    for value, row in ((torch.nan, 4), (torch.inf, 5), (-torch.inf, 6), (-torch.inf, 2), (-0.0, 7)):
        scores[:, row : row + 1][torch.rand(2, min(1, max(queries - row, 0)), keys, generator=generator) < 0.1] = value
    scores[1, 4:5] = torch.nan
    yield Case("index_select", f"{queries}x{keys}-top{top_k}", (scores.to(device), mask.to(device), top_k), exactly)


def near(exact: Tensor, bound: Tensor) -> Callable[[Outputs, Outputs], None]:
    """The only output as near to the float64 result as `bound`, which broadcasts."""

    def agree(got: Outputs, want: Outputs) -> None:
        assert bool(((got[0].double() - exact).abs() <= bound).all())

    return agree


def groups(device: str, counts: list[int], align: int, *, before: int = 0, after: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(starts, counts, which of all rows are of a group [R]) with so many rows before the first group and after the last."""
    starts = [before]
    for count in counts:
        starts.append(starts[-1] + -(-count // align) * align)
    of_group = torch.zeros(starts[-1] + after, dtype=torch.bool)
    for start, count in zip(starts, counts, strict=False):
        of_group[start : start + count] = True
    return torch.tensor(starts, device=device), torch.tensor(counts, dtype=torch.int64, device=device), of_group.to(device)


def products(
    device: str, counts: list[int], n: int, k: int, dtype: torch.dtype, *, align: int = 1, before: int = 0, after: int = 0
) -> Iterator[Case]:
    """Grouped GEMMs in the operands' type; rows of no group hold NaN."""
    starts, sizes, of_group = groups(device, counts, align, before=before, after=after)
    label = f"{counts}x{n}x{k}-{str(dtype).removeprefix('torch.')}"
    rows, e = len(of_group), len(counts)
    a, g = (normal(device, rows, width, dtype=dtype, seed=width) for width in (k, n))
    for rows_of in (a, g):
        rows_of[~of_group] = torch.nan
    for transposed in (False, True):
        w = normal(device, e, *((k, n) if transposed else (n, k)), dtype=dtype)
        exact = grouped_gemm._gemm_reference(a.double(), w.double(), starts, sizes, transposed)
        yield Case(
            "grouped_gemm", f"{label}-{'nn' if transposed else 'nt'}", (a, w, starts, sizes, transposed), accurate((exact,))
        )
    out = normal(device, e, n, k, seed=1)
    exact = out.double()
    grouped_gemm._weight_reference(g.double(), a.double(), starts, sizes, exact)
    yield Case("grouped_gemm_weight", label, (g, a, starts, sizes, out), accurate((exact,)))


def products_fp8(device: str, counts: list[int], n: int, k: int, *, before: int = 0, after: int = 0) -> Iterator[Case]:
    """The same block-scaled; rows of no group hold NaN, but padding is 0 where it is summed over."""
    starts, sizes, of_group = groups(device, counts, BLOCK, before=before, after=after)
    label, rows, e = f"{counts}x{n}x{k}", len(of_group), len(counts)
    a, g = (normal(device, rows, width, seed=width) for width in (k, n))
    a[~of_group] = torch.nan
    codes, scales = quantise.rows_reference(a, False)
    w_codes, w_scales = quantise._blocks_reference(normal(device, e, n, k), False)
    wide_a = quantise.dequantise_rows(codes, scales, torch.float64)
    wide_w = quantise.dequantise_blocks(w_codes, w_scales, torch.float64)
    exact = grouped_gemm._gemm_reference(wide_a, wide_w, starts, sizes, False)
    for dtype in (torch.bfloat16, torch.float32):
        args = (codes, scales, w_codes, w_scales, starts, sizes, dtype)
        yield Case("grouped_gemm_fp8", f"{label}-{str(dtype).removeprefix('torch.')}", args, accurate((exact,)))
    outside = torch.ones_like(of_group)
    outside[int(starts[0]) : int(starts[-1])] = False
    for rows_of in (a, g):
        rows_of[~of_group] = 0
        rows_of[outside] = torch.nan
    operands = *quantise.columns_reference(g, False), *quantise.columns_reference(a, False)
    wide_g, wide_a = (quantise.dequantise_columns(*pair, torch.float64) for pair in (operands[:2], operands[2:]))
    out = normal(device, e, n, k, seed=1)
    exact = out.double()
    grouped_gemm._weight_reference(wide_g, wide_a, starts, sizes, exact)
    yield Case("grouped_gemm_weight_fp8", label, (*operands, starts, sizes, out), accurate((exact,)))


def router_products(device: str, tokens: int, experts: int, width: int) -> Iterator[Case]:
    for x_dtype, w_dtype in ((torch.bfloat16, torch.float32), (torch.bfloat16,) * 2, (torch.float32,) * 2):
        x, w = normal(device, tokens, width, dtype=x_dtype), normal(device, experts, width, dtype=w_dtype, seed=1)
        label = f"{tokens}x{experts}x{width}-{'-'.join(str(d).removeprefix('torch.') for d in (x_dtype, w_dtype))}"
        yield Case("router_logits", label, (x, w), accurate((x.double() @ w.double().t(),)))


def heads(
    device: str, tokens: int, vocabulary: int, width: int, chunk: int, hidden_dtype: torch.dtype, weight_dtype: torch.dtype
) -> Iterator[Case]:
    """The LM head, a third of the rows without a label, one of these NaN; backward for one gradient, the other and both.

    Its floor is 16 bits: so many a backend on tensor cores may keep of the gradient of a logit.
    """
    h, w = normal(device, tokens, width, dtype=hidden_dtype), normal(device, vocabulary, width, dtype=weight_dtype, seed=1)
    w *= 3 / max(width, 1) ** 0.5
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    labels[::3] = lm_head.IGNORE
    h[:1] = torch.nan
    labels, temperature = labels.to(device), (torch.rand(tokens, generator=generator) + 0.5).to(device)
    dtypes = "-".join(str(d).removeprefix("torch.") for d in (hidden_dtype, weight_dtype))
    label = f"{tokens}x{vocabulary}x{width}-{chunk}-{dtypes}"
    yield Case("logits", label, (h, w), accurate((h.double() @ w.double().t(),)))
    wide = (h.double(), w.double(), labels, temperature.double())
    exact = lm_head._logprobs_reference(*wide, chunk)
    yield Case("logprobs", label, (h, w, labels, temperature, chunk), accurate(exact))
    slopes = [normal(device, tokens, seed=seed) for seed in (3, 4)]
    for name, with_logprob, with_entropy in (("logprob", 1, 0), ("entropy", 0, 1), ("both", 1, 1)):
        d = [slope if wanted else None for slope, wanted in zip(slopes, (with_logprob, with_entropy), strict=True)]
        d_logprob, d_entropy = (x if x is None else x.double() for x in d)
        results = lm_head._backward_reference(d_logprob, d_entropy, *wide, *exact[1:], chunk, True, True)
        args = (*d, h, w, labels, temperature, *(x.float() for x in exact[1:]), chunk, True, True)
        yield Case("logprobs_backward", f"{label}-{name}", args, accurate(results, 2.0**-16))


def device_cases(device: str) -> Iterator[Case]:
    """Every op at the sizes of GLM-5 and GLM-4.5-Air and at awkward ones; made one after the other."""
    bf16, f32 = torch.bfloat16, torch.float32
    few, skewed = [1, 0, 300, 127], [0, 2500, 3, 128, 0, 129]
    yield from _small(device)
    for hidden, inner, experts in ((6144, 2048, 256), (4096, 1408, 128)):
        for dtype in (bf16, f32):
            yield from quantisers(device, 1024, hidden, dtype)
            yield from movements(device, 2000, 8, experts, hidden, dtype)
            yield from swiglus(device, 1024, inner, dtype)
        yield from transposes(device, 4, 2 * inner, hidden)
        yield from sorts(device, 20000, 8, experts)
        yield from scorings(device, 3000, experts, 8)
        yield from routings(device, 3000, experts, 8, dtype=torch.uint8 if experts < 256 else torch.int16)
        yield from router_products(device, 700, experts, hidden)
        for counts in (few, skewed):
            yield from products(device, counts, 2 * inner, hidden, bf16, after=100)
            yield from products_fp8(device, counts, 2 * inner, hidden, after=1024)
            yield from products_fp8(device, counts, hidden, inner)
        yield from heads(device, 300, 151552, hidden, 128, bf16, bf16)
    yield from inspections(device, 5000, 75, 8, torch.int16)
    yield from indexes(device, 1, 256, 8192, 32, 128, bf16)
    yield from selections(device, 64, 16384, 2048)


def _small(device: str) -> Iterator[Case]:
    """Sizes that no tile fits: nothing, one row, one expert, widths of 1 and of no multiple of 16."""
    for dtype in (torch.bfloat16, torch.float32):
        yield from quantisers(device, 128, 128, dtype, awkward)
        yield from quantisers(device, 0, 128, dtype)
        yield from swiglus(device, 128, 128, dtype)
        yield from swiglus(device, 3, 5, dtype)
        for tokens, k, experts, width in ((0, 2, 4, 128), (1, 1, 1, 1), (37, 5, 7, 100), (130, 3, 16, 384)):
            yield from movements(device, tokens, k, experts, width, dtype)
        for counts, n, k in (([3, 0, 130, 70], 72, 40), ([1], 1, 1), ([0, 0], 5, 6), ([], 5, 6)):
            yield from products(device, counts, n, k, dtype, before=2, after=5)
        yield from heads(device, 5, 3, 2, 2, dtype, dtype)
        yield from indexes(device, 2, 3, 5, 2, 4, dtype)
    for counts in ([100, 0, 200], [1], [0, 0], []):
        yield from products_fp8(device, counts, 128, 256, before=128, after=128)
    for tokens, experts, k in ((0, 8, 2), (1, 1, 1), (19, 10, 3)):
        yield from sorts(device, tokens, k, experts)
        yield from scorings(device, tokens, experts, k)
        yield from routings(device, tokens, experts, k)
        yield from router_products(device, tokens, experts, 7)
    yield from routings(device, 50, 32, 4, 8, 3, torch.int64)
    yield from inspections(device, 9, 3, 2, torch.uint8)
    yield from selections(device, 9, 40, 7)
