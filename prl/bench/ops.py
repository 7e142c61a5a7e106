"""`python -m prl.bench`: each kernel beside the best plain-torch way to do the same, one thread, on this CPU.

Legend as in the ops' modules: T tokens, K experts per token, E experts, R rows, D hidden width, I inner width, V vocabulary.
Both sides take turns; a ratio is plain / ours of one turn, and the row shows the median with its quartiles.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from prl.bench.machine import CpuTimes, Load, calibrate, facts, reasons, share_of_others
from prl.bench.rows import Goal, Result, Row, quartiles
from prl.bench.runs import BenchError, say
from prl.config.load import ConfigError, Problem
from prl.kernels.experts import experts
from prl.kernels.grouped_gemm import grouped_gemm, grouped_gemm_fp8, grouped_gemm_weight
from prl.kernels.indexer import index_scores, index_select
from prl.kernels.lm_head import logprobs
from prl.kernels.permute import combine, permute_quantise, sort_rows
from prl.kernels.quantise import dequantise_blocks, dequantise_rows, quantise_blocks, quantise_both
from prl.kernels.registry import backend_of
from prl.kernels.router import RouteError, check_routes, route
from prl.kernels.swiglu import swiglu

BF16 = torch.bfloat16
Way = Callable[[], object]
SECONDS = 0.35
"""Of each way, at least; two turns at the least."""


@dataclass(frozen=True)
class Case:
    """One op at one shape: ours, and the plain-torch ways of which the fastest counts."""

    op: str
    shape: str
    ours: Way
    plain: dict[str, Way]
    flops: float = 0
    bytes: float = 0
    goal: float | None = None
    uses: tuple[str, ...] = ()
    """The kernels in it, where they are others than `op`."""

    @property
    def name(self) -> str:
        return f"{self.op} [{self.shape}]"


def cases() -> Iterator[Case]:
    """Made one after the other, so that only one case's tensors exist at a time."""
    torch.manual_seed(0)
    for e, k, n, rows in (
        *((64, 1024, 1024, r) for r in (4, 8, 16, 32, 256)),
        (256, 512, 512, 16),
        (16, 2048, 2816, 32),
        (16, 128, 256, 256),
    ):
        yield _gemm(e, k, n, rows)
    yield _gemm_weight(64, 1024, 1024, 32)
    yield _gemm_fp8(64, 1024, 1024, 32)
    for t, k, e, d in ((1024, 8, 128, 2048), (8192, 4, 16, 128)):
        yield _permute_quantise(t, k, e, d)
        yield _combine(t, k, e, d)
    for t, k, e in ((2048, 8, 256), (8192, 8, 256), (8192, 4, 16)):
        yield _router(t, k, e)
        yield _replay(t, k, e)
    yield _quantise(1024, 4096)
    yield _swiglu(4096, 1024)
    yield _indexer(256, 2048, 8, 64, 256)
    yield _lm_head(1024, 512, 16384)
    yield _experts(1024, 4, 16, 512, 512)


def _skewed(n: int, e: int) -> tuple[Tensor, Tensor]:
    """Starts and counts of n·e rows, from none to several times the mean, as a router gives them."""
    share = torch.distributions.Dirichlet(torch.full((e,), 2.0)).sample()
    counts = (share * n * e).long()
    counts[0] += n * e - counts.sum()
    if e > 8:
        counts[1], counts[2] = 0, counts[1] + counts[2]
    return F.pad(counts.cumsum(0), (1, 0)), counts


def _groups(starts: Tensor, counts: Tensor) -> list[tuple[int, slice]]:
    return [(e, slice(s, s + c)) for e, (s, c) in enumerate(zip(starts.tolist(), counts.tolist(), strict=False)) if c]


