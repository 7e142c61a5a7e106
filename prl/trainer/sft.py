"""Supervised fine-tuning on the trainer's step: every token of the examples is read by cross-entropy."""

from __future__ import annotations

import functools
import logging
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash

from prl.config.named import SetupError
from prl.config.schema import Optim, RunConfig
from prl.distributed.mesh import Mesh, RankError, join
from prl.kernels import registry
from prl.models.base import Model
from prl.monitor.metrics import Metrics
from prl.monitor.status import Status
from prl.samples import CE, Batch, Rollout, Sample, concatenate, pack
from prl.trainer import checkpoint
from prl.trainer.nonfinite import Guard
from prl.trainer.step import Stepper
from prl.trainer.store import DONE, EXPECTED, FAILED, SAVED, Saver, open_state, shape_of, tell_failure, write_model
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
    weights: Sequence[float] = ()
    """Of the sources, where there are several."""
    validation: Sequence[Examples] = ()
    validate_every: int = 1
    validation_examples: int = 0


def example(*pieces: np.ndarray) -> Sample:
    """Ids, int32, of a prompt and an answer, and so on by turns; the answers, stop tokens included, are what is trained."""
    shown = [Sample.of_prompt(piece) for piece in pieces]
    for answer in shown[1::2]:
        answer.trainable[:] = True
        answer.versions[:] = 0
    sample = concatenate(shown)
    sample.loss_stream[:] = CE
    return sample.check()


class Examples(Protocol):
    """What can be trained on: each item is the samples of one example, none where it was left out."""

    counts: Counter[str]
    """Why samples given so far were dropped or cut."""
    source: str
    """Where they are from."""
    checksum: str
    """Of all examples in their order."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Sequence[Sample]: ...


class Held:
    """Examples in memory, a sample each."""

    def __init__(self, samples: Sequence[Sample]):
        self.samples, self.counts, self.source = samples, Counter[str](), "worked answers"
        digest = xxhash.xxh3_128()
        for sample in samples:
            digest.update(sample.tokens.tobytes())
            digest.update(sample.trainable.tobytes())
        self.checksum = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int, /) -> Sequence[Sample]:
        return [self.samples[i]]


class Mixture:
    """Which example comes when: sources by weight, each source's examples once an epoch, in a new order each epoch.

    A function of the seed and the step alone, so a resume needs no data state and can neither lose nor repeat an example.
    """

    BLOCK = 4096
    """Places whose sources are drawn at once."""

    def __init__(self, seed: int, sizes: Sequence[int], weights: Sequence[float]):
        self.seed, self.sizes = seed, sizes
        self.shares = np.asarray(weights, np.float64) / sum(weights)
        self.before = [np.zeros(len(sizes), np.int64)]
        """Per block, how often each source came before it."""
        self._orders: dict[int, tuple[int, np.ndarray]] = {}

    def batch(self, step: int, size: int) -> list[tuple[int, int]]:
        """(source, example) at each place of batch `step`, from 1."""
        return [self._at(place) for place in range((step - 1) * size, step * size)]

    def _at(self, place: int) -> tuple[int, int]:
        block, here = divmod(place, self.BLOCK)
        while len(self.before) <= block:
            self.before.append(self.before[-1] + np.bincount(self._sources(len(self.before) - 1), minlength=len(self.sizes)))
        sources = self._sources(block)
        source = int(sources[here])
        epoch, position = divmod(int(self.before[block][source] + (sources[:here] == source).sum()), self.sizes[source])
        if self._orders.get(source, (-1, None))[0] != epoch:
            order = np.random.default_rng([self.seed, epoch, source]).permutation(self.sizes[source])
            self._orders[source] = epoch, order
        return source, int(self._orders[source][1][position])

    @functools.lru_cache(maxsize=2)  # noqa: B019 (a mixture lives as long as its training)
    def _sources(self, block: int) -> np.ndarray:
        if len(self.sizes) == 1:
            return np.zeros(self.BLOCK, np.int64)
        return np.random.default_rng([self.seed, block, 0x5F7]).choice(len(self.sizes), self.BLOCK, p=self.shares)


def _told(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {n}" for reason, n in sorted(counts.items()))


def rollouts_of(sources: Sequence[Examples], chosen: Sequence[tuple[int, int]]) -> list[Rollout]:
    """The chosen (source, example) as rollouts; the rollout's id is its place, so that one drawn twice counts twice."""
    return [
        Rollout(f"{n}", str(source), str(i), i, 0, samples=list(samples))
        for n, (source, i) in enumerate(chosen)
        if (samples := sources[source][i])
    ]


def data_of(plan: Plan, sources: Sequence[Examples]) -> dict[str, Any]:
    """What it follows from which examples a step trains: the same after a resume, or some come twice and others never."""
    shares = plan.weights or [1.0] * len(sources)
    each = {
        f"source {i}": f"{len(s)} examples, weight {w:g}, checksum {s.checksum}"
        for i, (s, w) in enumerate(zip(sources, shares, strict=True), 1)
    }
    return {"batch_size": plan.batch_size, "seed": plan.seed} | each


