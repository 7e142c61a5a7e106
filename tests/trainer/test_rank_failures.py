"""What one rank of two finds wrong ends both, at once and with its message."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from prl.config.mesh import resolve
from prl.config.schema import RunConfig
from prl.distributed.mesh import RankError, lay_out
from prl.monitor.metrics import Metrics
from prl.samples import pack
from prl.trainer import checkpoint, store
from prl.trainer.ledger import Ledger
from prl.trainer.nonfinite import Guard
from prl.trainer.state import TrainState
from prl.trainer.step import StepReport
from prl.trainer.store import open_state
from prl.trainer.train import Trainer
from prl.transport import weights
from prl.transport.run_dir import RunDir
from prl.transport.versions import VersionLog
from prl.transport.weights import WeightStore, WeightStoreError
from tests.distributed.ranks import Ranks
from tests.trainer.helpers import ARCHITECTURE, EXPERTS, config, rollouts, run_dir, saver_of


def changed(**model: Any) -> RunConfig:
    c = config("float32", ranks=2)
    return c.model_copy(update={"model": c.model.model_copy(update=model)})


C = config("float32", ranks=2)
Damage = Callable[[Path], None]


def part_of(rank: int) -> Callable[[Path], Path]:
    return lambda folder: folder / checkpoint.TRAINER / f"__{rank}_0.distcp"


def cut(folder: Path) -> None:
    path = part_of(1)(folder)
    path.write_bytes(path.read_bytes()[:-100])


def flip(rank: int) -> Damage:
    def damage(folder: Path) -> None:
        data = bytearray(part_of(rank)(folder).read_bytes())
        data[len(data) // 2] ^= 1
        part_of(rank)(folder).write_bytes(data)

    return damage


def unnamed(folder: Path) -> None:
    """A shard is gone and the manifest does not know that there was one: only reading shows it."""
    path = folder / checkpoint.MANIFEST
    manifest = checkpoint.read_manifest(folder)
    files = {name: file for name, file in manifest.files.items() if "__1_" not in name}
    path.write_bytes(checkpoint.msgspec.json.encode(checkpoint.msgspec.structs.replace(manifest, files=files)))
    part_of(1)(folder).unlink()


def foreign(folder: Path) -> None:
    path = folder / checkpoint.MANIFEST
    path.write_text(path.read_text().replace("glm4_moe", "qwen3_moe"))


LOADS: dict[str, tuple[Damage, RunConfig, str]] = {
    "cut": (cut, C, r"__1_0.distcp: \d+ bytes, the manifest says \d+: cut or changed.*or remove it"),
    "damaged, rank 0's": (flip(0), C, "__0_0.distcp: its checksum is not the manifest's: damaged.*or remove it"),
    "damaged, rank 1's": (flip(1), C, "__1_0.distcp: its checksum is not the manifest's: damaged.*or remove it"),
    "missing": (lambda f: part_of(1)(f).unlink(), C, "__1_0.distcp: missing; the manifest names it.*or remove it"),
    "missing, unnamed": (unnamed, C, "trainer: cannot be read: .*__1_0.distcp"),
    "open to others": (lambda f: f.chmod(0o777), C, "mode 777; expected owner .* pickle"),
    "another width": (
        lambda f: None,
        changed(architecture=ARCHITECTURE | {"moe_intermediate_size": 24}),
        r"go on with the configuration.*:\n  moe_intermediate_size: 24 here, 16 in the checkpoint",
    ),
    "another scaling": (
        lambda f: None,
        changed(architecture=ARCHITECTURE | {"routed_scaling_factor": 2.5, "rope_theta": 1e6}),
        r"computes otherwise; go .*:\n  rope_theta: 1000000.0 here, 10000.0 .*\n  routed_scaling_factor: 2.5 here, 1.0 ",
    ),
    "another optimizer": (lambda f: None, config("float32", ranks=2, optim={"kind": "sgd"}), r"optimizer\.\S+: nothing here"),
    "another model": (foreign, C, "of a model qwen3_moe, this run's is glm4_moe; go on with the configuration"),
}


@contextlib.contextmanager
def told(out: list[tuple[str, float]]) -> Iterator[None]:
    t0 = time.monotonic()
    try:
        yield
    except Exception as e:
        out.append((f"{type(e).__name__}: {e}", time.monotonic() - t0))
    else:
        out.append(("nothing", time.monotonic() - t0))


def fail(*_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device")


def both(rank: int, root: str) -> list[tuple[str, float]]:
    """What this rank is told, case by case; the group must be sound after each."""
    mesh = lay_out(resolve(C.trainer, EXPERTS), rank, torch.device("cpu"))
    out: list[tuple[str, float]] = []
    state = TrainState(C, C.trainer.optim, mesh)
    state.step = 2
    saver = saver_of(RunDir(root), C, mesh)
    saver.start(state)
    saver.wait()
    for i, (damage, c, _) in enumerate(LOADS.values()):
        run = RunDir(f"{root}/{i}")
        if mesh.main:
            shutil.copytree(f"{root}/checkpoints", run / "checkpoints")
            damage(run / "checkpoints" / "step_2")
        mesh.barrier()
        with told(out):
            open_state(run, c, c.trainer.optim, mesh, None)
    for here, where, name in FAULTS:
        with told(out), mock.patch.object(where, name, fail) if rank == here else contextlib.nullcontext():
            if where is store:
                open_state(RunDir(root), C, C.trainer.optim, mesh, None)
            else:
                state.step = 4
                saver.start(state)
                saver.wait()
    with told(out):
        saver.start(state)
        saver.wait()
        assert open_state(RunDir(root), C, C.trainer.optim, mesh, None).step == 4
    return out


FAULTS = [
    (1, store, "TrainState"),
    (0, checkpoint, "begin"),
    (1, TrainState, "saved"),
    (1, os, "fsync"),
    (1, checkpoint, "checksums"),
    (0, checkpoint, "commit"),
]
"""(rank, object, function) that fails there alone."""


@pytest.fixture(scope="module")
def answers(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[list[tuple[str, float]]]:
    return ranks.run(2, both, str(run_dir(tmp_path_factory.mktemp("failures")).root), timeout_s=100)


@pytest.mark.parametrize("case", LOADS)
def test_a_checkpoint_that_one_rank_finds_wrong_is_refused_by_both(case: str, answers: list[list[tuple[str, float]]]) -> None:
    for rank, told in enumerate(answers):
        text, seconds = told[list(LOADS).index(case)]
        assert pytest.raises(Exception, match=LOADS[case][2]).matches(Exception(text)), (rank, text)
        assert seconds < 30, "not by a timeout"


@pytest.mark.parametrize("i", range(len(FAULTS)), ids=lambda i: f"{FAULTS[i][2]} on rank {FAULTS[i][0]}")
def test_a_fault_of_one_rank_ends_both(i: int, answers: list[list[tuple[str, float]]]) -> None:
    for rank, told in enumerate(answers):
        text, seconds = told[len(LOADS) + i]
        assert "No space left on device" in text and seconds < 30, (rank, text)
        assert rank == FAULTS[i][0] or f"rank {FAULTS[i][0]}: " in text, (rank, text)


def test_after_every_failure_the_next_checkpoint_is_whole(answers: list[list[tuple[str, float]]]) -> None:
    assert [told[-1][0] for told in answers] == ["nothing"] * 2


WRITES: list[tuple[int, Any, str, bool]] = [
    (0, VersionLog, "allocate", False),
    (0, weights, "save_file", False),
    (0, Ledger, "step", True),
    (0, Metrics, "log", True),
    (1, Guard, "dump", True),
]
"""(rank, object, function, whether it is recording and not publishing that fails) while a run trains."""


def trains(rank: int, root: str) -> list[tuple[str, float]]:
    mesh = lay_out(resolve(C.trainer, EXPERTS), rank, torch.device("cpu"))
    run = RunDir(root)
    metrics = run.metrics(f"trainer-{rank}")
    status = run.status(f"trainer-{rank}", metrics)
    out: list[tuple[str, float]] = []
    with Trainer(run, C, mesh, threading.Event(), metrics, status) as trainer:
        trainer.client = mock.Mock()
        batch = pack(rollouts(1), step=1, budget=64, ranks=2)[rank]
        report = StepReport(0.0, 0.0, "the loss is nan", {"time": {}})
        for here, where, name, recording in WRITES:
            trainer.client.reset_mock()
            failing = mock.patch.object(where, name, fail) if rank == here else contextlib.nullcontext()
            with told(out), failing:
                trainer._record(batch, report, 0, {}) if recording else trainer._publish()
            assert not trainer.client.trained.called, "not acknowledged"
        with told(out):
            trainer._publish()
            trainer._record(batch, report, 0, {})
        assert trainer.client.trained.called
    return out


def test_what_one_rank_cannot_write_while_it_trains_ends_both(ranks: Ranks, tmp_path: Path) -> None:
    run = run_dir(tmp_path)
    answers = ranks.run(2, trains, str(run.root), timeout_s=60)
    for i, (here, *_) in enumerate(WRITES):
        for rank, each in enumerate(answers):
            text, seconds = each[i]
            assert "No space left on device" in text and seconds < 30, (rank, text)
            assert rank == here or text.startswith(f"RankError: rank {here}: "), (rank, text)
    assert [each[-1][0] for each in answers] == ["nothing"] * 2, "the group is sound after each"
    assert WeightStore(run, C.transport).versions() == [1], "0 could not be written"


def test_what_failed_is_told_where_nothing_can_be_written_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_dir(tmp_path)
    metrics = run.metrics("trainer")
    status = run.status("trainer", metrics)
    monkeypatch.setattr(Path, "replace", fail)
    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(WeightStoreError, match="v7"), status.failing(but=RankError):
        raise WeightStoreError("v7")
    assert not list((run / "status").glob("*.tmp"))
    store.tell_failure(metrics, WeightStoreError("v7"))
    with pytest.raises(OSError, match=r"No space left on device: '.*metrics\.jsonl'"):
        metrics.log("event")
