"""Supervised fine-tuning on the trainer's step: every token of the examples is read by cross-entropy."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from prl.config.schema import Optim, RunConfig
from prl.distributed.mesh import Mesh, join
from prl.kernels import registry
from prl.models.base import Model
from prl.monitor.metrics import Metrics
from prl.monitor.status import Status
from prl.samples import CE, Rollout, Sample, concatenate, pack
from prl.trainer.nonfinite import Guard
from prl.trainer.step import Stepper
from prl.trainer.store import DONE, EXPECTED, FAILED, SAVED, open_state, save_state, shape_of, write_model
from prl.transport.run_dir import RunDir

log = logging.getLogger(__name__)
TELL_S = 1.0
"""Seconds between rank 0's signs of life to the other ranks while it measures."""


class Solved(NamedTuple):
    rate: float | None
    """Of the judged tasks; None where none could be judged."""
    failed: int
    """Tasks without a judgement: environment or engine errors."""


Measure = Callable[[Model, Callable[[], None]], Solved]
"""How much a model solves. The function that it is given is to be called often: it shows that the measurement is alive."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one fine-tuning does; it writes `<run>/<role>/model` once it is complete."""

    role: str
    start: Path | None
    """Hugging Face folder to start from; None: the configuration's first weights."""
    optim: Optim
    batch_size: int
    seed: int
    """Of the examples' order."""
    steps: int | None = None
    seconds: float | None = None
    """End after this much time instead of after `steps`. Such a run is not checkpointed: it starts over."""
    measure_every: int = 0
    """Steps between measurements of the solve rate, 0 for none."""
    stop_at: float = 1.0
    """End early when it is reached."""


def example(*pieces: np.ndarray) -> Sample:
    """Ids, int32, of a prompt and an answer, and so on by turns; the answers, stop tokens included, are what is trained."""
    shown = [Sample.of_prompt(piece) for piece in pieces]
    for answer in shown[1::2]:
        answer.trainable[:] = True
        answer.versions[:] = 0
    sample = concatenate(shown)
    sample.loss_stream[:] = CE
    return sample.check()


def order(seed: int, n: int, batch_size: int, step: int) -> np.ndarray:
    """The examples of batch `step` (from 1): each once an epoch, in a new order each epoch. A function of its arguments."""
    places = np.arange((step - 1) * batch_size, step * batch_size)
    epochs = {int(e): np.random.default_rng([seed, int(e)]).permutation(n) for e in np.unique(places // n)}
    return np.array([epochs[int(p // n)][p % n] for p in places])


def fine_tune(
    run: RunDir,
    config: RunConfig,
    plan: Plan,
    rank: int,
    examples: Sequence[Sample],
    stop: threading.Event,
    *,
    solve_rate: Measure | None = None,
) -> int:
    """Train as planned and write the model; one process a rank, each with the same examples.

    `solve_rate` is called on rank 0 with a whole model. Exit code: 0 done, 75 stopped and resumable, 1 failed.
    """
    if (run / plan.role / "model").exists():
        return DONE
    role = plan.role if rank == 0 else f"{plan.role}-{rank}"
    metrics = run.metrics(role)
    status = run.status(role, metrics)
    status.set(phase="loading")
    launch = config.launch
    try:
        shape = shape_of(config, plan.start)
        with join(run, rank, shape, start_s=launch.start_timeout_s, wait_s=launch.wait_timeout_s) as mesh:
            return FineTuning(run, config, plan, mesh, metrics, status).run(examples, stop, solve_rate)
    except EXPECTED as e:
        log.error("%s: %s", role, e)
        metrics.log("event", name="failed", error=str(e))
        return FAILED


class FineTuning:
    """One rank of it. Its checkpoints lie in `<run>/<role>/checkpoints` until the model is written."""

    def __init__(self, run: RunDir, config: RunConfig, plan: Plan, mesh: Mesh, metrics: Metrics, status: Status):
        self.run_dir, self.config, self.plan, self.mesh = run, config, plan, mesh
        self.metrics, self.status = metrics, status
        self.own = RunDir(run / plan.role)
        (self.own / "checkpoints").mkdir(parents=True, exist_ok=True, mode=0o700)
        self.state = open_state(self.own, config, plan.optim, mesh, plan.start)
        self.stepper = Stepper(self.state, config.trainer, plan.steps or 0, beat=status.beat)
        self.guard = Guard(self.own / "nonfinite", config.trainer.max_nonfinite)

    def run(self, examples: Sequence[Sample], stop: threading.Event, solve_rate: Measure | None) -> int:
        plan, state, mesh, every = self.plan, self.state, self.mesh, self.config.checkpoint.every
        rollouts = [Rollout(str(i), "", "", i, 0, samples=[s]) for i, s in enumerate(examples)]
        deadline = None if plan.seconds is None else time.monotonic() + plan.seconds
        while not self._over(deadline):
            if mesh.any(stop.is_set()):
                if plan.steps is not None:
                    save_state(self.own, self.config, state)
                self.status.set(phase="saved")
                return SAVED
            step = state.step + 1
            chosen = [rollouts[i] for i in order(plan.seed, len(rollouts), plan.batch_size, step)]
            batch = pack(chosen, step=step, budget=self.config.trainer.pack_tokens, ranks=mesh.shape.data)[mesh.stream]
            self.status.set(phase="training", step=step)
            report = self.stepper(batch)
            if mesh.main:
                self.metrics.log("step", step=step, backend=registry.backends(self.mesh.device.type), **report.metrics)
            if report.skipped:
                dump = self.guard.dump(batch, mesh.rank, report.skipped)
                self.metrics.log("event", name="nonfinite", step=step, reason=report.skipped, dump=str(dump))
                self.guard.check(state.skipped)
            if solve_rate and plan.measure_every and step % plan.measure_every == 0 and self._reached(solve_rate):
                break
            if plan.steps is not None and step % every == 0:
                save_state(self.own, self.config, state)
        self.status.set(phase="writing the model")
        write_model(self.run_dir, self.config, state, self.own / "model")
        mesh.barrier()
        if mesh.main:
            shutil.rmtree(self.own / "checkpoints")
        self.status.set(phase="done")
        return DONE

    def _over(self, deadline: float | None) -> bool:
        if self.plan.steps is not None:
            return self.state.step >= self.plan.steps
        return self.mesh.any(deadline is None or time.monotonic() > deadline)

    def _reached(self, solve_rate: Measure) -> bool:
        """Whether the solve rate is high enough to end; every rank must ask.

        The others follow rank 0's measurement, so that a long one is neither a lost collective nor a silent role.
        """
        self.status.set(phase="evaluating")
        t0, mesh, model, rate = time.monotonic(), self.mesh, self.state.whole_model(), None
        if mesh.main:
            told = t0

            def alive() -> None:
                nonlocal told
                self.status.beat()
                if time.monotonic() - told > TELL_S:
                    told = time.monotonic()
                    mesh.any(True)

            rate, failed = solve_rate(model, alive)
            seconds = time.monotonic() - t0
            self.metrics.log(
                "eval",
                split="dev",
                step=self.state.step,
                greedy=rate,
                failed=failed,
                complete=rate is not None,
                wall_s=seconds,
            )
            mesh.any(False)
        else:
            while mesh.any(False):
                self.status.beat()
        return mesh.any(rate is not None and rate >= self.plan.stop_at)
