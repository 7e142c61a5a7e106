"""`python -m prl.bench gpu`: correctness and speed of every kernel on one GPU, at GLM-5's sizes, within a budget of time.

Imports torch, triton, NumPy and the standard library only, so that it runs on a node where nothing else can be installed.
Legend: T tokens, K experts per token, E local experts, R rows, D hidden width, I inner width.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prl.bench.output import refusal
from prl.kernels import registry
from prl.kernels.experts import experts
from prl.kernels.grouped_gemm import grouped_gemm, grouped_gemm_fp8, grouped_gemm_weight_fp8
from prl.kernels.indexer import index_scores, index_select
from prl.kernels.lm_head import logprobs
from prl.kernels.numerics import BLOCK
from prl.kernels.permute import combine, permute_quantise, sort_rows
from prl.kernels.quantise import quantise_both, quantise_rows
from prl.kernels.router import route, router_logits
from prl.kernels.swiglu import swiglu_backward_quantise, swiglu_quantise
from prl.kernels.weights import quantised

FP8_PEAK = 1979.0
"""TFLOPS of dense FP8 on H100 and H200 SXM (NVIDIA's data sheet)."""
FP8_OVER_BF16 = 2.0
"""The ceiling that is worth comparing with: twice what bf16 reaches here, since the tensor cores do twice as much."""
BF16 = torch.bfloat16
FLUSH_BYTES = 256 << 20
Run = Callable[[], object]


@dataclass(frozen=True)
class Size:
    """GLM-5's MoE layer on one rank of 8 (hidden 6144, inner 2048, 256 experts, top 8)."""

    tokens: int = 32768
    top_k: int = 8
    experts: int = 32
    hidden: int = 6144
    inner: int = 2048
    routed: int = 256
    """Experts that the router chooses among."""
    vocabulary: int = 154880
    head_tokens: int = 4096
    index_queries: int = 512
    index_keys: int = 16384
    index_heads: int = 32
    index_width: int = 128
    index_kept: int = 2048


@dataclass
class Row:
    op: str
    shape: str
    backend: str
    seconds: float
    tflops: float | None = None
    gbs: float | None = None
    of_peak: float | None = None
    """Share of 1979 TFLOPS."""
    of_ceiling: float | None = None
    """Share of twice the bf16 rate, or of the copy's rate, measured in this run."""
    ratio: float | None = None
    """Seconds of `against` / seconds of ours."""
    against: str = ""
    goal: str = ""
    met: bool | None = None

    def as_dict(self) -> dict[str, Any]:
        """As the other benches' rows, with all figures besides."""
        figures = [(v, unit) for v, unit in ((self.tflops, "TFLOPS"), (self.gbs, "GB/s")) if v is not None]
        value, unit = figures[0] if figures else (self.seconds * 1e3, "ms")
        verdict = None if self.met is None else "met" if self.met else "missed"
        return {"name": f"{self.op} [{self.shape}]", "value": value, "unit": unit, "verdict": verdict, **asdict(self)}


class Clock:
    """Median seconds of a run; on a GPU with the L2 cache flushed before each."""

    def __init__(self, device: str):
        self.gpu = torch.device(device).type == "cuda"
        self.flush = torch.empty(FLUSH_BYTES if self.gpu else 1, dtype=torch.uint8, device=device)

    def __call__(self, run: Run, seconds: float = 0.5) -> float:
        for _ in range(3 if self.gpu else 1):
            run()
        taken: list[float] = []
        until = time.monotonic() + seconds
        while len(taken) < (5 if self.gpu else 1) or (time.monotonic() < until and len(taken) < 50):
            self.flush.zero_()
            taken.append(self._once(run))
        return statistics.median(taken)

    def _once(self, run: Run) -> float:
        if not self.gpu:
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


class Bench:
    """Rows of figures, one kernel after the other."""

    def __init__(self, size: Size, device: str = "cuda", square: int = 8192, copied: int = 1 << 30):
        self.size, self.device, self.clock = size, device, Clock(device)
        self.shape = f"T {size.tokens}, E {size.experts}, D {size.hidden}, I {size.inner}"
        torch.manual_seed(0)
        a = self.normal(square, square)
        self.bf16_flops = 2.0 * square**3 / self.clock(lambda: a @ a)
        source = torch.empty(copied, dtype=torch.uint8, device=device)
        into = torch.empty_like(source)
        self.copy_bytes = 2.0 * copied / self.clock(lambda: into.copy_(source))

    def normal(self, *shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=self.device) * std).to(BF16)

    def choices(self, tokens: int, experts: int, k: int) -> Tensor:
        return torch.rand(tokens, experts, device=self.device).argsort(-1)[:, :k].contiguous()

    def gemm(
        self, op: str, shape: str, run: Run, flops: float, goal: float | None = None, other: tuple[str, Run] | None = None
    ) -> Row:
        seconds = self.clock(run)
        row = Row(op, shape, registry.backend_of(op, self.device), seconds, tflops=flops / seconds / 1e12)
        row.of_peak = flops / seconds / 1e12 / FP8_PEAK
        row.of_ceiling = flops / seconds / self.bf16_flops / (FP8_OVER_BF16 if "fp8" in op else 1.0)
        if goal is not None:
            row.goal, row.met = f">= {goal:g} TFLOPS", flops / seconds / 1e12 >= goal
        if other is not None:
            name, theirs = other
            try:
                row.ratio, row.against = self.clock(theirs) / seconds, name
            except Exception as e:  # a peer that does not run here is named, and stops nothing
                row.against = f"{name}: {type(e).__name__}"
        return row

    def moved(self, op: str, shape: str, run: Run, nbytes: float, goal: float | None = None) -> Row:
        seconds = self.clock(run)
        row = Row(op, shape, registry.backend_of(op, self.device), seconds, gbs=nbytes / seconds / 1e9)
        row.of_ceiling = nbytes / seconds / self.copy_bytes
        if goal is not None:
            row.goal, row.met = f">= {goal:.0%} of a copy", row.of_ceiling >= goal
        return row

    def rows(self) -> Iterator[Row]:
        yield from self.layer()
        yield from self.bf16()
        yield from self.router()
        yield self.lm_head()
        yield from self.indexer()

    def layer(self) -> Iterator[Row]:
        """The FP8 expert layer kernel by kernel, in the order of its forward and backward, then as a whole."""
        s, shape = self.size, self.shape
        ids = self.choices(s.tokens, s.experts, s.top_k)
        weights = torch.rand(s.tokens, s.top_k, device=self.device)
        source, position, starts, counts = sort_rows(ids, s.experts, align=BLOCK)
        x = self.normal(s.tokens, s.hidden)
        gate_up = self.normal(s.experts, 2 * s.inner, s.hidden, std=s.hidden**-0.5)
        down = self.normal(s.experts, s.hidden, s.inner, std=s.inner**-0.5)
        up, dn, n = quantised(gate_up), quantised(down), len(source)
        flops = 2.0 * s.tokens * s.top_k * 2 * s.inner * s.hidden

        def gemm(label: str, a: tuple[Tensor, Tensor], w: tuple[Tensor, Tensor], flops: float) -> tuple[Row, Tensor]:
            def run() -> Tensor:
                return grouped_gemm_fp8(*a, *w, starts, counts)

            peer = _deep_gemm(a, w, source, starts, counts)
            return self.gemm("grouped_gemm_fp8", f"{label}, {shape}", run, flops, 1250, peer), run()

        def weight_gemm(label: str, g: tuple[Tensor, Tensor], a: tuple[Tensor, Tensor], flops: float) -> Row:
            into = torch.zeros(s.experts, len(g[0]), len(a[0]), device=self.device)
            run = functools.partial(grouped_gemm_weight_fp8, *g, *a, starts, counts, into)
            return self.gemm("grouped_gemm_weight_fp8", f"weight gradient, {label}, {shape}", run, flops, 900)

        yield self.moved("quantise_rows", f"[{s.tokens}, {s.hidden}]", lambda: quantise_rows(x), x.numel() * 3.0, 0.85)
        yield self.moved("quantise_both", f"[{s.tokens}, {s.hidden}]", lambda: quantise_both(x), x.numel() * 4.0, 0.85)
        sort = functools.partial(sort_rows, ids, s.experts, align=BLOCK)
        yield self.moved("sort_rows", shape, sort, ids.numel() * 24.0)
        permuted = functools.partial(permute_quantise, x, source, position, columns=True)
        yield self.moved("permute_quantise", shape, permuted, x.numel() * 2.0 + n * s.hidden * 2.0)
        codes, scales, columns, column_scales = permuted()
        row, gate_up_RJ = gemm("forward, gate and up", (codes, scales), up.plain, flops)
        gemms = [row]
        yield row
        act = functools.partial(swiglu_quantise, gate_up_RJ, columns=False)
        yield self.moved("swiglu_quantise", shape, act, n * s.inner * 5.0)
        row, out_RD = gemm("forward, down", act()[:2], dn.plain, flops / 2)
        gemms.append(row)
        yield row
        summed = functools.partial(combine, out_RD, weights, source, position)
        yield self.moved("combine", shape, summed, n * s.hidden * 2.0 + x.numel() * 2.0)

        row, d_act_RI = gemm("input gradient, down", (codes, scales), dn.transposed, flops / 2)
        gemms.append(row)
        yield row
        weights_R = torch.where(source < 0, 0, weights.flatten()[source.clamp(min=0)])
        backward = functools.partial(swiglu_backward_quantise, gate_up_RJ, d_act_RI, weights_R)
        yield self.moved("swiglu_backward_quantise", shape, backward, n * s.inner * 11.0)
        d, d_scales, d_columns, d_column_scales, a_columns, a_column_scales, _ = backward()
        row, _ = gemm("input gradient, gate and up", (d, d_scales), up.transposed, flops)
        gemms.append(row)
        yield row
        for label, g, a, of in (
            ("gate and up", (d_columns, d_column_scales), (columns, column_scales), flops),
            ("down", (columns, column_scales), (a_columns, a_column_scales), flops / 2),
        ):
            gemms.append(weight_gemm(label, g, a, of))
            yield gemms[-1]

        leaves = [t.detach().requires_grad_() for t in (x, weights, gate_up, down)]
        grad = torch.randn_like(x)

        def whole() -> None:
            y = experts(leaves[0], ids, leaves[1], leaves[2], leaves[3], precision="fp8")
            torch.autograd.grad(y, leaves, grad)

        seconds = self.clock(whole)
        row = Row("experts in FP8", f"forward and backward, {shape}", "", seconds, tflops=4.5 * flops / 1e12 / seconds)
        row.ratio, row.against, row.goal = seconds / sum(g.seconds for g in gemms), "the sum of its GEMMs", "<= 1.25"
        row.met = row.ratio <= 1.25
        yield row

    def bf16(self) -> Iterator[Row]:
        s = self.size
        tokens = min(s.tokens, 4096)
        _, _, starts, counts = sort_rows(self.choices(tokens, s.experts, s.top_k), s.experts)
        a, w = self.normal(tokens * s.top_k, s.hidden), self.normal(s.experts, 2 * s.inner, s.hidden)
        ends = starts[1:].to(torch.int32)
        peer = ("torch._grouped_mm", lambda: torch._grouped_mm(a, w.transpose(1, 2), offs=ends))
        run = functools.partial(grouped_gemm, a, w, starts, counts)
        flops = 2.0 * a.numel() * 2 * s.inner
        yield self.gemm("grouped_gemm", f"bf16, {len(a)} rows, E {s.experts}", run, flops, other=peer)

    def router(self) -> Iterator[Row]:
        s = self.size
        x, weight = self.normal(s.tokens, s.hidden), torch.randn(s.routed, s.hidden, device=self.device)
        logits = functools.partial(router_logits, x, weight)
        yield self.gemm("router_logits", f"T {s.tokens}, D {s.hidden}, E {s.routed}", logits, 2.0 * x.numel() * s.routed)
        given, bias = logits(), torch.randn(s.routed, device=self.device)
        recorded = self.choices(s.tokens, s.routed, s.top_k).to(torch.int16)
        for label, ids, read in (("", None, given.numel() * 4.0), (", replayed", recorded, recorded.numel() * 6.0)):
            run = functools.partial(route, given, bias, ids, None, None, scoring="sigmoid", top_k=s.top_k)
            yield self.moved("route", f"T {s.tokens}, E {s.routed}, K {s.top_k}{label}", run, read + recorded.numel() * 12.0)

    def lm_head(self) -> Row:
        s = self.size
        hidden = self.normal(s.head_tokens, s.hidden).requires_grad_()
        head = self.normal(s.vocabulary, s.hidden, std=s.hidden**-0.5).requires_grad_()
        labels = torch.randint(s.vocabulary, (s.head_tokens,), device=self.device)

        def run() -> None:
            logprob, entropy = logprobs(hidden, head, labels, 1.0, chunk=s.head_tokens)
            torch.autograd.grad(logprob.sum() + entropy.sum(), (hidden, head))

        shape = f"T {s.head_tokens}, D {s.hidden}, V {s.vocabulary}, forward and backward"
        return self.gemm("logprobs", shape, run, 8.0 * s.head_tokens * s.vocabulary * s.hidden)

    def indexer(self) -> Iterator[Row]:
        s = self.size
        q = self.normal(1, s.index_queries, s.index_heads, s.index_width)
        keys = self.normal(1, s.index_keys, s.index_width)
        mix = torch.rand(1, s.index_queries, s.index_heads, device=self.device)
        shape = f"{s.index_queries} queries, {s.index_keys} keys"
        scores = functools.partial(index_scores, q, keys, mix)
        yield self.gemm("index_scores", f"{shape}, {s.index_heads} heads", scores, 2.0 * q.numel() * s.index_keys)
        found = scores()
        select = functools.partial(index_select, found, torch.ones_like(found, dtype=torch.bool), s.index_kept)
        yield self.moved("index_select", f"{shape}, {s.index_kept} kept", select, found.numel() * 6.0)


