"""The warm start and its control: worked answers of the run's environments, given to the trainer's fine-tuning.

Unlike the rest of this room it runs in the trainer's process, model and engine included.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np

from prl.config.schema import ChatSource, RunConfig, Sft
from prl.envs.base import Env
from prl.envs.registry import make
from prl.envs.runner import run_rollout
from prl.inference.api import EngineError, GenerateRequest, Generation
from prl.inference.engine import Engine
from prl.models.base import Model
from prl.orchestrator.curriculum import Uniform
from prl.orchestrator.evaluation import SOLVED
from prl.orchestrator.scheduler import JUDGED
from prl.samples import Sample
from prl.tokenizer import Tokenizer, of_run
from prl.trainer.sft import Examples, Held, Measure, Plan, Solved, example, fine_tune
from prl.transport.run_dir import RunDir

log = logging.getLogger(__name__)
T = TypeVar("T")


class Local:
    """An engine in this process as what `run_rollout` generates with: it steps while rollouts wait for it."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._waiting: dict[str, asyncio.Future[Generation]] = {}

    async def generate(self, request: GenerateRequest) -> Generation:
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = future
        self.engine.add(request)
        return await future

    async def run(self, rollouts: Sequence[Coroutine[Any, Any, T]], alive: Callable[[], None] = lambda: None) -> list[T]:
        """All of them to their ends, in order; `alive` is called between the engine's steps and while environments work."""
        together = asyncio.gather(*rollouts)
        while not together.done():
            alive()
            if not self.engine.ready:  # environments are at work
                await asyncio.wait([together], timeout=0.001)
                continue
            await asyncio.sleep(0)  # let what was answered ask again before the next step
            for event in self.engine.step():
                future = self._waiting.pop(event.request_id)
                if future.done():  # its caller was cancelled
                    continue
                if event.error:
                    future.set_exception(EngineError(event.error))
                else:
                    future.set_result(event.generation)
        return await together


def main(run: RunDir, config: RunConfig, index: int, stop: threading.Event) -> int:
    """The warm start: writes <run>/sft/model."""
    sft, tokenizer = _sft(config), of_run(config)
    plan = Plan(
        role="sft",
        start=config.model.path,
        optim=sft.optim,
        batch_size=sft.batch_size,
        seed=config.run.seed,
        steps=sft.steps,
        measure_every=sft.dev_every if sft.stop_at is not None else 0,
        stop_at=sft.stop_at if sft.stop_at is not None else 1.0,
        weights=[source.weight for source in sft.data],
        validation=conversations(config, sft.validation, tokenizer),
        validate_every=sft.validate_every,
        validation_examples=sft.validation_examples,
    )
    solve_rate = greedy_solve_rate(config, sft.dev_tasks, _envs(config), tokenizer) if plan.measure_every else None
    return fine_tune(run, config, plan, index, sources_of(config, tokenizer), stop, solve_rate=solve_rate)


def control(run: RunDir, config: RunConfig, index: int, stop: threading.Event) -> int:
    """More of it, from <run>/sft/model on, in another order, for as long as RL took: writes <run>/control/model."""
    sft, fraction = _sft(config), config.control.time_fraction if config.control is not None else 1.0
    plan = Plan(
        role="control",
        start=run / "sft" / "model",
        optim=sft.optim.model_copy(update={"schedule": "constant"}),  # its end is a time, not a step
        batch_size=sft.batch_size,
        seed=config.run.seed + 1,
        seconds=fraction * run.stages()["rl"]["wall_s"],
        weights=[source.weight for source in sft.data],
    )
    return fine_tune(run, config, plan, index, sources_of(config, of_run(config)), stop)


def sources_of(config: RunConfig, tokenizer: Tokenizer) -> Sequence[Examples]:
    """What is trained on: the conversations of `sft.data`, else worked answers of the environments."""
    sft = _sft(config)
    if sft.data:
        return conversations(config, sft.data, tokenizer)
    return [Held(worked_examples(config, sft.examples, _envs(config), tokenizer))]


def conversations(config: RunConfig, sources: Sequence[ChatSource], tokenizer: Tokenizer) -> Sequence[Examples]:
    if not sources:
        return []
    from prl.trainer.chat import Conversations  # brings transformers along

    sft = _sft(config)
    longest = sft.max_length or config.trainer.pack_tokens
    return [Conversations(s.path, tokenizer, roles=sft.roles, max_length=longest, too_long=sft.too_long) for s in sources]


def worked_examples(config: RunConfig, n: int, envs: Sequence[Env], tokenizer: Tokenizer) -> list[Sample]:
    """`n` worked answers, environments by weight. Longer ones than `sampling.max_length` are left out and logged."""
    sizes = [min(env.size("worked"), n) for env in envs]
    places = Uniform(config.run.seed, sizes, [e.weight for e in config.envs])
    samples = []
    for i in range(n):
        env, ordinal = places.draw(i)
        task = envs[env].task(ordinal, "worked")
        pieces = [tokenizer.encode(text) for text in (task.prompt, *envs[env].worked_turns(task))]
        pieces[-1] = np.append(pieces[-1], np.int32(tokenizer.eos_id))
        samples.append(example(*pieces))
    short = [s for s in samples if len(s) <= config.sampling.max_length]
    if not short:
        raise ValueError(f"sampling.max_length: {config.sampling.max_length} is too short for each of {n} worked answers")
    if len(short) < n:
        log.warning("%d of %d worked answers are longer than sampling.max_length and left out", n - len(short), n)
    return short


def greedy_solve_rate(config: RunConfig, n: int, envs: Sequence[Env], tokenizer: Tokenizer) -> Measure:
    """Measures what share of the first `n` train tasks (none is a worked one) a model solves greedily."""
    sampling = config.sampling.model_copy(update={"temperature": 0.0})
    places = Uniform(config.run.seed, [env.size("train") for env in envs], [e.weight for e in config.envs])
    tasks = [(envs[env], envs[env].task(ordinal, "train")) for env, ordinal in (places.draw(i) for i in range(n))]
    inference = config.inference

    async def solved(model: Model, alive: Callable[[], None]) -> Solved:
        together = min(inference.max_batch, n)
        tokens = together * (sampling.max_length + 8)  # blocks are rounded up
        engine = Local(Engine(model, model.spec, max_batch=together, kv_tokens=tokens, record_routes=False))
        rollouts = await engine.run(
            [
                run_rollout(env, task, engine.generate, tokenizer, sampling, rollout_id=f"dev-{i}", ordinal=i, training=False)
                for i, (env, task) in enumerate(tasks)
            ],
            alive,
        )
        judged = [r for r in rollouts if r.outcome in JUDGED]
        return Solved(sum(r.reward >= SOLVED for r in judged) / len(judged) if judged else None, n - len(judged))

    return lambda model, alive: asyncio.run(solved(model, alive))


def _sft(config: RunConfig) -> Sft:
    if config.sft is None:
        raise ValueError("sft: not set; the warm start and its control need it")
    return config.sft


def _envs(config: RunConfig) -> list[Env]:
    return [make(env, seed=config.run.seed) for env in config.envs]
