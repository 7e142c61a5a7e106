"""The trainer of an RL run: one process a rank, one optimizer step a batch, one weight version a step."""

from __future__ import annotations

import logging
import threading
import time

import torch

from prl.config.schema import RunConfig
from prl.distributed.mesh import Mesh, RankError, join
from prl.kernels import registry
from prl.models import precision
from prl.monitor.metrics import Metrics
from prl.monitor.status import Status
from prl.samples import Batch
from prl.trainer.checkpoint import CheckpointError
from prl.trainer.drift import Drift, DriftError
from prl.trainer.ledger import Ledger
from prl.trainer.nonfinite import Guard
from prl.trainer.state import TrainState
from prl.trainer.step import Stepper, StepReport
from prl.trainer.store import (
    DONE,
    EXPECTED,
    FAILED,
    SAVED,
    Saver,
    first_weights,
    open_state,
    shape_of,
    tell_failure,
    write_model,
)
from prl.transport.batches import BatchClient, BatchError, Finish
from prl.transport.run_dir import RunDir
from prl.transport.versions import VersionError, VersionLog
from prl.transport.weights import WeightStore

log = logging.getLogger(__name__)


def main(run: RunDir, config: RunConfig, index: int, stop: threading.Event) -> int:
    """Rank `index` of the trainer until the orchestrator ends the run (its code), `stop` is set (75), or a failure (1)."""
    role = "trainer" if index == 0 else f"trainer-{index}"
    metrics = run.metrics(role)
    status = run.status(role, metrics)
    launch, shape = config.launch, shape_of(config, first_weights(run, config))
    try:
        with (
            join(run, index, shape, start_s=launch.start_timeout_s, wait_s=launch.wait_timeout_s) as mesh,
            status.failing(but=RankError),
            Trainer(run, config, mesh, stop, metrics, status) as trainer,
        ):
            return trainer.run()
    except EXPECTED as e:
        tell_failure(metrics, e)
        return FAILED


class _Stopped(Exception):
    pass


