"""What RL and supervised fine-tuning share around the step: opening a state, checkpointing it, writing its model."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from prl.config.mesh import MeshShape
from prl.config.schema import Optim, RunConfig
from prl.distributed.mesh import Mesh, RankError
from prl.kernels import registry
from prl.models.hf import save_hf
from prl.models.spec import read_spec
from prl.monitor.metrics import Metrics
from prl.monitor.status import Status
from prl.plan.search import here, shape_for
from prl.tokenizer import of_run
from prl.trainer import checkpoint
from prl.trainer.checkpoint import CheckpointError, Manifest
from prl.trainer.drift import DriftError
from prl.trainer.ledger import LedgerError
from prl.trainer.nonfinite import NonFiniteError
from prl.trainer.state import TrainState, failures
from prl.transport.batches import BatchError
from prl.transport.run_dir import RunDir
from prl.transport.versions import VersionError
from prl.transport.weights import WeightStoreError

log = logging.getLogger(__name__)
DONE, FAILED, SAVED = 0, 1, 75
EXPECTED = (
    *(DriftError, NonFiniteError, CheckpointError, LedgerError, VersionError, BatchError, WeightStoreError, RankError),
    OSError,  # a full disk, say
)
"""Failures whose message says all; anything else is a fault of ours and keeps its traceback."""


def tell_failure(metrics: Metrics, error: BaseException) -> None:
    """Why a rank ends: in its log, with the traceback where no file is named, and in the metrics if they can be written."""
    bare = isinstance(error, OSError) and not isinstance(error, TimeoutError) and error.filename is None
    log.error("%s", error, exc_info=error if bare else None)
    with contextlib.suppress(OSError):
        metrics.log("event", name="failed", error=str(error))


def first_weights(run: RunDir, config: RunConfig) -> Path | None:
    """The folder that RL starts from; None: weights drawn from the seed."""
    return run / "sft" / "model" if config.sft is not None else config.model.path


def shape_of(config: RunConfig, start: Path | None) -> MeshShape:
    """How the trainer's ranks are laid out for the model at `start`; MeshError where they cannot be."""
    return shape_for(read_spec(start or config.model.architecture or {}), config, here())


def open_state(folder: RunDir, config: RunConfig, optim: Optim, mesh: Mesh, start: Path | None) -> TrainState:
    """The state of the newest complete checkpoint below `folder`, else of the model at `start` (None: first weights).

    A collective: what fails on one rank fails on all. CheckpointError where the newest one is damaged or of another model:
    nothing older is taken in silence. KernelError where a backend is demanded that cannot run here.
    """
    with mesh.agree():
        registry.backends(mesh.device.type)
        newest = checkpoint.latest_complete(folder)
    saved = mesh.gather_objects(newest)[0]  # rank 0's word: a shared file system may show others an older one
    with mesh.agree():
        state = TrainState(config, optim, mesh, start, filled=saved is None)
    if saved is not None:
        with mesh.agree():
            manifest = checkpoint.verify(saved, share=(mesh.rank, mesh.world))
            if manifest.architecture != state.spec.architecture:
                raise CheckpointError(
                    f"{saved}: of a model {manifest.architecture}, this run's is {state.spec.architecture}; "
                    "go on with the configuration that it was saved by, or start a new run"
                )
            checkpoint.demand_same(
                saved,
                manifest.reads,
                state.reads(),
                "of a model that computes otherwise; go on with the configuration that it was saved by, or start a new run",
            )
        state.load(saved / checkpoint.TRAINER)
    return state


