"""Checkpoints: bit for bit, complete or not there, and refused by name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch.distributed.checkpoint import CheckpointException

from prl.samples import pack
from prl.trainer import checkpoint, store
from prl.trainer.checkpoint import TRAINER, CheckpointError, Manifest
from prl.trainer.state import TrainState
from tests.trainer.helpers import (
    ARCHITECTURE,
    bits,
    config,
    rollouts,
    run_dir,
    saver_of,
    state_of,
    stepper_of,
    write_checkpoint,
)

MANIFEST = Manifest(run="r", step=2, version=2, lineage=0, ranks=1, architecture="glm4_moe", t=0.0)


@pytest.fixture(scope="module")
def trained() -> TrainState:
    stepper = stepper_of(config("float32", bias_update=0.01))
    for step in (1, 2):
        stepper(pack(rollouts(step), step=step, budget=64, ranks=1)[0])
    return stepper.state


def save(root: Path, state: TrainState, step: int = 2) -> Path:
    run = run_dir(root)
    state.step = step
    saver = saver_of(run, config("float32"))
    saver.start(state, b"orchestrator %d" % step)
    saver.wait()
    return run / "checkpoints" / f"step_{step}"


def test_a_checkpoint_reads_back_bit_for_bit_and_trains_on_the_same(tmp_path: Path) -> None:
    c = config("float32", bias_update=0.01)
    stepper = stepper_of(c)
    batches = [pack(rollouts(step), step=step, budget=64, ranks=1)[0] for step in (1, 2, 3)]
    for batch in batches[:2]:
        stepper(batch)
    torch.rand(3)
    folder = save(tmp_path, stepper.state)
    assert checkpoint.verify(folder).step == 2 and checkpoint.orchestrator_state(folder) == b"orchestrator 2"
    expected, noise = bits(stepper.state), torch.get_rng_state()
    third = stepper(batches[2]).loss
    fresh = stepper_of(c)
    torch.rand(5)
    fresh.state.load(folder / TRAINER)
    assert bits(fresh.state) == expected and torch.equal(torch.get_rng_state(), noise)
    assert (fresh.state.step, fresh.state.skipped) == (2, 0)
    assert fresh(batches[2]).loss == third and bits(fresh.state) == bits(stepper.state)


def test_state_of_adamw_is_saved_before_the_first_step(tmp_path: Path) -> None:
    state = state_of(config("float32", optim={"lr": 0.0}))
    folder = save(tmp_path, state)
    state.load(folder / TRAINER)
    assert len(bits(state)) == 2 + len(state.model.state_dict()) + 3 * len(state.params)


def test_the_newest_complete_one_is_found_and_old_ones_go(tmp_path: Path, trained: TrainState) -> None:
    run = run_dir(tmp_path)
    assert checkpoint.latest_complete(run) is None
    for step in (2, 4, 10):
        save(tmp_path, trained, step)
    folder = run / "checkpoints"
    (folder / "step_12.tmp").mkdir()
    latest = checkpoint.latest_complete(run)
    assert latest is not None and latest.name == "step_10"
    assert sorted(p.name for p in folder.iterdir()) == ["step_10", "step_12.tmp", "step_4"]
    save(tmp_path, trained, 14)
    assert sorted(p.name for p in folder.iterdir()) == ["step_10", "step_14"]


def test_one_that_lost_its_manifest_is_an_error_until_it_is_removed(tmp_path: Path, trained: TrainState) -> None:
    run, older, newer = run_dir(tmp_path), save(tmp_path, trained, 2), save(tmp_path, trained, 4)
    (newer / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"step_4/manifest.json: missing; restore \S*step_4, or remove it to go on from"):
        checkpoint.latest_complete(run)
    newest = save(tmp_path, trained, 6)
    assert checkpoint.latest_complete(run) == newest and newer.is_dir(), "nothing that may be wanted is taken away"
    for folder in (newest, newer):
        shutil.rmtree(folder)
    assert checkpoint.latest_complete(run) == older


KILLED = """
import os, sys
from pathlib import Path
from prl.trainer import checkpoint
from prl.transport.run_dir import RunDir

at, calls = int(sys.argv[2]), 0

def count(name, *rest):
    global calls
    watched = {"mkdir", "os.rename", "open"}
    if name in watched and "step_4" in str(rest[0][0]):
        calls += 1
        if calls == at:
            os._exit(9)

run, names = RunDir(Path(sys.argv[1])), [f"{i}.distcp" for i in range(3)]
sys.addaudithook(count)
folder = checkpoint.begin(run, 4)
for name in names:
    (folder / name).write_bytes(b"x" * 100)