def _gemm(e: int, k: int, n: int, rows: int) -> Case:
    starts, counts = _skewed(rows, e)
    a, w = torch.randn(rows * e, k).to(BF16), (torch.randn(e, n, k) / k**0.5).to(BF16)
    out, spans, ends = a.new_empty(len(a), n), _groups(starts, counts), starts[1:].to(torch.int32)

    def loop() -> None:
        for i, span in spans:
            torch.mm(a[span], w[i].t(), out=out[span])

    goal = 1.3 if 4 <= rows <= 32 else 0.9
    return Case(
        "grouped_gemm",
        f"bf16, {e} experts x {rows} rows, K {k}, N {n}",
        lambda: grouped_gemm(a, w, starts, counts),
        {"a loop of mm": loop, "torch._grouped_mm": lambda: torch._grouped_mm(a, w.transpose(1, 2), offs=ends)},
        flops=2.0 * len(a) * k * n,
        goal=goal,
    )


def _gemm_weight(e: int, k: int, n: int, rows: int) -> Case:
    starts, counts = _skewed(rows, e)
    g, a = torch.randn(rows * e, n).to(BF16), torch.randn(rows * e, k).to(BF16)
    out, spans = torch.zeros(e, n, k), _groups(starts, counts)

    def loop() -> None:
        for i, span in spans:
            out[i] += g[span].t() @ a[span]

    return Case(
        "grouped_gemm_weight",
        f"bf16, {e} experts x {rows} rows, K {k}, N {n}",
        lambda: grouped_gemm_weight(g, a, starts, counts, out),
        {"a loop of mm": loop},
        flops=2.0 * len(a) * k * n,
        goal=1.3,
    )


def _gemm_fp8(e: int, k: int, n: int, rows: int) -> Case:
    ids = torch.arange(rows * e)[:, None] % e
    source, position, starts, counts = sort_rows(ids, e, align=128)
    x, w = torch.randn(rows * e, k).to(BF16), (torch.randn(e, n, k) / k**0.5).to(BF16)
    codes, scales, _, _ = permute_quantise(x, source, position, columns=False)
    w_codes, w_scales = quantise_blocks(w)
    spans = _groups(starts, counts)

    def dequantised() -> Tensor:
        a = dequantise_rows(codes, scales).to(BF16)
        out = a.new_zeros(len(a), n)
        for i, span in spans:
            torch.mm(a[span], dequantise_blocks(w_codes[i : i + 1], w_scales[i : i + 1])[0].to(BF16).t(), out=out[span])
        return out

    return Case(
        "grouped_gemm_fp8",
        f"{e} experts x {rows} rows, K {k}, N {n}",
        lambda: grouped_gemm_fp8(codes, scales, w_codes, w_scales, starts, counts),
        {"dequantise, a loop of mm": dequantised},
        flops=2.0 * rows * e * k * n,
    )


def _plain_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.float().unflatten(1, (-1, 128))
    scale = x.abs().amax(-1, keepdim=True).clamp_(min=1e-30) / 448
    return (x / scale).clamp_(-448, 448).to(torch.float8_e4m3fn).flatten(1), scale[..., 0]


