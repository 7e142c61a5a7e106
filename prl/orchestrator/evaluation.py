"""Held-out evaluation of exactly one weight version: every task once sampled at temperature 1, and once greedy beside it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from prl.config.schema import Sampling
from prl.envs.base import Env, TaskError, make_task
from prl.envs.runner import run_rollout
from prl.inference.api import GenerateRequest, Generation
from prl.orchestrator.curriculum import Place
from prl.orchestrator.scheduler import JUDGED, RETRIED
from prl.samples import Rollout
from prl.tokenizer import Tokenizer

Generate = Callable[[GenerateRequest], Awaitable[Generation]]
NOISE = 0x0E7A1
"""Added to the run's seed, so that evaluation shares no noise with training; a task's noise is the same in every evaluation."""
SOLVED = 1.0


@dataclass(slots=True)
class Evaluation:
    """`sampled` and `greedy` are solve rates over the judged tasks (reward at least 1); None in an incomplete evaluation."""

    version: int
    tasks: int
    complete: bool
    reason: str = ""
    """Why it is not complete."""
    sampled: float | None = None
    greedy: float | None = None
    reward: float | None = None
    """Mean reward of the sampled rollouts."""
    response_length: float | None = None
    failed: int = 0
    """Rollouts without a judgement: environment or engine errors, named in `outcomes`."""
    outcomes: dict[str, int] = field(default_factory=dict)
    by_env: dict[str, float] = field(default_factory=dict)
    wall_s: float = 0.0

    def record(self) -> dict[str, Any]:
        return asdict(self)


def held_out(envs: Sequence[Env], count: int) -> list[Place]:
    """The first held-out tasks of each environment, `count` in all as far as there are as many, shared out by weight."""
    weights = np.array([env.config.weight for env in envs])
    shares = weights / weights.sum() * count
    counts = np.floor(shares).astype(int)
    counts[np.argsort(counts - shares, kind="stable")[: count - counts.sum()]] += 1
    return [(e, t) for e, env in enumerate(envs) for t in range(min(int(counts[e]), env.size("held_out")))]


async def evaluate(
    places: Sequence[Place],
    envs: Sequence[Env],
    generate: Generate,
    tokenizer: Tokenizer,
    sampling: Sampling,
    *,
    version: int,
    seed: int,
    greedy: bool,
    top_p: float = 1.0,
    top_k: int = 0,
    timeout_s: float,
    max_in_flight: int,
    forget: Callable[[str], None] = lambda session: None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Evaluation:
    """Roll out every place under `version`; `top_p` and `top_k` truncate what is sampled.

    At the deadline it is cut; then, or where other weights answered, incomplete.
    """
    start = time.monotonic()
    slots = asyncio.Semaphore(max_in_flight)
    modes = {"sampled": 1.0, **({"greedy": 0.0} if greedy else {})}
    results: dict[str, list[tuple[int, Rollout]]] = {mode: [] for mode in modes}
    total = len(places) * len(modes)

    async def one(number: int, mode: str, temperature: float) -> None:
        env_index, task_index = places[number]
        env = envs[env_index]
        drawn = sampling.model_copy(update={"temperature": temperature, "top_p": top_p, "top_k": top_k})
        async with slots:
            for attempt in range(env.config.retries + 1):
                name = f"eval-v{version}-{mode}-{number}-{attempt}"
                try:
                    task = make_task(env, task_index, "held_out")
                except TaskError as e:
                    rollout = Rollout(name, env.name, "", number, 0, attempt, outcome="environment_error", error=str(e))
                    continue
                rollout = await run_rollout(
                    env,
                    task,
                    generate,
                    tokenizer,
                    drawn,
                    rollout_id=name,
                    ordinal=number,
                    attempt=attempt,
                    seed=seed + NOISE,
                    training=False,
                )
                forget(name)
                if rollout.outcome not in RETRIED:
                    break
        results[mode].append((env_index, rollout))
        progress(sum(map(len, results.values())), total)

    tasks = [asyncio.ensure_future(one(n, m, t)) for n in range(len(places)) for m, t in modes.items()]
    reason = ""
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*tasks)
    except TimeoutError:
        reason = f"cut at its deadline of {timeout_s:g} s with {sum(map(len, results.values()))} of {total} rollouts done"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    done = [(e, r) for found in results.values() for e, r in found]
    judged = {mode: [(e, r) for e, r in found if r.outcome in JUDGED] for mode, found in results.items()}
    other = {int(v) for _, r in done for s in r.samples for v in np.unique(s.versions[s.trainable])} - {version}
    if not reason and other:
        reason = f"weights of versions {sorted(other)} answered beside {version}"
    if not reason and not all(judged.values()):
        reason = f"no rollout could be judged: {done[0][1].outcome}: {done[0][1].error}" if done else "no held-out tasks"
    outcomes: dict[str, int] = {}
    for _, r in done:
        outcomes[r.outcome] = outcomes.get(r.outcome, 0) + 1
    result = Evaluation(version, len(places), complete=not reason, reason=reason, outcomes=outcomes)
    result.failed = len(done) - sum(map(len, judged.values()))
    if result.complete:
        sampled = judged["sampled"]
        result.sampled = _solve_rate(sampled)
        result.greedy = _solve_rate(judged["greedy"]) if greedy else None
        result.reward = float(np.mean([r.reward for _, r in sampled]))
        result.response_length = float(np.mean([r.metrics["completion_tokens"] for _, r in sampled]))
        result.by_env = {env.name: _solve_rate(own) for e, env in enumerate(envs) if (own := [x for x in sampled if x[0] == e])}
    result.wall_s = time.monotonic() - start
    return result


def _solve_rate(results: Sequence[tuple[int, Rollout]]) -> float:
    return math.fsum(r.reward >= SOLVED for _, r in results) / len(results)
