"""`bench pipeline`: variants of the main job side by side: what asynchrony gives, who waits, what router replay mends, memory.

Every variant is `python -m prl.rl` from the same warm-started weights. Those that are compared take turns.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prl.bench import machine
from prl.bench.rows import Goal, Result, Row, median, quartiles, ratio
from prl.bench.runs import Job, Settled, check_steps, run_job, settled
from prl.config.load import load

GOAL = Goal(least=1.3)
QUIET = (
    "evaluation.tasks=8",
    "evaluation.greedy=false",
    "evaluation.every=1000000",
    "checkpoint.every=1000000",
    "control=null",
)
"""Nothing but steps: evaluations and checkpoints would fall into some variants' time and not into others'."""
SHOWN = 0.005
"""Waits below this share of the time are left out of the table."""
ASYNC, SYNC, SYNC_ALL = "asynchronous", "synchronous", "synchronous, all cores a role"
REPLAY, NO_REPLAY = "engine in bfloat16, routes replayed", "engine in bfloat16, routes not replayed"


@dataclass(frozen=True)
class Measured:
    job: Job
    steady: Settled


def variants(cores: int) -> dict[str, list[str]]:
    """Overrides by name. Threads are by default the cores divided by the roles, which is too few where roles take turns.

    The two of router replay are synchronous, so that all tokens are of the version that is trained.
    """
    turns = ["orchestrator.synchronous=true"]
    threads = [f"launch.threads.{role}={cores}" for role in ("trainer", "inference")]
    return {
        ASYNC: [],
        SYNC: turns,
        SYNC_ALL: [*turns, *threads],
        REPLAY: [*turns, "model.dtype=float32", "inference.dtype=bfloat16"],
        NO_REPLAY: [*turns, "model.dtype=float32", "inference.dtype=bfloat16", "trainer.router_replay=false"],
    }


def plan(repeats: int) -> list[str]:
    """The order of the runs: asynchronous and synchronous take turns in going first; what is not judged is run once."""
    turns = [[ASYNC, SYNC], [SYNC, ASYNC]]
    return [*(name for i in range(repeats) for name in turns[i % 2]), SYNC_ALL, REPLAY, NO_REPLAY]


def waits(runs: Iterable[Settled]) -> list[tuple[str, str, float]]:
    """(role, what it waited for, share of the time), the longest first."""
    seconds: dict[str, Counter[str]] = defaultdict(Counter)
    total = 0.0
    for run in runs:
        total += run.seconds
        for role, what in run.waited.items():
            seconds[role].update(what)
    found = [(role, what, s / total) for role, by_what in seconds.items() for what, s in by_what.items()]
    return sorted(found, key=lambda w: (w[0], -w[2]))


def rows_of(measured: Mapping[str, Sequence[Measured]], batch_size: int) -> list[Row]:
    """Medians over a variant's runs; the steps' quartiles are over all of its steps."""

    def rates(name: str) -> list[float]:
        return [m.steady.steps_per_s for m in measured[name]]

    rate = {name: median(rates(name)) for name in (ASYNC, SYNC, SYNC_ALL)}
    out = [
        Row(f"{ASYNC}: steps", rate[ASYNC], "per s", quartiles(rates(ASYNC)), ratio(rate[ASYNC], rate[SYNC]), SYNC, GOAL),
        Row(f"{ASYNC}: steps", rate[ASYNC], "per s", None, ratio(rate[ASYNC], rate[SYNC_ALL]), SYNC_ALL),
        Row(f"{SYNC}: steps", rate[SYNC], "per s", quartiles(rates(SYNC))),
        Row(f"{SYNC_ALL}: steps", rate[SYNC_ALL], "per s", quartiles(rates(SYNC_ALL))),
    ]
    for name in (ASYNC, SYNC, SYNC_ALL):
        steps = [s for m in measured[name] for s in m.steady.step_s]
        generated = [g for m in measured[name] if (g := m.steady.generated_per_s) is not None]
        r = rate[name]
        out += [
            Row(f"{name}: a step", median(steps), "s", quartiles(steps)),
            Row(f"{name}: rollouts trained", None if r is None else r * batch_size, "per s"),
            Row(f"{name}: rollouts generated", median(generated), "per s", quartiles(generated)),
        ]
    for name in (ASYNC, SYNC):
        runs = [m.steady for m in measured[name]]
        total = sum(r.seconds for r in runs)
        for what in sorted({w for r in runs for w in r.trainer_s}):
            share = sum(r.trainer_s.get(what, 0.0) for r in runs) / total
            out.append(Row(f"{name}: trainer in {what}", 100 * share, "% of the time"))
        out += [
            Row(f"{name}: {role} waited for {what}", 100 * share, "% of the time")
            for role, what, share in waits(runs)
            if share >= SHOWN
        ]
    kl = {
        name: [k for m in measured[name] for r in m.steady.records if (k := r["mismatch_kl_own"]) is not None]
        for name in (REPLAY, NO_REPLAY)
    }
    replayed, not_replayed = median(kl[REPLAY]), median(kl[NO_REPLAY])
    out += [
        Row(f"{REPLAY}: mismatch KL", replayed, "nats", quartiles(kl[REPLAY]), timed=False),
        Row(
            f"{NO_REPLAY}: mismatch KL",
            not_replayed,
            "nats",
            quartiles(kl[NO_REPLAY]),
            ratio(not_replayed, replayed),
            "replayed",
            timed=False,
        ),
    ]
    for role in sorted({role for m in measured[ASYNC] for role in m.job.memory_mb}):
        peaks = [m.job.memory_mb[role] for m in measured[ASYNC] if role in m.job.memory_mb]
        out.append(Row(f"{ASYNC}: peak memory of {role}", median(peaks), "MiB", quartiles(peaks), timed=False))
    return out


def measure(
    config_path: Path, overrides: Sequence[str] = (), *, steps: int, warmup: int, repeats: int, timeout_s: float = 600.0
) -> Result:
    """Warm-start once where the configuration says so, then every variant. Raises BenchError, ConfigError."""
    given = [*QUIET, *overrides]
    config = load(config_path, given)
    cooldown = config.orchestrator.max_staleness + 1
    check_steps(steps, warmup, cooldown)
    before = machine.calibrate()
    measured: dict[str, list[Measured]] = defaultdict(list)
    during: list[tuple[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="prl-bench-") as name:
        folder = Path(name)
        start = [*given, f"trainer.steps={steps}"]
        if config.sft is not None:
            run_job(folder, "warm-start", config_path, given, module="prl.sft", timeout_s=timeout_s)
            start += ["sft=null", f"model.path={folder / 'warm-start' / 'sft' / 'model'}", "model.architecture=null"]
        overrides_of = variants(machine.usable_cores())
        for number, variant in enumerate(plan(repeats), 1):
            job = run_job(folder, f"run-{number}", config_path, [*start, *overrides_of[variant]], timeout_s=timeout_s)
            measured[variant].append(Measured(job, settled(job.history, warmup=warmup, cooldown=cooldown)))
            during.append((f"run {number} ({variant})", job.others))
    return Result(
        bench="pipeline",
        rows=rows_of(measured, config.orchestrator.batch_size),
        machine=machine.facts(),
        load={"others": before.others, "spread": before.spread, **dict(during)},
        loaded=machine.reasons(before, during),
        settings={
            "config": os.path.relpath(config_path),
            "overrides": list(overrides),
            "batch_size": config.orchestrator.batch_size,
            "steps": steps,
            "warmup": warmup,
            "cooldown": cooldown,
            "repeats": repeats,
        },
        details={name: [_detail(m) for m in runs] for name, runs in measured.items()},
    )


def _detail(measured: Measured) -> dict[str, Any]:
    s, job = measured.steady, measured.job
    return {
        "steps": [s.first + 1, s.last],
        "seconds": s.seconds,
        "step_s": s.step_s,
        "generated_per_s": s.generated_per_s,
        "trainer_s": s.trainer_s,
        "waited_s": s.waited,
        "records": [{k: r.get(k) for k in ("step", "mismatch_kl", "mismatch_kl_own", "tokens", "time")} for r in s.records],
        "memory_mb": job.memory_mb,
        "wall_s": job.wall_s,
        "others": job.others,
    }
