"""Weight versions on a filesystem or in shared memory: the trainer publishes, engines pull; neither waits for the other.

    <root>/v<id>.tmp/   being written; invisible to readers
    <root>/v<id>/       complete: weights-<n>.safetensors and manifest.json, moved here by one rename

A complete version is never changed. The newest `keep_versions` complete ones stay; an older one is unpublished (renamed)
before its files go, so nobody finds half of it. A reader that had opened its files reads on; one that loses the race gets
`VersionGone`, and there is a newer one. Tensor names are the model's own state names.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from prl.config.schema import Transport
from prl.transport.run_dir import RunDir, exposed

SHARD_BYTES = 1 << 30
_COMPLETE = re.compile(r"v(\d+)")


class WeightStoreError(Exception):
    """A version that cannot be written or read: names the folder, what was expected and the mend."""


class VersionGone(WeightStoreError):
    """The version was pruned while it was read; a newer one is complete."""


class TensorEntry(msgspec.Struct):
    file: str
    dtype: str
    shape: tuple[int, ...]
    checksum: str
    """xxh3-64 of the raw bytes."""


class Manifest(msgspec.Struct):
    run: str
    version: int
    step: int
    t: float
    nbytes: int
    tensors: dict[str, TensorEntry]
    fp8: list[str] = []
    """Layers that the trainer computes in FP8."""


def checksum(tensor: torch.Tensor) -> str:
    """xxh3-64 of a contiguous CPU tensor's bytes."""
    return xxhash.xxh3_64_hexdigest(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _shards(tensors: Iterable[tuple[str, torch.Tensor]], limit: int) -> Iterator[dict[str, torch.Tensor]]:
    """Group tensors into files of about `limit` bytes, on the CPU, contiguous, none sharing memory with another."""
    shard: dict[str, torch.Tensor] = {}
    size = 0
    seen: set[int] = set()
    for name, tensor in tensors:
        t = tensor.detach().cpu().contiguous()
        if t.untyped_storage().nbytes() != t.nbytes or t.data_ptr() in seen:
            t = t.clone()
        if shard and size + t.nbytes > limit:
            yield shard
            shard, size, seen = {}, 0, set()
        shard[name] = t
        seen.add(t.data_ptr())
        size += t.nbytes
    if shard:
        yield shard


class WeightStore:
    """One writer (trainer rank 0), any number of readers, which may live in other processes."""

    def __init__(self, run: RunDir, config: Transport, *, shard_bytes: int = SHARD_BYTES):
        self.root = run.weights_path(config.weights)
        self.run_id = run.id
        self.keep = config.keep_versions
        self.shard_bytes = shard_bytes

    def publish(
        self, version: int, step: int, tensors: Iterable[tuple[str, torch.Tensor]], *, fp8: Sequence[str] = ()
    ) -> Manifest:
        """Write a version (its id durably allocated before) and make it visible at once; then prune.

        WeightStoreError where it cannot be written (disk full); the versions before it are untouched.
        """
        final = self.root / f"v{version}"
        draft = self.root / f"v{version}.tmp"
        if final.exists():
            raise WeightStoreError(f"{final}: version {version} is published already; ids are never used again")
        entries: dict[str, TensorEntry] = {}
        nbytes = 0
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._demand_own()
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(mode=0o700)
            for i, shard in enumerate(_shards(tensors, self.shard_bytes)):
                file = f"weights-{i}.safetensors"
                save_file(shard, draft / file)
                nbytes += sum(t.nbytes for t in shard.values())
                for name, t in shard.items():
                    entries[name] = TensorEntry(file, str(t.dtype).removeprefix("torch."), tuple(t.shape), checksum(t))
            manifest = Manifest(self.run_id, version, step, time.time(), nbytes, entries, list(fp8))
            (draft / "manifest.json").write_bytes(msgspec.json.encode(manifest))
            draft.rename(final)
        except (OSError, SafetensorError) as e:
            shutil.rmtree(draft, ignore_errors=True)
            raise WeightStoreError(
                f"{draft}: weight version {version} cannot be written after {nbytes >> 20} MiB: {e}; "
                f"make room there or choose another place with transport.weights"
            ) from e
        self._prune()
        return manifest

    def versions(self) -> list[int]:
        """Ids of the complete versions, oldest first."""
        try:
            self._demand_own()
            names = [p.name for p in self.root.iterdir()]
        except FileNotFoundError:
            return []
        return sorted(int(m[1]) for n in names if (m := _COMPLETE.fullmatch(n)))

    def latest(self) -> Manifest | None:
        """The manifest of the newest complete version; None before the first."""
        for _ in range(100):
            if not (versions := self.versions()):
                return None
            try:
                return self.manifest(versions[-1])
            except VersionGone:
                continue
        raise WeightStoreError(f"{self.root}: versions vanish faster than they can be read (two writers?)")

    def manifest(self, version: int) -> Manifest:
        path = self.root / f"v{version}" / "manifest.json"
        try:
            manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
        except FileNotFoundError as e:
            raise self._gone(version) from e
        except msgspec.MsgspecError as e:
            raise WeightStoreError(f"{path}: not a manifest: {e}") from e
        if (manifest.run, manifest.version) != (self.run_id, version):
            raise WeightStoreError(
                f"{path}: is of run {manifest.run} version {manifest.version}, expected run {self.run_id} version {version}"
            )
        return manifest

    def load(self, version: int) -> dict[str, torch.Tensor]:
        """Every tensor of a complete version, private to the caller, checksums verified.

        VersionGone where it was pruned meanwhile; WeightStoreError naming file and tensor where bytes or shapes differ.
        """
        manifest = self.manifest(version)
        folder = self.root / f"v{version}"
        files: dict[str, list[str]] = {}
        for name, entry in manifest.tensors.items():
            files.setdefault(entry.file, []).append(name)
        out: dict[str, torch.Tensor] = {}
        for file, names in files.items():
            try:
                with safe_open(folder / file, framework="pt") as f:
                    out.update({name: f.get_tensor(name) for name in names})
            except (OSError, SafetensorError, RuntimeError) as e:  # RuntimeError: torch maps the file by its name once more
                if not folder.exists():
                    raise self._gone(version) from e
                raise WeightStoreError(f"{folder / file}: cannot be read: {e}") from e
        for name, entry in manifest.tensors.items():
            t = out[name]
            got = (str(t.dtype).removeprefix("torch."), tuple(t.shape), checksum(t))
            if got != (entry.dtype, entry.shape, entry.checksum):
                raise WeightStoreError(
                    f"{folder / entry.file}: {name} is {got[0]} {got[1]} {got[2]}, "
                    f"the manifest says {entry.dtype} {entry.shape} {entry.checksum}"
                )
        return out

    def load_latest(self, newer_than: int = -1) -> tuple[Manifest, dict[str, torch.Tensor]] | None:
        """The newest complete version with its tensors, or None if there is none after `newer_than`."""
        for _ in range(100):
            manifest = self.latest()
            if manifest is None or manifest.version <= newer_than:
                return None
            try:
                return manifest, self.load(manifest.version)
            except VersionGone:
                continue
        raise WeightStoreError(f"{self.root}: versions vanish faster than they can be read (publish less often)")

    def close(self, remove: bool = False) -> None:
        """With `remove`, delete every version (the run is over)."""
        if remove:
            shutil.rmtree(self.root, ignore_errors=True)

    def _demand_own(self) -> None:
        """The folder's name is known to others from the run's first life on, and /dev/shm is open to all."""
        if wrong := exposed(self.root):
            raise WeightStoreError(f"{wrong}: another user may have made it; remove it")

    def _prune(self) -> None:
        for version in self.versions()[: -self.keep]:
            (self.root / f"v{version}").rename(self.root / f"v{version}.old")
        for gone in self.root.glob("v*.old"):
            shutil.rmtree(gone, ignore_errors=True)

    def _gone(self, version: int) -> VersionGone:
        return VersionGone(f"{self.root / f'v{version}'}: version {version} is not there; complete ones: {self.versions()}")