def _permute_quantise(t: int, k: int, e: int, d: int) -> Case:
    x = torch.randn(t, d).to(BF16)
    source, position, *_ = sort_rows(_distinct(t, k, e), e, align=128)

    def plain() -> object:
        rows = x.index_select(0, source.clamp(min=0) // k)
        rows.masked_fill_((source < 0)[:, None], 0)
        return _plain_quantise(rows), _plain_quantise(rows.t().contiguous())

    return Case(
        "permute_quantise",
        f"T {t}, K {k}, E {e}, D {d}, rows and columns",
        lambda: permute_quantise(x, source, position, columns=True),
        {"index_select, then torch": plain},
        bytes=len(source) * d * 4.0,
        goal=3,
    )


def _distinct(t: int, k: int, e: int) -> Tensor:
    return torch.rand(t, e).argsort(-1)[:, :k].contiguous()


def _combine(t: int, k: int, e: int, d: int) -> Case:
    source, position, *_ = sort_rows(_distinct(t, k, e), e)
    rows, weights = torch.randn(len(source), d).to(BF16), torch.rand(t, k)
    token = source // k
    weight_R = weights.flatten()[source][:, None]

    def scatter() -> Tensor:
        return torch.zeros(t, d).index_add_(0, token, rows * weight_R).to(BF16)

    def gather() -> Tensor:
        return (rows.index_select(0, position.flatten()).view(t, k, d) * weights[..., None]).sum(1).to(BF16)

    def bag() -> Tensor:
        return F.embedding_bag(position, rows.float(), mode="sum", per_sample_weights=weights).to(BF16)

    return Case(
        "combine",
        f"T {t}, K {k}, E {e}, D {d}",
        lambda: combine(rows, weights, source, position),
        {"index_add_": scatter, "index_select, sum": gather, "embedding_bag": bag},
        bytes=len(source) * d * 2.0 + t * d * 2.0,
        goal=3,
    )


def _router(t: int, k: int, e: int) -> Case:
    """From logits to ids, weights and counts."""
    logits, bias = torch.randn(t, e), torch.randn(e) / 10

    def plain() -> object:
        scores = logits.sigmoid()
        ids = (scores + bias).topk(k, dim=-1, sorted=False).indices
        weights = scores.gather(1, ids)
        return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20), torch.bincount(ids.flatten(), minlength=e)

    return Case(
        "route",
        f"T {t}, E {e}, K {k}, sigmoid",
        lambda: route(logits, bias, None, None, None, scoring="sigmoid", top_k=k),
        {"sigmoid, topk, gather, bincount": plain},
        bytes=t * e * 4.0 + t * k * 12.0,
        goal=3,
    )


def _replay(t: int, k: int, e: int) -> Case:
    """Recorded ids, validated, with the weights that the logits give them, and counts."""
    logits, recorded = torch.randn(t, e), _distinct(t, k, e).to(torch.uint8)

    def ours() -> object:
        check_routes(recorded[:, None], None, e)
        return route(logits, None, recorded, None, None, scoring="sigmoid", top_k=k)

    def plain(twice: Callable[[], Tensor]) -> object:
        if int(recorded.amax()) >= e or bool(twice()):
            raise RouteError
        ids = recorded.long()
        weights = logits.gather(1, ids).sigmoid_()
        return weights / (weights.sum(-1, keepdim=True) + 1e-20), torch.bincount(ids.flatten(), minlength=e)

    def by_sorting() -> Tensor:
        ordered = recorded.sort(-1).values
        return (ordered[:, 1:] == ordered[:, :-1]).any()

    def in_pairs() -> Tensor:
        by_slot = recorded.t().contiguous()
        return torch.stack([(by_slot[d:] == by_slot[:-d]).any() for d in range(1, k)]).any()

    return Case(
        "route, replayed",
        f"T {t}, E {e}, K {k}, sigmoid",
        ours,
        {"sort, compare, gather, bincount": lambda: plain(by_sorting), "pairs, gather, bincount": lambda: plain(in_pairs)},
        bytes=t * k * 18.0,
        goal=3,
        uses=("inspect_routes", "route"),
    )


def _quantise(m: int, k: int) -> Case:
    x = torch.randn(m, k).to(BF16)
    return Case(
        "quantise_both",
        f"{m} x {k}",
        lambda: quantise_both(x),
        {"torch, twice": lambda: (_plain_quantise(x), _plain_quantise(x.t().contiguous()))},
        bytes=m * k * 4.0,
    )


def _swiglu(r: int, i: int) -> Case:
    x = torch.randn(r, 2 * i).to(BF16)
    return Case(
        "swiglu",
        f"{r} x {i}, bf16",
        lambda: swiglu(x),
        {"silu, mul": lambda: F.silu(x[:, :i]) * x[:, i:]},
        bytes=r * i * 6.0,
    )


