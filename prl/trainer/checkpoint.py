"""Complete checkpoints of a run: both halves on disk, then the manifest, then one rename. Free of torch.

    checkpoints/step_<n>.tmp/   being written; never read
    checkpoints/step_<n>/       trainer/ (torch.distributed.checkpoint), orchestrator.bin, manifest.json

The manifest names every file with its size and checksum. A `step_<n>` without one has lost it, since it is renamed last.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from prl.transport.run_dir import RunDir, exposed

_COMPLETE = re.compile(r"step_(\d+)")
TRAINER, ORCHESTRATOR, MANIFEST = "trainer", "orchestrator.bin", "manifest.json"
READERS = 4
"""Files whose checksums a process computes at the same time."""


class CheckpointError(Exception):
    """A checkpoint that cannot be written, trusted or read: names the file, what was expected and what was found."""


class File(msgspec.Struct, frozen=True):
    size: int
    checksum: str
    """xxh3-128 of the bytes."""


class Manifest(msgspec.Struct, frozen=True):
    """`version` and `lineage` are the ones under which step `step` was published."""

    run: str
    step: int
    version: int
    lineage: int
    ranks: int
    architecture: str
    t: float
    reads: dict[str, Any] = {}
    """What the weights mean beside their shapes (`TrainState.reads`)."""
    data: dict[str, Any] = {}
    """What a fine-tuning's data position follows from beside the step (`prl.trainer.sft.data_of`)."""
    files: dict[str, File] = {}