manifest = checkpoint.Manifest("r", 4, 4, 0, 1, "glm4_moe", 0.0)
checkpoint.commit(run, manifest, checkpoint.checksums(folder, names), b"state", keep=2)
"""


def test_killed_at_any_file_the_last_complete_one_stays_the_latest(tmp_path: Path) -> None:
    """Death before every single folder, file and rename of a checkpoint, in a process of its own."""
    run = run_dir(tmp_path)

    def trainer(folder: Path) -> None:
        (folder / "0.distcp").write_bytes(b"y")

    write_checkpoint(run, MANIFEST, trainer, b"two")
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    survived = 0
    for at in range(1, 100):
        done = subprocess.run([sys.executable, script, tmp_path, str(at)], env=os.environ | {"PYTHONPATH": "."}, check=False)
        latest = checkpoint.latest_complete(run)
        assert latest is not None
        manifest = checkpoint.verify(latest)
        if done.returncode == 0:
            assert manifest.step == 4
            break
        assert done.returncode == 9
        survived += manifest.step == 2
        if manifest.step == 4:  # killed after the rename
            checkpoint._discard(latest)
    else:
        pytest.fail("the writer never finished")
    assert survived > 10


def damage_cut(folder: Path) -> None:
    path = next((folder / TRAINER).glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:-1])


def damage_byte(folder: Path) -> None:
    path = next((folder / TRAINER).glob("*.distcp"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage_missing(folder: Path) -> None:
    next((folder / TRAINER).glob("*.distcp")).unlink()


def damage_metadata(folder: Path) -> None:
    path = folder / TRAINER / ".metadata"
    path.write_bytes(path.read_bytes() + b"\n")


def open_folder(folder: Path) -> None:
    (folder / TRAINER).chmod(0o777)


def open_metadata(folder: Path) -> None:
    (folder / TRAINER).chmod(0o710)
    (folder / TRAINER / ".metadata").chmod(0o620)


def open_above(folder: Path) -> None:
    folder.parent.chmod(0o770)


def damage_name(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 3'))


def damage_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"step": 2}')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_cut, r"distcp: \d+ bytes, the manifest says \d+"),
        (damage_byte, "distcp: its checksum is not the manifest's"),
        (damage_missing, "distcp: missing"),
        (damage_metadata, r"\.metadata: \d+ bytes"),
        (open_folder, "trainer: owner .* mode 777; expected owner .* pickle"),
        (open_metadata, r"\.metadata: owner .* mode 620; expected owner .* pickle"),
        (open_above, "checkpoints: owner .* mode 770; expected owner .* pickle"),
        (damage_manifest, "manifest.json: cannot be read"),
        (damage_name, "says step 3, so its folder was step_3"),
    ],
)
def test_damage_is_named_before_anything_is_read(
    tmp_path: Path, trained: TrainState, damage: Callable[[Path], None], message: str
) -> None:
    folder = save(tmp_path, trained)
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.verify(folder)


def test_the_orchestrators_half_does_not_hang_on_the_trainers(tmp_path: Path, trained: TrainState) -> None:
    folder = save(tmp_path, trained)
    damage_cut(folder)
    assert checkpoint.orchestrator_state(folder) == b"orchestrator 2"
    (folder / checkpoint.ORCHESTRATOR).write_bytes(b"orchestrator 3")
    with pytest.raises(CheckpointError, match="orchestrator.bin: its checksum"):
        checkpoint.orchestrator_state(folder)


def test_another_model_or_optimizer_is_refused_with_the_tensors(tmp_path: Path, trained: TrainState) -> None:
    folder = save(tmp_path, trained) / TRAINER
    other = config("float32")
    wider = ARCHITECTURE | {"moe_intermediate_size": 24}
    cases = {
        r"experts.down_proj: float32 \[8, 32, 24\] here, float32 \[8, 32, 16\] in the checkpoint": other.model_copy(
            update={"model": other.model.model_copy(update={"architecture": wider})}
        ),
        r"optimizer\.\S+: nothing here, float32": config("float32", optim={"kind": "sgd"}),
        "float64 .* here, float32": config("float64"),
    }
    for message, c in cases.items():
        with pytest.raises(CheckpointError, match=message):
            state_of(c).load(folder)


def test_of_old_ones_the_newest_and_every_nth_stay(tmp_path: Path) -> None:
    run = run_dir(tmp_path)

    def trainer(folder: Path) -> None:
        (folder / "0.distcp").write_bytes(b"y")

    for step in range(2, 18, 2):
        write_checkpoint(run, replace(MANIFEST, step=step), trainer, keep=2, keep_every=6)
        assert checkpoint.complete(run)[-1][0] == step
    assert [step for step, _ in checkpoint.complete(run)] == [6, 12, 14, 16]


def test_the_folder_is_closed_to_others_whatever_the_umask(tmp_path: Path, trained: TrainState) -> None:
    before = os.umask(0o002)
    try:
        checkpoint.verify(save(tmp_path, trained))
    finally:
        os.umask(before)


class Slow:
    """torch.distributed.checkpoint.save that waits for a word, and then fails if told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.go, self.error, self.save = threading.Event(), None, store.dcp.save
        monkeypatch.setattr(store.dcp, "save", self)

    error: Exception | None

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        assert self.go.wait(30)
        if self.error is not None:
            raise self.error
        self.save(*args, **kwargs)