def _indexer(q: int, s: int, h: int, d: int, top_k: int) -> Case:
    queries, keys, weights = torch.randn(1, q, h, d).to(BF16), torch.randn(1, s, d).to(BF16), torch.rand(1, q, h)
    mask = (torch.arange(s) <= torch.arange(s - q, s)[:, None])[None]

    def plain() -> Tensor:
        scores = ((queries.flatten(1, 2) @ keys.transpose(1, 2)).float().relu().view(1, q, h, s) * weights[..., None]).sum(2)
        kept = scores.masked_fill(~mask, -torch.inf).topk(top_k, dim=-1, sorted=False).indices
        return torch.zeros_like(mask).scatter_(-1, kept, True) & mask

    return Case(
        "index_scores, index_select",
        f"{q} queries, {s} keys, {h} heads x {d}, {top_k} kept",
        lambda: index_select(index_scores(queries, keys, weights), mask, top_k),
        {"matmul, relu, sum, topk (ties anyhow)": plain},
        flops=2.0 * q * s * h * d,
        uses=("index_scores", "index_select"),
    )


def _lm_head(t: int, d: int, v: int, device: str = "cpu") -> Case:
    hidden = torch.randn(t, d).to(BF16).requires_grad_()
    weight = (torch.randn(v, d) / d**0.5).to(BF16).requires_grad_()
    labels = torch.randint(v, (t,))

    def run(both: Callable[[], tuple[Tensor, Tensor]]) -> None:
        logprob, entropy = both()
        torch.autograd.grad(logprob.sum() + 0.1 * entropy.sum(), (hidden, weight))

    def whole() -> tuple[Tensor, Tensor]:
        log_p = F.linear(hidden, weight).float().log_softmax(-1)
        return log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    return Case(
        "logprobs",
        f"T {t}, D {d}, V {v}, bf16, entropy, forward and backward",
        lambda: run(lambda: logprobs(hidden, weight, labels, 1.0, chunk=256)),
        {"all logits": lambda: run(whole)},
        flops=8.0 * t * d * v,
        goal=1.5,
    )


def _experts(t: int, k: int, e: int, d: int, i: int) -> Case:
    x = torch.randn(t, d).to(BF16).requires_grad_()
    ids, weights = _distinct(t, k, e), torch.rand(t, k).requires_grad_()
    gate_up = (torch.randn(e, 2 * i, d) / d**0.5).to(BF16).requires_grad_()
    down = (torch.randn(e, d, i) / i**0.5).to(BF16).requires_grad_()
    leaves = (x, weights, gate_up, down)

    def plain() -> Tensor:
        """As transformers does it: a loop over the experts, index_add_."""
        out = torch.zeros(t, d, dtype=BF16)
        for j in range(e):
            token, slot = (ids == j).nonzero(as_tuple=True)
            gate, up = F.linear(x[token], gate_up[j]).chunk(2, -1)
            part = F.linear(F.silu(gate) * up, down[j]) * weights[token, slot, None]
            out = out.index_add(0, token, part.to(BF16))
        return out

    return Case(
        "experts",
        f"T {t}, K {k}, E {e}, D {d}, I {i}, bf16, forward and backward",
        lambda: torch.autograd.grad(experts(x, ids, weights, gate_up, down).sum(), leaves),
        {"a loop over experts": lambda: torch.autograd.grad(plain().sum(), leaves)},
        flops=3 * 6.0 * t * k * d * i,
        uses=("sort_rows", "permute", "grouped_gemm", "swiglu", "combine"),
    )


def timed(ways: Sequence[Way], seconds: float = SECONDS) -> list[list[float]]:
    """Seconds of each way, turn by turn, after one turn that does not count."""
    for way in ways:
        way()
    out: list[list[float]] = [[] for _ in ways]
    start = time.perf_counter()
    while len(out[0]) < 3 or (time.perf_counter() - start < seconds * len(ways) and len(out[0]) < 200):
        for taken, way in zip(out, ways, strict=True):
            t0 = time.perf_counter()
            way()
            taken.append(time.perf_counter() - t0)
    return out


