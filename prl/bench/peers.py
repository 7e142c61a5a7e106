"""`bench peers`: rollouts per second of the main job beside TRL's GRPOTrainer, with the same weights, tasks and sizes.

Both run on this machine in turn, several times; TRL in an environment of its own (bench/peers_trl.py). Each has the cores as it
uses them best: TRL alternates generation and training in one process with a thread a core, prl has a process a role.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from prl.bench import machine
from prl.bench.rows import Goal, Result, Row, median, quartiles, ratio
from prl.bench.runs import Job, check_steps, run_job, settled, watch
from prl.config.load import load
from prl.config.schema import RunConfig
from prl.envs.registry import make
from prl.tokenizer import of_run

ROOT = Path(__file__).parents[2]
GOAL = Goal(least=1.0)
COMMON = ("evaluation.tasks=8", "evaluation.greedy=false", "evaluation.every=1000000", "checkpoint.every=1000000")


@dataclass(frozen=True)
class Peer:
    """What one run of either side gave, between warm-up and end."""

    rollouts_per_s: float
    """Trained."""
    step_s: tuple[float, ...]
    tokens_per_rollout: float
    memory_mb: float
    """At its peak, all processes together."""
    others: float
    details: dict[str, Any]


def trl_spec(config: RunConfig, folder: Path, *, steps: int, warmup: int, experts: str) -> dict[str, Any]:
    """What bench/peers_trl.py reads: the same run in plain values, its tasks written out in the data order."""
    env = make(config.envs[0], seed=config.run.seed)
    o = config.orchestrator
    tasks = [env.task(i, "train") for i in range((steps + 2) * o.batch_size // o.group_size)]
    return {
        "model": str(folder / "model"),
        "output": str(folder / "trl"),
        "tasks": [{"prompt": t.prompt, "answer": t.data["answer"]} for t in tasks],
        "batch_size": o.batch_size,
        "group_size": o.group_size,
        "max_tokens": config.sampling.max_tokens,
        "lr": config.trainer.optim.lr,
        "seed": config.run.seed,
        "steps": steps,
        "warmup": warmup,
        "experts": experts,
    }


def write_model(config: RunConfig, folder: Path) -> int:
    """The first weights and the tokenizer as a Hugging Face folder; returns the number of parameters."""
    from prl.models.hf import save_hf
    from prl.models.registry import build, count_parameters, init_weights
    from prl.models.spec import read_spec

    assert config.model.architecture is not None
    of_run(config).save(folder / "tokenizer")
    spec = read_spec(config.model.architecture)
    model = build(spec)
    init_weights(model, config.run.seed)
    save_hf(folder / "model", spec, model.state_dict().items(), tokenizer_from=folder / "tokenizer")
    return count_parameters(spec)[0]


def of_trl(text: str, others: float) -> Peer:
    """From the last line of bench/peers_trl.py's output."""
    r = orjson.loads(text.strip().splitlines()[-1])
    return Peer(
        rollouts_per_s=r["rollouts"] / sum(r["step_s"]),
        step_s=tuple(r["step_s"]),
        tokens_per_rollout=r["tokens"] / r["rollouts"],
        memory_mb=r["peak_mb"],
        others=others,
        details={k: r[k] for k in ("experts", "threads", "parameters", "versions")}
        | {"generating_share": r["generating_s"] / sum(r["step_s"])},
    )


def of_job(job: Job, config: RunConfig, *, warmup: int) -> Peer:
    s = settled(job.history, warmup=warmup, cooldown=config.orchestrator.max_staleness + 1)
    lengths = [job.history.steps["orchestrator"][step]["response_length"] for step in range(s.first + 1, s.last + 1)]
    return Peer(
        rollouts_per_s=s.steps_per_s * config.orchestrator.batch_size,
        step_s=s.step_s,
        tokens_per_rollout=statistics.fmean(lengths),
        memory_mb=sum(job.memory_mb.values()),
        others=job.others,
        details={"generated_per_s": s.generated_per_s, "memory_mb": job.memory_mb},
    )


def rows_of(prl: Sequence[Peer], trl: Sequence[Peer]) -> list[Row]:
    """Medians over the repeats; ratios are prl's over TRL's."""

    def pair(name: str, unit: str, of: Any, goal: Goal | None = None, timed: bool = True) -> list[Row]:
        ours, theirs = [of(p) for p in prl], [of(p) for p in trl]
        a, b = median(ours), median(theirs)
        return [
            Row(f"prl: {name}", a, unit, quartiles(ours), ratio(a, b), "TRL's", goal, timed=timed),
            Row(f"TRL: {name}", b, unit, quartiles(theirs), timed=timed),
        ]

    generated = [p.details["generated_per_s"] for p in prl]
    return [
        *pair("rollouts trained", "per s", lambda p: p.rollouts_per_s, GOAL),
        Row("prl: rollouts generated", median(generated), "per s", quartiles(generated)),
        *pair("step", "s", lambda p: statistics.median(p.step_s)),
        *pair("completion", "tokens", lambda p: p.tokens_per_rollout, timed=False),
        *pair("peak memory, all processes", "MiB", lambda p: p.memory_mb, timed=False),
    ]


def measure(
    python: Path,
    config_path: Path,
    overrides: Sequence[str] = (),
    *,
    steps: int,
    warmup: int,
    repeats: int,
    experts: str,
    timeout_s: float = 600.0,
) -> Result:
    """Alternate the two, `repeats` times each. Raises BenchError, ConfigError."""
    given = [*COMMON, *overrides]
    config = load(config_path, given)
    check_steps(steps, warmup, config.orchestrator.max_staleness + 1)
    load_before = machine.calibrate()
    sides: dict[str, list[Peer]] = {"prl": [], "TRL": []}
    with tempfile.TemporaryDirectory(prefix="prl-bench-") as name:
        folder = Path(name)
        parameters = write_model(config, folder)
        spec = folder / "trl.json"
        spec.write_bytes(orjson.dumps(trl_spec(config, folder, steps=steps, warmup=warmup, experts=experts)))
        threads = str(machine.usable_cores())
        env = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        ours = [f"trainer.steps={steps}", f"model.path={folder / 'model'}", "model.architecture=null"]
        for i in range(2 * repeats):
            number = i // 2 + 1
            if i % 4 in (0, 3):  # each goes first as often as second
                command = [str(python), str(ROOT / "bench" / "peers_trl.py"), str(spec)]
                done = watch(f"TRL run {number}", command, timeout_s=timeout_s, env=env)
                sides["TRL"].append(of_trl(done.stdout, done.others))
            else:
                job = run_job(folder, f"prl-{number}", config_path, [*given, *ours], timeout_s=timeout_s)
                sides["prl"].append(of_job(job, config, warmup=warmup))
    during = [(f"{side} run {i}", p.others) for side, peers in sides.items() for i, p in enumerate(peers, 1)]
    return Result(
        bench="peers",
        rows=rows_of(sides["prl"], sides["TRL"]),
        machine=machine.facts(),
        load={"others": load_before.others, "spread": load_before.spread, **dict(during)},
        loaded=machine.reasons(load_before, during),
        settings={
            "config": config_path.name,
            "overrides": list(overrides),
            "model": config.model.architecture and config.model.architecture["model_type"],
            "parameters": parameters,
            "batch_size": config.orchestrator.batch_size,
            "group_size": config.orchestrator.group_size,
            "max_tokens": config.sampling.max_tokens,
            "steps": steps,
            "warmup": warmup,
            "repeats": repeats,
        },
        details={side: [vars(p) for p in peers] for side, peers in sides.items()},
    )