class Saver:
    """Writes checkpoints below `folder` while the steps go on, one at a time.

    `start` copies the state to host memory and returns; a thread of every rank writes that rank's part, and once all parts are
    on disk rank 0's gives the checkpoint its manifest. At a later safe point the ranks agree on how it went. Every rank calls
    every method at the same safe points. Threads talk in a group of their own, so that no collective of the step waits.
    """

    def __init__(self, folder: RunDir, config: RunConfig, mesh: Mesh, metrics: Metrics, status: Status):
        self.folder, self.config, self.mesh, self.metrics, self.status = folder, config, mesh, metrics, status
        timeout = timedelta(seconds=config.launch.wait_timeout_s)
        self.group = dist.new_group(backend="gloo", timeout=timeout) if mesh.world > 1 else None
        cuda = mesh.device.type == "cuda"
        # It keeps its memory from one checkpoint to the next, since pinning is slow.
        options = StagingOptions(cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=cuda)
        self.stager = DefaultStager(options) if config.checkpoint.asynchronous else None
        self.writing: Future[None] | None = None
        self.step, self.began = 0, 0.0
        """Of the checkpoint that is being written, or was last."""

    def start(self, state: TrainState, orchestrator: bytes | None = None, data: Mapping[str, Any] | None = None) -> None:
        """Checkpoint a state, rank 0 with the orchestrator's half, `data` for the manifest; first wait for one that is being
        written."""
        self.wait()
        manifest = Manifest(
            run=self.config.run.name,
            step=state.step,
            version=state.version,
            lineage=state.lineage,
            ranks=self.mesh.world,
            architecture=state.spec.architecture,
            t=time.time(),
            reads=state.reads(),
            data=dict(data or {}),
        )
        with self.metrics.span("checkpoint", step=state.step), self.mesh.agree():
            parts = state.saved()
            if self.stager is not None:
                parts = cast(dict[str, Tensor], self.stager.stage(parts))
        self.step, self.began = state.step, time.monotonic()
        self.writing = Future()
        # A daemon: a process that fails for another reason does not wait for a disk that hangs.
        threading.Thread(
            target=self._run, args=(self.writing, parts, manifest, orchestrator), name="checkpoint", daemon=True
        ).start()
        if self.stager is None:
            self.wait()

    def poll(self) -> None:
        """Look without waiting whether the checkpoint is written. CheckpointError on every rank where it could not be."""
        if self.writing is not None and not self.mesh.any(not self.writing.done()):
            self._finish(self.writing)

    def wait(self) -> None:
        """Until no checkpoint is being written; else as `poll`."""
        if self.writing is not None:
            with self.status.waiting(f"the checkpoint of step {self.step} to be written"):
                while not self.writing.done():
                    wait([self.writing], 0.2)
                    self.status.beat()
            self._finish(self.writing)

    def close(self) -> None:
        """Give a checkpoint in the making a last chance, whatever has ended the steps; says what became of it."""
        if self.writing is not None:
            done, _ = wait([self.writing], self.config.launch.stop_timeout_s)
            error = self.writing.exception() if done else "not written in time"
            if error:
                log.warning("the checkpoint of step %d is lost: %s", self.step, error)

    def _finish(self, writing: Future[None]) -> None:
        self.writing = None
        with self.mesh.agree():
            if (error := writing.exception()) is not None:
                raise CheckpointError(f"checkpoint of step {self.step}: {error}") from error
        if self.mesh.main:
            self.metrics.log("event", name="checkpoint", step=self.step, seconds=time.monotonic() - self.began)

    # Below: the thread.

    def _run(self, writing: Future[None], parts: dict[str, Tensor], manifest: Manifest, orchestrator: bytes | None) -> None:
        try:
            self._write(parts, manifest, orchestrator)
        except BaseException as e:
            if self.mesh.main:
                checkpoint.abandon(self.folder, manifest.step)
            writing.set_exception(e)
        else:
            writing.set_result(None)

    def _write(self, parts: dict[str, Tensor], manifest: Manifest, orchestrator: bytes | None) -> None:
        mesh, trainer = self.mesh, checkpoint.draft(self.folder, manifest.step) / checkpoint.TRAINER
        with mesh.agree(self.group):
            if mesh.main:
                checkpoint.begin(self.folder, manifest.step)
        try:
            dcp.save(parts, checkpoint_id=trainer, process_group=self.group, no_dist=mesh.world == 1)
        except dcp.CheckpointException as e:  # DCP has every rank raise it
            raise CheckpointError(f"{trainer}: cannot be written: {failures(e)}; make room there, then resume") from e
        with mesh.agree(self.group):
            mine = [p.name for p in trainer.glob(f"__{mesh.rank}_*")] + [".metadata"] * mesh.main
            files = checkpoint.checksums(trainer, mine)
        every = mesh.gather_objects(files, self.group)
        with mesh.agree(self.group):
            if mesh.main:
                kept = self.config.checkpoint
                files = {name: file for part in every for name, file in part.items()}
                checkpoint.commit(self.folder, manifest, files, orchestrator, keep=kept.keep, keep_every=kept.keep_every)


def write_model(run: RunDir, config: RunConfig, state: TrainState, folder: Path) -> None:
    """The weights as a Hugging Face folder with the run's tokenizer, whole or not at all; a collective."""
    tokenizer = run / "tokenizer"
    with state.mesh.agree():
        if state.mesh.main:
            for left in folder.parent.glob(f"{folder.name}.tmp-*"):  # by a life that was killed amid it
                shutil.rmtree(left)
            if not tokenizer.exists():
                of_run(config).save(tokenizer)
    save_hf(folder, state.spec, state.parts(), tokenizer_from=tokenizer, mesh=state.mesh)