def folders(run: RunDir) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint, oldest first, also of one that has lost its manifest."""
    folder = run / "checkpoints"
    return sorted((int(m[1]), p) for p in folder.glob("step_*") if (m := _COMPLETE.fullmatch(p.name)))


def complete(run: RunDir) -> list[tuple[int, Path]]:
    """(step, folder) of every complete checkpoint, oldest first."""
    return [(step, p) for step, p in folders(run) if (p / MANIFEST).is_file()]


def latest_complete(run: RunDir) -> Path | None:
    """The folder of the newest checkpoint; None where there is none.

    CheckpointError where it has no manifest: nothing older is taken in silence.
    """
    found = folders(run)
    if found and not (found[-1][1] / MANIFEST).is_file():
        raise _damaged(found[-1][1], f"{found[-1][1] / MANIFEST}: missing")
    return found[-1][1] if found else None


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError) as e:
        raise _damaged(folder, f"{path}: cannot be read: {e}") from e


def demand_same(folder: Path, stored: Mapping[str, Any], given: Mapping[str, Any], mend: str) -> None:
    """CheckpointError that lists what differs between a manifest's values and the configuration's."""
    now = msgspec.json.decode(msgspec.json.encode(given))
    differ = [
        f"{key}: {now.get(key, 'nothing')!r} here, {stored.get(key, 'nothing')!r} in the checkpoint"
        for key in sorted(stored.keys() | now.keys())
        if stored.get(key) != now.get(key)
    ]
    if differ:
        raise CheckpointError(f"{folder}: {mend}:\n  " + "\n  ".join(differ))


def _damaged(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{what}; restore {folder}, or remove it to go on from the checkpoint before it, if there is one")


def draft(run: RunDir, step: int) -> Path:
    """Where the checkpoint of `step` is written before it is complete."""
    return run / "checkpoints" / f"step_{step}.tmp"


def begin(run: RunDir, step: int) -> Path:
    """Make an empty draft and return its trainer/; what a killed writer left goes. CheckpointError where the disk refuses."""
    folder = draft(run, step)
    try:
        for left in folder.parent.glob("step_*.tmp"):
            shutil.rmtree(left)
        for path in (folder, folder / TRAINER):
            path.mkdir(mode=0o700)
    except OSError as e:
        abandon(run, step)
        raise _refused(run, step, e) from e
    return folder / TRAINER


def commit(
    run: RunDir,
    manifest: Manifest,
    trainer: Mapping[str, File],
    orchestrator: bytes | None,
    *,
    keep: int,
    keep_every: int = 0,
) -> Path:
    """Give the draft its orchestrator's half and its manifest, make it visible at once, then let old ones go.

    `trainer`: the files below trainer/, on disk already. There stay the newest `keep` and every multiple of `keep_every`.
    CheckpointError where the disk refuses: the draft is gone then, and earlier checkpoints are untouched.
    """
    final, folder = run / "checkpoints" / f"step_{manifest.step}", draft(run, manifest.step)
    try:
        files = {f"{TRAINER}/{name}": file for name, file in trainer.items()}
        if orchestrator is not None:
            (folder / ORCHESTRATOR).write_bytes(orchestrator)
            files |= checksums(folder, [ORCHESTRATOR])
        manifest = msgspec.structs.replace(manifest, files=files)
        (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        for path in (folder / TRAINER, folder / ORCHESTRATOR, folder / MANIFEST, folder):
            if path.exists():
                _sync(path)
        if final.exists():  # an abandoned lineage's
            _discard(final)
        folder.rename(final)
        _sync(final.parent)
    except OSError as e:
        abandon(run, manifest.step)
        raise _refused(run, manifest.step, e) from e
    for step, old in complete(run)[:-keep]:
        if not keep_every or step % keep_every:
            _discard(old)
    return final


def abandon(run: RunDir, step: int) -> None:
    """Take away a draft that will not be complete."""
    shutil.rmtree(draft(run, step), ignore_errors=True)


def checksums(folder: Path, names: Iterable[str]) -> dict[str, File]:
    """Size and checksum of files below `folder`, several at a time."""

    def one(name: str) -> tuple[str, File]:
        path = folder / name
        return name, File(path.stat().st_size, _checksum(path))

    with ThreadPoolExecutor(READERS) as pool:
        return dict(pool.map(one, names))


def verify(folder: Path, part: str = "", *, share: tuple[int, int] = (0, 1)) -> Manifest:
    """Check owner and mode of what leads to the pickle, then size and checksum of every file; CheckpointError names what fails.

    Only then may the files be read: one of them is a pickle. `part` restricts the check to a file or folder below, `share`
    (rank, ranks) the checksums to this rank's files: together the ranks check all of them.
    """
    for path in (folder.parent, folder, folder / TRAINER):  # who may write into the parent can put another folder here
        try:
            _demand_own(path)
        except OSError as e:
            raise _damaged(folder, f"{path}: missing") from e
    reached = (folder / TRAINER).stat().st_mode & 0o011
    manifest = read_manifest(folder)
    wanted = {name: file for name, file in manifest.files.items() if name.startswith(part)}
    for name, expected in wanted.items():
        path = folder / name
        if not path.is_file():
            raise _damaged(folder, f"{path}: missing; the manifest names it")
        if reached:
            _demand_own(path)
        if (size := path.stat().st_size) != expected.size:
            raise _damaged(folder, f"{path}: {size} bytes, the manifest says {expected.size}: cut or changed")
    rank, ranks = share
    mine = sorted(wanted, key=lambda name: (-wanted[name].size, name))[rank::ranks]
    try:
        mine_found = checksums(folder, mine)
    except OSError as e:
        raise _damaged(folder, f"{folder}: cannot be read: {e}") from e
    for name, found in mine_found.items():
        if found.checksum != wanted[name].checksum:
            raise _damaged(folder, f"{folder / name}: its checksum is not the manifest's: damaged")
    if folder.name != (name := f"step_{manifest.step}"):
        raise _damaged(folder, f"{folder / MANIFEST}: says step {manifest.step}, so its folder was {name}: renamed or damaged")
    return manifest


def _demand_own(path: Path) -> None:
    if wrong := exposed(path, 0o022):
        raise CheckpointError(f"{wrong}: others could have put a pickle of theirs there (chown, chmod go-w)")


def orchestrator_state(folder: Path) -> bytes | None:
    """The orchestrator's half; None where the checkpoint has none."""
    path = folder / ORCHESTRATOR
    return path.read_bytes() if ORCHESTRATOR in verify(folder, ORCHESTRATOR).files else None


def _refused(run: RunDir, step: int, error: OSError) -> CheckpointError:
    final = run / "checkpoints" / f"step_{step}"
    return CheckpointError(f"{final}: cannot be written: {error}; make room there, then resume")


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as f:
        while chunk := f.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _discard(folder: Path) -> None:
    """Take a checkpoint away; renamed first, so that no half of it counts as complete."""
    gone = folder.with_suffix(".old.tmp")
    folder.rename(gone)
    shutil.rmtree(gone)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
