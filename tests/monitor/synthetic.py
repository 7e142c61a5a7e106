"""A run's files as the roles write them, made up with known numbers."""

import math
import random
from pathlib import Path
from typing import Any

import orjson

from prl.config.load import dump, load
from prl.transport.run_dir import RunDir

T0 = 1_700_000_000.0


def records(steps: int, *, sft_steps: int = 60, control: bool = True, step_s: float = 1.5) -> list[dict[str, Any]]:
    """metrics.jsonl of a whole run: SFT, `steps` of RL with evaluations, the control."""
    rng, out, t = random.Random(0), [], T0

    def log(kind: str, role: str, at: float, **values: Any) -> None:
        out.append({"t": at, "role": role, "kind": kind, **values})

    def span(role: str, name: str, t0: float, t1: float, **values: Any) -> None:
        log("span", role, t1, name=name, t0=t0, t1=t1, **values)

    for step in range(1, sft_steps + 1):
        t += 0.4
        log("step", "sft", t, step=step, loss=3 * math.exp(-step / 30), tokens_per_s=9000.0, rss_mb=400.0)
        if step % 20 == 0:
            log("eval", "sft", t, step=step, tasks=64, greedy=step / sft_steps * 0.3, complete=True)

    def evaluate(step: int, role: str, rate: float, at: float, tasks: int) -> None:
        rates = {"sampled": rate, "greedy": rate + 0.05}
        log("eval", role, at, step=step, version=step, tasks=tasks, complete=True, wall_s=3.0, **rates)

    evaluate(0, "orchestrator", 0.12, t + 3, 512)
    span("orchestrator", "evaluation", t, t + 3)
    t += 3
    for step in range(1, steps + 1):
        rate = 0.12 + 0.6 * (1 - math.exp(-step / steps * 3))
        wait = 0.2 + 0.3 * rng.random()
        span("trainer", "wait", t, t + wait, what=f"batch {step} from the orchestrator")
        span("trainer", "train", t + wait, t + step_s - 0.05, step=step)
        span("trainer", "publish", t + step_s - 0.05, t + step_s, step=step)
        span("inference-0", "update", t + 0.02, t + 0.08, version=step)
        span("inference-0", "wait", t + 0.1, t + 0.1 + 0.25 * rng.random(), what="requests")
        t += step_s
        log("engine", "inference-0", t, generated_per_s=4000 + 100 * rng.random(), running=64, waiting=3)
        kl = 2e-4 * (1 + rng.random())
        counts = [[int(100 + 80 * rng.random() + 30 * layer) for _ in range(16)] for layer in range(3)]
        trained = {
            "mismatch_kl": 2 * kl,
            "mismatch_kl_own": kl,
            "mismatch": {"p50": 1e-3, "p90": 8e-3, "p99": 0.04, "max": 0.3 + rng.random()},
            "unrouted_fraction": 0.001 if step % 4 else 0.005,
            "recaptured_fraction": 0.0,
            "tokens": 20_000,
            "rows": 18_000 if step % 4 else 6_000,
            "tokens_per_s": 14_000.0,
            "expert_counts": counts,
            "entropy": 1 - 0.5 * rate,
            "rss_mb": 900.0,
            "time": {"wait": wait, "forward_backward": step_s - wait - 0.05, "publish": 0.05},
            "skipped": 0,
        }
        log("step", "trainer", t, step=step, version=step, loss=0.1 * rng.random(), grad_norm=0.5, lr=2e-4, **trained)
        generated = {
            "reward": rate + 0.02 * rng.random(),
            "solve_rate": rate,
            "staleness": {"0": 100, "1": 140 + step % 7, "2": 16},
            "dropped": {"stale": step % 3, "solved": 8 + step % 2},
            "dropped_by_length": {"stale": {"32": step % 3}, "solved": {"32": 8, "64": step % 2}},
            "filtered": 2,
            "rss_mb": 200.0,
        }
        log("step", "orchestrator", t - 0.9, step=step, **generated)
        for ordinal in range(3):
            word = "".join(rng.choice("abcdefgh<&") for _ in range(6))
            answer = word[::-1] if rng.random() < rate else word[:3]
            text = {"prompt": f"Spell this word backward: {word}", "completion": answer, "reward": float(answer == word[::-1])}
            log("sample", "orchestrator", t, step=step, ordinal=ordinal, **text)
        if step % 20 == 0 and step < steps:
            evaluate(step, "orchestrator", rate, t, 128)
    evaluate(steps, "orchestrator", 0.12 + 0.6 * (1 - math.exp(-3)), t + 3, 512)
    t += 3
    if control:
        for step in range(1, 81):
            t += 0.5
            log("step", "control", t, step=step, loss=0.3, tokens_per_s=9000.0, rss_mb=400.0)
        evaluate(80, "evaluate", 0.41, t + 2, 512)
    return out


def write_run(root: Path, records: list[dict[str, Any]], *overrides: str) -> RunDir:
    """A run's folder of these records; its configuration is the demo's, with all lengths fixed here, and `overrides`."""
    (root / "status").mkdir(parents=True)
    fixed = [f"run.dir={root.parent}", f"run.name={root.name}", "trainer.steps=120", "sft.steps=600", "control.time_fraction=1"]
    config = load("configs/demo.yaml", [*fixed, *overrides])
    (root / "config.yaml").write_text(dump(config))
    (root / "stages.json").write_bytes(orjson.dumps({"rl": {"wall_s": 70.0, "done": True}} if records else {}))
    with (root / "metrics.jsonl").open("wb") as file:
        file.writelines(orjson.dumps(r) + b"\n" for r in records)
    with (root / "ledger.jsonl").open("wb") as file:
        for r in records:
            if r["kind"] == "step" and r["role"] == "trainer":
                ids = [f"{r['step']}-{i}" for i in range(4)]
                file.write(orjson.dumps({"kind": "step", "step": r["step"], "rollouts": ids}) + b"\n")
    return RunDir(root)
