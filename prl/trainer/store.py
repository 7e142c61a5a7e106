"""What RL and supervised fine-tuning share around the step: opening a state, checkpointing it, writing its model."""

from __future__ import annotations

import time
from pathlib import Path

from prl.config.mesh import MeshShape, resolve
from prl.config.schema import Optim, RunConfig
from prl.distributed.mesh import Mesh
from prl.kernels import registry
from prl.models.hf import save_hf
from prl.models.spec import read_spec
from prl.tokenizer import of_run
from prl.trainer import checkpoint
from prl.trainer.checkpoint import CheckpointError
from prl.trainer.ledger import LedgerError
from prl.trainer.nonfinite import NonFiniteError
from prl.trainer.state import TrainState
from prl.transport.batches import BatchError
from prl.transport.run_dir import RunDir
from prl.transport.weights import WeightStoreError

DONE, FAILED, SAVED = 0, 1, 75
EXPECTED = (NonFiniteError, CheckpointError, LedgerError, BatchError, WeightStoreError, TimeoutError)
"""Failures whose message says all; anything else is a fault of ours and keeps its traceback."""


def first_weights(run: RunDir, config: RunConfig) -> Path | None:
    """The folder that RL starts from; None: weights drawn from the seed."""
    return run / "sft" / "model" if config.sft is not None else config.model.path


def shape_of(config: RunConfig, start: Path | None) -> MeshShape:
    """How the trainer's ranks are laid out for the model at `start`; MeshError where they cannot be."""
    return resolve(config.trainer, read_spec(start or config.model.architecture or {}).n_experts)


def open_state(folder: RunDir, config: RunConfig, optim: Optim, mesh: Mesh, start: Path | None) -> TrainState:
    """The state of the newest complete checkpoint below `folder`, else of the model at `start` (None: first weights).

    A collective. CheckpointError where the newest one is damaged or of another model: nothing older is taken in silence.
    KernelError where a backend is demanded that cannot run here.
    """
    registry.backends(mesh.device.type)
    saved = checkpoint.latest_complete(folder)
    state = TrainState(config, optim, mesh, start, filled=saved is None)
    if saved is not None:
        if mesh.main:
            checkpoint.verify(saved)
        mesh.barrier()
        state.load(saved / checkpoint.TRAINER)
    return state


def save_state(folder: RunDir, config: RunConfig, state: TrainState, orchestrator: bytes | None = None) -> None:
    """Checkpoint a state below `folder`, rank 0 with the orchestrator's half; a collective."""
    mesh = state.mesh
    if mesh.main:
        manifest = checkpoint.Manifest(
            run=config.run.name,
            step=state.step,
            version=state.version,
            lineage=state.lineage,
            ranks=mesh.world,
            architecture=state.spec.architecture,
            t=time.time(),
        )
        checkpoint.write(folder, manifest, state.save, orchestrator, keep=config.checkpoint.keep)
    else:
        state.save(checkpoint.draft(folder, state.step) / checkpoint.TRAINER)
    mesh.barrier()


def write_model(run: RunDir, config: RunConfig, state: TrainState, folder: Path) -> None:
    """The weights as a Hugging Face folder with the run's tokenizer, whole or not at all; a collective."""
    if not state.mesh.main:
        state.join_gathering()
        return
    tokenizer = run / "tokenizer"
    if not tokenizer.exists():
        of_run(config).save(tokenizer)
    save_hf(folder, state.spec, state.tensors(), tokenizer_from=tokenizer)
