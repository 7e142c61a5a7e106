"""Complete checkpoints of a run: both halves on disk, then the manifest, then one rename. Free of torch.

    checkpoints/step_<n>.tmp/   being written; never read
    checkpoints/step_<n>/       trainer/ (torch.distributed.checkpoint), orchestrator.bin, manifest.json

The manifest names every file with its size and checksum. A `step_<n>` without one has lost it, since it is renamed last.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import xxhash

from prl.transport.run_dir import RunDir

_COMPLETE = re.compile(r"step_(\d+)")
TRAINER, ORCHESTRATOR, MANIFEST = "trainer", "orchestrator.bin", "manifest.json"


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


def _damaged(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{what}; restore {folder}, or remove it to go on from the checkpoint before it, if there is one")


def draft(run: RunDir, step: int) -> Path:
    """Where the checkpoint of `step` is written before it is complete."""
    return run / "checkpoints" / f"step_{step}.tmp"


def write(run: RunDir, manifest: Manifest, trainer: Callable[[Path], None], orchestrator: bytes | None, *, keep: int) -> Path:
    """Write a checkpoint durably, make it visible at once, then remove all but the newest `keep`.

    `trainer` fills the folder it is given. CheckpointError where the disk refuses; earlier checkpoints are untouched then.
    """
    final = run / "checkpoints" / f"step_{manifest.step}"
    folder = draft(run, manifest.step)
    try:
        for left in final.parent.glob("step_*.tmp"):
            shutil.rmtree(left)
        folder.mkdir(mode=0o700)
        trainer(folder / TRAINER)
        if orchestrator is not None:
            (folder / ORCHESTRATOR).write_bytes(orchestrator)
        manifest = msgspec.structs.replace(manifest, files=_files(folder))
        (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        _sync(folder)
        if final.exists():  # an abandoned lineage's
            _discard(final)
        folder.rename(final)
        _sync_one(final.parent)
    except OSError as e:
        shutil.rmtree(folder, ignore_errors=True)
        raise CheckpointError(f"{final}: cannot be written: {e}; make room there, then resume") from e
    for _, old in complete(run)[:-keep]:
        _discard(old)
    return final


def verify(folder: Path, part: str = "") -> Manifest:
    """Check owner and mode of the folder, then size and checksum of every file; CheckpointError names the first that fails.

    Only then may the files be read: one of them is a pickle. `part` restricts the check to a file or folder below.
    """
    for path in (folder, folder / TRAINER):
        try:
            stat = path.stat()
        except OSError as e:
            raise _damaged(folder, f"{path}: missing") from e
        if stat.st_uid != os.getuid() or stat.st_mode & 0o022:
            raise CheckpointError(
                f"{path}: owner {stat.st_uid}, mode {stat.st_mode & 0o777:o}; expected owner {os.getuid()} and not writable "
                "by others, since it holds a pickle (chown, chmod go-w)"
            )
    manifest = read_manifest(folder)
    for name, expected in manifest.files.items():
        path = folder / name
        if not name.startswith(part):
            continue
        if not path.is_file():
            raise _damaged(folder, f"{path}: missing; the manifest names it")
        if (size := path.stat().st_size) != expected.size:
            raise _damaged(folder, f"{path}: {size} bytes, the manifest says {expected.size}: cut or changed")
        if _checksum(path) != expected.checksum:
            raise _damaged(folder, f"{path}: its checksum is not the manifest's: damaged")
    if folder.name != (name := f"step_{manifest.step}"):
        raise _damaged(folder, f"{folder / MANIFEST}: says step {manifest.step}, so its folder was {name}: renamed or damaged")
    return manifest


def orchestrator_state(folder: Path) -> bytes | None:
    """The orchestrator's half; None where the checkpoint has none."""
    path = folder / ORCHESTRATOR
    return path.read_bytes() if ORCHESTRATOR in verify(folder, ORCHESTRATOR).files else None


def _files(folder: Path) -> dict[str, File]:
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): File(p.stat().st_size, _checksum(p)) for p in paths}


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


def _sync(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        _sync_one(path)
    _sync_one(folder)


def _sync_one(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