def _deep_gemm(
    a: tuple[Tensor, Tensor], w: tuple[Tensor, Tensor], source: Tensor, starts: Tensor, counts: Tensor
) -> tuple[str, Run] | None:
    """DeepGEMM's grouped GEMM on the same operands, where it is installed."""
    if importlib.util.find_spec("deep_gemm") is None:
        return None
    deep_gemm = importlib.import_module("deep_gemm")
    rows = torch.arange(len(source), device=source.device)
    layout = torch.searchsorted(starts[1:], rows, right=True).clamp(max=len(counts) - 1).to(torch.int32)
    layout = torch.where(source < 0, -1, layout)
    scales = deep_gemm.get_mn_major_tma_aligned_tensor(a[1].t().contiguous())
    out = torch.empty(len(source), w[0].shape[1], dtype=BF16, device=source.device)
    return "DeepGEMM", lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a[0], scales), w, out, layout)


def verify(device: str, until: float) -> tuple[int, list[str]]:
    """(cases that agree with the reference, what does not) of every op on its chosen backend, until the time is up."""
    from prl.bench.cases import check, device_cases

    ops = {op: registry.choose(op, device) for op in registry.backends(device)}
    good, bad = 0, []
    for case in device_cases(device):
        if time.monotonic() > until:
            bad.append(f"the time was up before {case}")
            break
        try:
            check(case, ops)
            good += 1
        except Exception as e:  # every op is to be heard
            bad.append(f"{case}: {type(e).__name__}: {e}")
    return good, bad


