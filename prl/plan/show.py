"""A plan as tables of plain text, for the terminal and for docs/plan.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prl.plan.memory import CATEGORIES
from prl.plan.plan import Plan
from prl.plan.search import best
from prl.plan.work import Times


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  " + "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


def size(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n < 1000 or unit == "TB":
            return f"{n:.3g} {unit}" if unit != "GB" else f"{n:.1f} GB"
        n /= 1000
    raise AssertionError


def seconds(s: float) -> str:
    return f"{s / 60:.2f} min" if s >= 60 else f"{s:.3g} s"


def lines(plan: Plan) -> Iterator[str]:
    c, w, h = plan.asked, plan.asked.work, plan.hardware
    t, m, i = plan.config.trainer, plan.asked.memory, plan.config.inference
    what = "conversations" if plan.fine_tuning else "rollouts"
    yield f"{plan.config.run.name} on {h.name}: {plan.batch.rollouts} {what} of {plan.batch.length:,} tokens a step"
    yield (
        f"trainer: {t.ranks} ranks, cp {c.shape.context}, ep {c.shape.expert}, {w.micro_batches} micro-batches of "
        f"{t.pack_tokens:,} tokens, {t.precision}, recompute {t.recompute}, offload {t.offload}"
    )
    if not plan.fine_tuning:
        yield f"inference: {i.replicas} engines of {plan.gpus} GPUs, {i.precision}, {plan.rollouts.sequences} sequences each"
    yield ""
    yield "Bytes per GPU"
    rows = [["", "trainer", "trainer, host", "inference"]]
    rows += [[k, size(m.device[k]), size(m.host.get(k, 0)), size(plan.engine.device[k])] for k in CATEGORIES]
    rows.append(["total", size(m.total), size(m.host_total), size(plan.engine.total)])
    rows.append(["there is", size(h.usable), size(h.host_usable), size(h.usable)])
    yield from _columns([row[:3] for row in rows] if plan.fine_tuning else rows)
    yield f"  the trainer needs most at: {m.phase}"
    yield ""
    yield "A trainer step, each rank"
    flops = ", ".join(f"{k} {v:.3g}" for k, v in w.flops.items() if v)
    yield f"  FLOPs: {flops}; useful {w.useful:.3g}"
    moved = (("memory", w.memory), ("NVLink", w.link), ("network", w.network), ("PCIe", w.pcie), ("host memory", w.host))
    yield f"  bytes: {', '.join(f'{k} {size(v)}' for k, v in moved if v)}"

    def times(name: str, x: Times) -> list[str]:
        return [name, *(seconds(v) for v in (x.compute, x.memory, x.network, x.update, x.floor, x.serial)), x.bound]

    rows = [["", "compute", "memory", "network", "host update", "all hidden", "none hidden", "bound"]]
    yield from _columns([*rows, times("at peak", plan.peak), times("at achieved rates", c.times)])
    yield f"  MFU {plan.mfu:.0%} of bf16's peak with nothing hidden"
    yield ""
    if plan.fine_tuning:
        hours = plan.step_s * plan.all_gpus / 3600
        yield f"Step: {seconds(plan.step_s)}; {plan.all_gpus} GPUs, {hours:.3g} GPU-hours a step"
    else:
        yield (
            f"Rollouts of a batch: {seconds(plan.rollouts.seconds)}, bound by {plan.rollouts.bound} ({plan.sampled:.0%} of "
            f"the tokens sampled, {plan.rollouts.step_s * 1e3:.3g} ms a token)"
        )
        yield f"Weights: {size(plan.transfer.stored)} a version, {seconds(plan.transfer.seconds)} at the adapters' rate"
        slower = "trainer" if c.times.serial >= plan.rollouts.seconds else "rollouts"
        yield (
            f"Step: {seconds(plan.step_s)}, the {slower} bound it; {plan.all_gpus} GPUs, "
            f"{plan.step_s * plan.all_gpus / 3600:.3g} GPU-hours a step"
        )
    fast = best(plan.found)
    if fast is not None and fast.changes:
        yield f"Fastest that fits: {' '.join(fast.changes)} ({seconds(fast.times.serial)}, {size(fast.memory.total)} a rank)"
    elif fast is not None:
        yield "Fastest that fits: this one"
