"""`bench seeds`: the main job under several seeds, what it learned, and whether that is what it should."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from prl.bench import machine
from prl.bench.rows import Goal, Result, Row
from prl.bench.runs import BenchError, run_job
from prl.config.load import load

START = Goal(0.05, 0.6)
GAIN = Goal(least=0.25)
WALL = Goal(most=480.0)


def rows_of(summaries: Mapping[int, Mapping[str, Any]]) -> list[Row]:
    """Each seed's summary.json against the goals; a figure that a run has not got misses its goal."""

    def minus(a: float | None, b: float | None) -> float | None:
        return None if a is None or b is None else a - b

    out = []
    for seed, s in summaries.items():
        sft, final, control = (s.get(f"held_out_{k}") for k in ("sft", "final", "control"))
        out += [
            Row(f"seed {seed}: solve rate after SFT", sft, "", goal=START, timed=False),
            Row(f"seed {seed}: solve rate after RL", final, "", timed=False),
            Row(f"seed {seed}: gain of RL", minus(final, sft), "", goal=GAIN, timed=False),
            Row(f"seed {seed}: solve rate of the control", control, ""),
            Row(f"seed {seed}: RL above the control", minus(final, control), ""),
            Row(f"seed {seed}: mismatch KL", s.get("mismatch_kl"), "nats", timed=False),
            Row(f"seed {seed}: wall time", s.get("wall_s"), "s", goal=WALL),
        ]
    return out


def measure(config_path: Path, overrides: Sequence[str] = (), *, seeds: Sequence[int], timeout_s: float = 3600.0) -> Result:
    """One run after the other, shown as it goes; the runs stay in `run.dir`. Raises BenchError, ConfigError."""
    config = load(config_path, overrides)
    names = {seed: f"{config.run.name}-seed-{seed}" for seed in seeds}
    there = [str(path) for name in names.values() if (path := config.run.dir / name).exists()]
    if there:
        raise BenchError(f"{', '.join(there)}: there already; remove what you need no more, or set another run.dir")
    config.run.dir.mkdir(parents=True, exist_ok=True)
    before = machine.calibrate()
    summaries: dict[int, dict[str, Any]] = {}
    during = []
    for seed, name in names.items():
        job = run_job(config.run.dir, name, config_path, [*overrides, f"run.seed={seed}"], show=True, timeout_s=timeout_s)
        summaries[seed] = orjson.loads((config.run.dir / name / "summary.json").read_bytes())
        during.append((f"seed {seed}", job.others))
    return Result(
        bench="demo-seeds",
        rows=rows_of(summaries),
        machine=machine.facts(),
        load={"others": before.others, "spread": before.spread, **dict(during)},
        loaded=machine.reasons(before, during),
        settings={"config": os.path.relpath(config_path), "overrides": list(overrides), "seeds": list(seeds)},
        details={str(seed): summary for seed, summary in summaries.items()},
    )