def table(rows: list[Row]) -> str:
    def shown(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    lines = [f"{'op':26} {'ms':>9} {'TFLOPS':>7} {'of 1979':>7} {'GB/s':>6} {'of ceiling':>10}  ratio, goal"]
    for r in rows:
        figures = (shown(r.tflops, ".0f"), shown(r.of_peak, ".0%"), shown(r.gbs, ".0f"), shown(r.of_ceiling, ".0%"))
        line = "{:26} {:9.3f} {:>7} {:>7} {:>6} {:>10}".format(r.op, r.seconds * 1e3, *figures)
        ratio = "" if not r.against else f"  {shown(r.ratio, '.2f')} {r.against}"
        goal = "" if r.met is None else f"  {r.goal}: {'met' if r.met else 'MISSED'}"
        lines.append(f"{line}{ratio}{goal}\n    {r.shape} {r.backend}")
    return "\n".join(lines)


def main(args: list[str]) -> int:
    """0: everything agreed and every goal was met; 1: something did not; 2: no GPU."""
    parser = argparse.ArgumentParser(prog="python -m prl.bench gpu", description=__doc__)
    parser.add_argument("--budget", type=float, default=240, metavar="SECONDS", help="stop in time (default 240)")
    parser.add_argument("--json", metavar="FILE", help="write the result there too")
    parser.add_argument("--tokens", type=int, default=Size.tokens, help="tokens of the timed layer")
    given = parser.parse_args(args)
    if given.budget <= 0 or given.tokens < 1:
        parser.error("--budget and --tokens must be above 0")
    if why := refusal(given.json):
        parser.error(why)
    if why := registry.no_gpu():
        print(f"python -m prl.bench gpu: {why}; `python -m prl.bench` measures this CPU", file=sys.stderr)
        return 2
    start = time.monotonic()
    for op, backend, state in registry.status("cuda"):
        if state not in ("chosen", "available"):
            print(f"{op} on {backend}: {state}")
    good, bad = verify("cuda", start + 0.45 * given.budget)
    print(f"{good} cases agree with the reference", *(f"\nDIFFERS {b}" for b in bad), flush=True)
    bench, rows, late = Bench(Size(tokens=given.tokens)), [], False
    for row in bench.rows():
        rows.append(row)
        print(f"{time.monotonic() - start:6.1f} s  {row.op}", flush=True)
        late = time.monotonic() - start > given.budget
        if late:
            bad.append(f"the time was up after {row.op}")
            break
    print(table(rows))
    result: dict[str, Any] = {
        "bench": "gpu",
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {"gpu": torch.cuda.get_device_name(), "versions": {"torch": torch.__version__}},
        "agree": good,
        "differ": bad,
        "bf16 TFLOPS": bench.bf16_flops / 1e12,
        "copy GB/s": bench.copy_bytes / 1e9,
        "rows": [r.as_dict() for r in rows],
    }
    if given.json:
        Path(given.json).write_text(json.dumps(result, indent=2) + "\n")
    return 1 if bad or any(r.met is False for r in rows) else 0