def test_steps_go_on_while_a_checkpoint_is_written_and_do_not_change_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, c, run = Slow(monkeypatch), config("float32"), run_dir(tmp_path)
    stepper, saver = stepper_of(c), saver_of(run, c)
    batches = [pack(rollouts(step), step=step, budget=64, ranks=1)[0] for step in (1, 2, 3)]
    stepper(batches[0])
    expected = bits(stepper.state)
    saver.start(stepper.state)
    for batch in batches[1:]:
        stepper(batch)
        saver.poll()
    assert saver.writing is not None and checkpoint.latest_complete(run) is None
    assert bits(stepper.state) != expected
    slow.go.set()
    saver.wait()
    fresh = state_of(c)
    fresh.load(run / "checkpoints" / "step_1" / TRAINER)
    assert bits(fresh) == expected
    saver.start(stepper.state)  # into the same host memory
    saver.wait()
    fresh.load(run / "checkpoints" / "step_3" / TRAINER)
    assert bits(fresh) == bits(stepper.state)


def test_the_next_checkpoint_waits_for_the_one_before_and_says_so(
    tmp_path: Path, trained: TrainState, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, run = Slow(monkeypatch), run_dir(tmp_path)
    saver = saver_of(run, config("float32"))
    trained.step = 2
    saver.start(trained)
    trained.step = 4
    second = threading.Thread(target=saver.start, args=(trained,))
    second.start()
    while "checkpoint of step 2" not in (run.read_status("trainer-0") or {})["waits_for"]:
        time.sleep(0.01)
    slow.go.set()
    second.join(30)
    saver.wait()
    assert [step for step, _ in checkpoint.complete(run)] == [2, 4]


def test_synchronous_ones_are_complete_before_the_next_step(tmp_path: Path, trained: TrainState) -> None:
    run, c = run_dir(tmp_path), config("float32")
    c = c.model_copy(update={"checkpoint": c.checkpoint.model_copy(update={"asynchronous": False})})
    saver, trained.step = saver_of(run, c), 2
    saver.start(trained)
    latest = checkpoint.latest_complete(run)
    assert latest is not None and saver.writing is None and checkpoint.verify(latest).step == 2


@pytest.mark.parametrize("where", ["parts", "manifest", "begin"])
def test_a_disk_that_refuses_is_an_error_at_the_next_safe_point_and_leaves_the_earlier_ones(
    tmp_path: Path, trained: TrainState, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    run, full = run_dir(tmp_path), OSError(28, "No space left on device")

    def refuse(*_: Any, **__: Any) -> None:
        raise full

    save(tmp_path, trained)
    saver, trained.step = saver_of(run, config("float32")), 4
    if where == "parts":  # DCP's own way to tell
        slow = Slow(monkeypatch)
        slow.error, slow.save = CheckpointException("write", {0: (full, None)}), refuse  # type: ignore[assignment]
        slow.go.set()
    elif where == "manifest":
        monkeypatch.setattr(checkpoint, "_sync", refuse)
    else:
        monkeypatch.setattr(Path, "mkdir", refuse)
    saver.start(trained)
    assert saver.writing is not None
    wait([saver.writing], 30)
    with pytest.raises(CheckpointError, match="step_4.*cannot be written: .*No space left.*; make room there"):
        saver.poll()
    assert [p.name for _, p in checkpoint.complete(run)] == ["step_2"]
    monkeypatch.undo()
    assert not list((tmp_path / "checkpoints").glob("*.tmp"))
    saver.start(trained)
    saver.wait()
    assert [p.name for _, p in checkpoint.complete(run)] == ["step_2", "step_4"]