def compare(case: Case, peak_flops: float, peak_bytes: float) -> Row:
    say(case.name)
    names = list(case.plain)
    ours, *others = timed([case.ours, *case.plain.values()])
    best = min(range(len(names)), key=lambda i: statistics.median(others[i]))
    ratios = [b / a for a, b in zip(ours, others[best], strict=True)]
    seconds, uses = statistics.median(ours), case.uses or (case.op,)
    figure, unit, peak = (case.flops, "GFLOP/s", peak_flops) if case.flops else (case.bytes, "GB/s", peak_bytes)
    return Row(
        name=case.name,
        value=figure / seconds / 1e9,
        unit=f"{unit}, {figure / seconds / peak:.0%} of peak",
        ratio=statistics.median(ratios),
        ratio_quartiles=quartiles(ratios),
        against=names[best],
        goal=None if case.goal is None else Goal(least=case.goal),
        about={"op": case.op, "shape": case.shape, "backend": ", ".join(sorted({backend_of(u) for u in uses}))},
    )


def peaks() -> tuple[float, float]:
    """(FLOP/s of the best bf16 or float32 product, bytes/s of a copy), measured on one thread."""
    products = [torch.randn(1024, 1024).to(dtype) for dtype in (BF16, torch.float32)]
    source = torch.randn(32 << 20)
    into = torch.empty_like(source)
    *mm, copy = timed([*(lambda a=a: torch.mm(a, a) for a in products), lambda: into.copy_(source)])
    return 2.0 * 1024**3 / min(min(t) for t in mm), 2.0 * source.numel() * 4 / min(copy)


MEMORY_NAME = "logprobs: peak memory [T 2048, D 256, V 32768, bf16]"
MEMORY = """
import re, sys
from pathlib import Path
import torch
from prl.bench.ops import _lm_head
torch.set_num_threads(1)
way = lambda case: case.ours if sys.argv[1] == "ours" else case.plain["all logits"]
way(_lm_head(8, 32, 64))()  # what the first use of autograd loads is neither's
way = way(_lm_head(2048, 256, 32768))
Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
status = lambda key: int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = status("VmRSS")
way()
print(status("VmHWM") - before)
"""


def lm_head_memory() -> Row:
    """Peak memory that the LM head adds, in a process of its own for each way, since a peak never goes down."""
    say(MEMORY_NAME)
    kib = {}
    for way in ("ours", "plain"):
        done = subprocess.run([sys.executable, "-c", MEMORY, way], capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchError(f"{MEMORY_NAME}: {done.stderr.strip().rpartition(chr(10))[2]}")
        kib[way] = int(done.stdout)
    return Row(
        name=MEMORY_NAME,
        value=kib["ours"] / 1024,
        unit="MiB",
        ratio=kib["ours"] / kib["plain"],
        against="all logits",
        goal=Goal(most=0.1),
        timed=False,
        about={"op": "logprobs", "shape": "T 2048, D 256, V 32768", "backend": backend_of("logprobs")},
    )


def measure(only: str = "") -> Result:
    """All cases whose name has `only` in it. ConfigError where none has."""
    load: Load = calibrate()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    before = CpuTimes.now()
    try:
        peak_flops, peak_bytes = peaks()
        rows, names = [], [MEMORY_NAME]
        for case in cases():
            names.append(case.name)
            if only in case.name:
                rows.append(compare(case, peak_flops, peak_bytes))
    finally:
        torch.set_num_threads(threads)
    if only in MEMORY_NAME:
        rows.append(lm_head_memory())
    if not rows:
        found = Problem("--only", f"expected a part of a row's name, got {only!r}; there are:\n    " + "\n    ".join(names))
        raise ConfigError("command line", [found])
    others = share_of_others(before, CpuTimes.now())
    return Result(
        "ops",
        rows,
        facts(),
        {"others": load.others, "spread": load.spread, "others during": others},
        reasons(load, [("the measurement", others)]),
        settings={"threads": 1, "seconds per way": SECONDS},
        details={"peak GFLOP/s": peak_flops / 1e9, "peak GB/s of a copy": peak_bytes / 1e9},
    )