def fine_tune(
    run: RunDir,
    config: RunConfig,
    plan: Plan,
    rank: int,
    sources: Sequence[Examples],
    stop: threading.Event,
    *,
    solve_rate: Measure | None = None,
) -> int:
    """Train as planned and write the model; one process a rank, each with the same sources.

    `solve_rate` is called on rank 0 with a whole model. Exit code: 0 done, 75 stopped and resumable, 1 failed.
    """
    if (run / plan.role / "model").exists():
        if rank == 0:  # a life that was killed after it had written the model
            shutil.rmtree(run / plan.role / "checkpoints", ignore_errors=True)
        return DONE
    role = plan.role if rank == 0 else f"{plan.role}-{rank}"
    metrics = run.metrics(role)
    status = run.status(role, metrics)
    status.set(phase="loading")
    launch = config.launch
    try:
        shape = shape_of(config, plan.start)
        with (
            join(run, rank, shape, start_s=launch.start_timeout_s, wait_s=launch.wait_timeout_s) as mesh,
            status.failing(but=RankError),
        ):
            tuning = FineTuning(run, config, plan, mesh, metrics, status)
            with closing(tuning.saver):
                return tuning.run(sources, stop, solve_rate)
    except EXPECTED as e:
        tell_failure(metrics, e)
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
        self.saver = Saver(self.own, config, mesh, metrics, status)
        self.saved = self.state.step
        """The newest step whose checkpoint is complete or being written."""
        self.data: dict[str, Any] = {}
        """`data_of` this training, for its checkpoints."""

    def run(self, sources: Sequence[Examples], stop: threading.Event, solve_rate: Measure | None) -> int:
        plan, state, mesh, every = self.plan, self.state, self.mesh, self.config.checkpoint.every
        self._demand_data(sources)
        mixture = Mixture(plan.seed, [len(s) for s in sources], plan.weights or [1.0] * len(sources))
        deadline = None if plan.seconds is None else time.monotonic() + plan.seconds
        idle = 0
        while not self._over(deadline):
            if mesh.any(stop.is_set()):
                if plan.steps is not None and state.step > self.saved:
                    self._save()
                self.saver.wait()
                self.status.set(phase="saved")
                return SAVED
            step = state.step + 1
            batch = self._batch(rollouts_of(sources, mixture.batch(step, plan.batch_size)), step)
            idle = 0 if batch.counts.ce_tokens else idle + plan.batch_size
            if idle >= sum(len(s) for s in sources):
                why = _told(sum((s.counts for s in sources), Counter[str]()))
                raise SetupError(
                    f"sft: of the last {idle} examples none is left to train on ({why}); see sft.max_length and sft.roles"
                )
            self.status.set(phase="training", step=step)
            report = self.stepper(batch)
            with mesh.agree():
                if mesh.main:
                    left_out = sum((s.counts for s in sources), Counter[str]())
                    backend = registry.backends(self.mesh.device.type)
                    self.metrics.log("step", step=step, backend=backend, left_out=left_out, **report.metrics)
                if report.skipped:
                    dump = self.guard.dump(batch, mesh.rank, report.skipped)
                    self.metrics.log("event", name="nonfinite", step=step, reason=report.skipped, dump=str(dump))
            self.guard.check(state.skipped)
            if solve_rate and plan.measure_every and step % plan.measure_every == 0 and self._reached(solve_rate):
                break
            if plan.validation and (step % plan.validate_every == 0 or step == plan.steps):
                self._validate(step)
            self.saver.poll()
            if plan.steps is not None and step % every == 0:
                self._save()
        self.saver.wait()
        self.status.set(phase="writing the model")
        write_model(self.run_dir, self.config, state, self.own / "model")
        mesh.barrier()
        if mesh.main:
            shutil.rmtree(self.own / "checkpoints")
        self.status.set(phase="done")
        return DONE

    def _demand_data(self, sources: Sequence[Examples]) -> None:
        """CheckpointError on every rank where a resume would go on in other data."""
        self.data = data_of(self.plan, sources)
        with self.mesh.agree():
            if self.state.step:
                folder = self.own / "checkpoints" / f"step_{self.state.step}"
                named = ", ".join(s.source for s in sources)
                mend = f"saved amid other data than {named}; restore it, or remove {folder.parent} to start over"
                checkpoint.demand_same(folder, checkpoint.read_manifest(folder).data, self.data, mend)

    def _save(self) -> None:
        self.saver.start(self.state, data=self.data)
        self.saved = self.state.step

    def _batch(self, rollouts: Sequence[Rollout], step: int) -> Batch:
        """This rank's part."""
        rollouts = rollouts or [Rollout("", "", "", 0, 0, samples=[Sample.of_prompt([0])])]  # all were left out
        return pack(rollouts, step=step, budget=self.config.trainer.pack_tokens, ranks=self.mesh.shape.data)[self.mesh.stream]

    def _validate(self, step: int) -> None:
        """Mean cross-entropy over the trained tokens of the validation examples."""
        self.status.set(phase="validating")
        places = [(n, i) for n, source in enumerate(self.plan.validation) for i in range(len(source))]
        t0, size, total, tokens = time.monotonic(), self.plan.batch_size, 0.0, 0
        for first in range(0, min(len(places), self.plan.validation_examples), size):
            chosen = places[first : min(first + size, self.plan.validation_examples)]
            batch = self._batch(rollouts_of(self.plan.validation, chosen), step)
            total += self.stepper.evaluate(batch) * batch.counts.ce_tokens
            tokens += batch.counts.ce_tokens
        if self.mesh.main:
            seconds, loss = time.monotonic() - t0, total / tokens if tokens else None
            self.metrics.log("eval", split="validation", step=step, loss=loss, tokens=tokens, wall_s=seconds)

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
