"""Supervised fine-tuning on the trainer's step: every token of the examples is read by cross-entropy."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prl.config.schema import Optim, RunConfig
from prl.distributed.mesh import join
from prl.kernels import registry
from prl.models.base import Model
from prl.models.hf import save_hf
from prl.samples import CE, Rollout, Sample, concatenate, pack
from prl.trainer import checkpoint
from prl.trainer.checkpoint import CheckpointError
from prl.trainer.nonfinite import Guard, NonFiniteError
from prl.trainer.state import TrainState, make_model
from prl.trainer.step import Stepper
from prl.trainer.train import DONE, FAILED, SAVED, tokenizer_folder
from prl.transport.run_dir import RunDir

log = logging.getLogger(__name__)


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


def example(prompt: np.ndarray, answer: np.ndarray) -> Sample:
    """Prompt and answer, ids int32 [P] and [A]; the answer, its end-of-text token included, is what is trained."""
    shown = Sample.of_prompt(answer)
    shown.trainable[:] = True
    shown.versions[:] = 0
    sample = concatenate([Sample.of_prompt(prompt), shown])
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
    examples: Sequence[Sample],
    stop: threading.Event,
    *,
    solve_rate: Callable[[Model], float] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Train as planned, on one process, and write the model. Exit code: 0 done, 75 stopped and resumable, 1 failed."""
    folder = run / plan.role
    if (folder / "model").exists():
        return DONE
    metrics = run.metrics(plan.role)
    status = run.status(plan.role, metrics)
    status.set(phase="loading")
    own = RunDir(folder)
    (own / "checkpoints").mkdir(parents=True, exist_ok=True, mode=0o700)
    mesh = join(run, 0, 1, timeout_s=0, wait_timeout_s=0)
    saved = checkpoint.latest_complete(own)
    state = TrainState(make_model(config, mesh, plan.start, filled=saved is None), config, plan.optim, mesh)
    stepper = Stepper(state, config.trainer, plan.steps or 0, beat=status.beat)
    guard = Guard(folder / "nonfinite", config.trainer.max_nonfinite)

    def save() -> None:
        manifest = checkpoint.Manifest(
            run.id, state.step, state.version, state.lineage, mesh.world, state.spec.architecture, time.time()
        )
        checkpoint.write(own, manifest, state.save, None, keep=config.checkpoint.keep)

    try:
        if saved is not None:
            checkpoint.verify(saved)
            state.load(saved / checkpoint.TRAINER)
        rollouts = [Rollout(str(i), "", "", i, 0, samples=[s]) for i, s in enumerate(examples)]
        began = clock()
        while state.step < plan.steps if plan.steps is not None else clock() - began < (plan.seconds or 0):
            if stop.is_set():
                if plan.steps is not None:
                    save()
                status.set(phase="saved")
                return SAVED
            chosen = order(plan.seed, len(rollouts), plan.batch_size, state.step + 1)
            (batch,) = pack([rollouts[i] for i in chosen], step=state.step + 1, budget=config.trainer.pack_tokens, ranks=1)
            status.set(phase="training", step=batch.step)
            report = stepper(batch)
            metrics.log("step", step=batch.step, backend=registry.backends(), **report.metrics)
            if report.skipped:
                metrics.log("event", name="nonfinite", step=batch.step, dump=str(guard.dump(batch, 0, report.skipped)))
                guard.check(state.skipped)
            if solve_rate is not None and plan.measure_every and state.step % plan.measure_every == 0:
                status.set(phase="evaluating")
                t0, rate = time.monotonic(), solve_rate(state.model)
                metrics.log("eval", split="dev", step=state.step, greedy=rate, complete=True, wall_s=time.monotonic() - t0)
                if rate >= plan.stop_at:
                    break
            if plan.steps is not None and state.step % config.checkpoint.every == 0:
                save()
        status.set(phase="writing the model")
        save_hf(folder / "model", state.spec, state.tensors(), tokenizer_from=tokenizer_folder(run, config))
        shutil.rmtree(own / "checkpoints")
        status.set(phase="done")
        return DONE
    except (NonFiniteError, CheckpointError) as e:
        log.error("%s: %s", plan.role, e)
        metrics.log("event", name="failed", error=str(e))
        return FAILED