class Trainer:
    """One rank. Between two steps weights, ledger and checkpoints agree on `state.step`; rank 0 alone writes them."""

    def __init__(self, run: RunDir, config: RunConfig, mesh: Mesh, stop: threading.Event, metrics: Metrics, status: Status):
        self.run_dir, self.config, self.mesh, self.stop = run, config, mesh, stop
        self.metrics, self.status = metrics, status
        with mesh.agree():
            self.versions = VersionLog(run / "versions.jsonl")
            self.weights = WeightStore(run, config.transport)
            self.ledger = Ledger(run / "ledger.jsonl") if mesh.main else None
        status.set(phase="loading")
        self.state = self._open()
        self.stepper = Stepper(self.state, config.trainer, config.trainer.steps, beat=status.beat)
        self.drift = Drift(run, config, metrics)
        self.guard = Guard(run / "nonfinite", config.trainer.max_nonfinite)
        self.saver = Saver(run, config, mesh, metrics, status)
        self.orchestrator: bytes | None = None
        """The orchestrator's half of a checkpoint of `state.step`."""
        self.saved = self.state.step
        """The newest step whose checkpoint is complete or being written."""
        self.client: BatchClient | None = None

    def run(self) -> int:
        with self.mesh.agree():
            if self.mesh.main:
                self._tell_precision()
        self._publish()
        if self.mesh.any(not self._connect()):
            return self._end(SAVED)
        while True:
            t0 = time.perf_counter()
            with self.mesh.agree():
                got = self._next()
            if self.mesh.any(got is None):
                return self._end(SAVED)
            if got is None or isinstance(got, Finish):
                return self._end(got.code if got else SAVED)
            batch, self.orchestrator = got
            t1 = time.perf_counter()
            with self.metrics.span("train", step=batch.step):
                trained = self.state.version
                report = self.stepper(batch)
            with self.metrics.span("publish", step=batch.step):
                publish_s = self._publish()
            self._record(batch, report, trained, {"wait": t1 - t0, "publish": publish_s})
            self.saver.poll()
            if self._due():
                self._save()
            self.guard.check(self.state.skipped)
            if self.config.monitor.drift == "stop" and self.mesh.any(bool(self.drift.alarm)):
                self._end(SAVED)
                raise DriftError(self.drift.alarm or "trainer and engine drift apart: rank 0 says how")

    def _open(self) -> TrainState:
        """The state to go on from: the newest complete checkpoint, else the run's first weights. A resume is put on record."""
        run, config = self.run_dir, self.config
        state = open_state(run, config, config.trainer.optim, self.mesh, first_weights(run, config))
        with self.mesh.agree():
            if state.step and not self._known(state):
                raise CheckpointError(
                    f"{self.versions.path}: does not say that version {state.version} is of step {state.step}, as the newest "
                    "checkpoint does: cut, damaged or of another run; ids would be used twice"
                )
            if self.ledger is not None and self.versions.current() is not None:
                state.lineage = self.versions.lineage(state.step)
                self.ledger.resume(step=state.step, lineage=state.lineage)
                self.metrics.log("event", name="resume", step=state.step, lineage=state.lineage)
        return state

    def _tell_precision(self) -> None:
        """Which layers are FP8 here and in engines: in full in the log and in precision.json, in numbers in the metrics."""
        engine = precision.layers_of(self.state.coded)
        self.run_dir.record_precision(trainer=self.state.fp8, engine=engine)
        for who, layers in (("the trainer", self.state.fp8), ("engines", engine)):
            log.info("FP8 in %s: %s", who, precision.shortened(layers) or "no layers")
        if self.state.fp8 or engine:
            self.metrics.log("event", name="precision", trainer=len(self.state.fp8), engine=len(engine))

    def _known(self, state: TrainState) -> bool:
        try:
            return self.versions.step_of(state.version) == state.step
        except VersionError:
            return False

    def _publish(self) -> float:
        """A new version of the weights, its id on disk first. Returns the seconds it took."""
        t0, state = time.perf_counter(), self.state
        with self.mesh.agree():
            version = self.versions.allocate(state.step) if self.mesh.main else 0
        # The sum also makes every rank wait for the slowest one's optimizer step.
        state.version = int(self.mesh.sum(torch.tensor([version], device=self.mesh.device)).item())
        tensors = state.transfer()
        with self.mesh.agree():
            try:
                if self.mesh.main:
                    self.weights.publish(version, state.step, tensors, fp8=state.fp8)
            finally:  # what cannot be written is gathered to its end, since the others do
                state.join_gathering(tensors)
        return time.perf_counter() - t0

    def _connect(self) -> bool:
        """Find the orchestrator; False if this rank is asked to stop meanwhile."""
        start_s = self.config.launch.start_timeout_s
        try:
            with self.status.waiting("the orchestrator's address"):
                self.client = BatchClient(
                    self.run_dir, self.mesh.rank, self.mesh.world, timeout_s=start_s, on_wait=self._on_wait
                )
        except _Stopped:
            return False
        return True

    def _on_wait(self) -> None:
        self.status.beat()
        if self.stop.is_set():
            raise _Stopped

    def _next(self) -> tuple[Batch, bytes | None] | Finish | None:
        """The next step's batch or the end; None if this rank is asked to stop."""
        assert self.client is not None
        step = self.state.step + 1

        self.status.set(phase="training", step=step)
        try:
            if self.stop.is_set():
                return None
            with self.status.waiting(f"batch {step} from the orchestrator"):
                got = self.client.get(step, self.config.launch.wait_timeout_s, on_wait=self._on_wait)
        except _Stopped:
            return None
        if not isinstance(got, Finish):
            longest, most = max(int(mb.lengths.max()) for mb in got[0].micro_batches), self.config.trainer.pack_tokens
            if longest > most:
                raise BatchError(
                    f"step {step}: a sequence of {longest} tokens, trainer.pack_tokens is {most}: raise it, or have "
                    "sampling.max_length cut sequences earlier"
                )
        return got

    def _record(self, batch: Batch, report: StepReport, trained: int, seconds: dict[str, float]) -> None:
        """Ledger and metrics, then acknowledgement. `trained` is the version that the step started from."""
        state = self.state
        with self.mesh.agree():
            if report.skipped:
                dump = self.guard.dump(batch, self.mesh.rank, report.skipped)
                log.warning("step %d skipped: %s; its batch is in %s", batch.step, report.skipped, dump)
                self.metrics.log("event", name="nonfinite", step=batch.step, reason=report.skipped, dump=str(dump))
            if self.ledger is not None:
                self.ledger.step(
                    step=batch.step,
                    version=state.version,
                    lineage=state.lineage,
                    rollouts=batch.rollout_ids,
                    checksum=batch.checksum,
                    loss=report.loss,
                    skipped=bool(report.skipped),
                )
                record = {**report.metrics, "time": {**report.metrics["time"], **seconds}}
                record["drift"] = self.drift(batch, record)
                self.metrics.log(
                    "step",
                    step=batch.step,
                    version=state.version,
                    trained_version=trained,
                    backend=registry.backends(self.mesh.device.type),
                    **record,
                )
        assert self.client is not None
        self.client.trained(batch.step, state.version, {"loss": report.loss, "grad_norm": report.grad_norm})

    def _due(self) -> bool:
        step = self.state.step
        return step % self.config.checkpoint.every == 0 and self._can_save()

    def _can_save(self) -> bool:
        """Whether rank 0 holds the orchestrator's half of this step and has not saved it; all ranks must ask."""
        return self.mesh.any(self.orchestrator is not None and self.saved < self.state.step)

    def _save(self) -> None:
        self.status.set(phase="saving")
        self.saver.start(self.state, self.orchestrator)
        self.saved = self.state.step

    def _end(self, code: int) -> int:
        """Save what can be saved; after a finished run write the model as a Hugging Face folder too."""
        if self._can_save():
            self._save()
        elif self.saved < self.state.step:
            log.warning(
                "step %d cannot be saved without the orchestrator's half; a resume starts from %d", self.state.step, self.saved
            )
        self.saver.wait()
        if code == DONE:
            self.status.set(phase="writing the model")
            write_model(self.run_dir, self.config, self.state, self.run_dir / "model")
        if self.client is not None:
            try:
                self.client.flush(2.0)
            except (TimeoutError, BatchError) as e:
                self.metrics.log("event", name="unacknowledged", error=str(e))
        self.status.set(phase="done" if code == DONE else "saved")
        return code

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.saver.close()
        if self.client is not None:
            self.client.close()
        if self.ledger is not None:
            self.ledger.close()
