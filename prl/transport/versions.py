"""versions.jsonl: which weight version belongs to which optimizer step, written durably before a version is published.

Records: {"kind": "version", "version", "step", "lineage", "t"} and {"kind": "resume", "step", "lineage", "t"}. A resume from
step n starts the next lineage and abandons every version so far of a later step. An id is never used again: the next one
follows the largest in the file, abandoned ones included. One writer (trainer rank 0), any number of readers.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import orjson


class VersionError(LookupError):
    """An id that the file does not hold, or a file that breaks its own rules."""


class VersionLog:
    """Reads follow the file, so a reader in another process sees each record once it is written."""

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self._read = 0  # bytes taken in
        self._steps: dict[int, int] = {}
        self._abandoned: set[int] = set()
        self._last = -1
        self._lineage = 0
        self._refresh()

    def allocate(self, step: int) -> int:
        """The next id, for the weights after `step` optimizer steps; on disk when this returns."""
        self._refresh()
        version = self._last + 1
        self._append({"kind": "version", "version": version, "step": step, "lineage": self._lineage})
        return version

    def lineage(self, resume_step: int) -> int:
        """Start the next lineage from the checkpoint of `resume_step`, abandon the versions of later steps; its number."""
        self._refresh()
        self._append({"kind": "resume", "step": resume_step, "lineage": self._lineage + 1})
        return self._lineage

    @property
    def current_lineage(self) -> int:
        """0 in a run that was never resumed."""
        self._refresh()
        return self._lineage

    def step_of(self, version: int) -> int:
        """Optimizer steps behind a version, abandoned or not; VersionError for an unknown id."""
        if version not in self._steps:
            self._refresh()
        if version not in self._steps:
            raise VersionError(f"{self.path}: weight version {version} was never allocated (newest: {self._last})")
        return self._steps[version]

    def is_surviving(self, version: int) -> bool:
        """Whether the version is known and belongs to the surviving lineage."""
        self._refresh()
        return version in self._steps and version not in self._abandoned

    def current(self) -> int | None:
        """The newest surviving version; None before the first."""
        self._refresh()
        return max(self._steps.keys() - self._abandoned, default=None)

    def _append(self, record: dict[str, object]) -> None:
        line = orjson.dumps({**record, "t": time.time()}) + b"\n"
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            # What follows the last whole line is a write that never returned: its id was never published.
            os.ftruncate(fd, self._read)
            try:
                if (written := os.write(fd, line)) != len(line):
                    raise OSError(errno.ENOSPC, f"{written} of {len(line)} bytes written, is the disk full?", str(self.path))
                os.fsync(fd)
            except OSError:
                os.ftruncate(fd, self._read)
                raise
        finally:
            os.close(fd)
        if self._read == 0:  # the file's name must last as well
            folder = os.open(self.path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
        self._refresh()

    def _refresh(self) -> None:
        try:
            if self.path.stat().st_size == self._read:
                return
            with self.path.open("rb") as f:
                f.seek(self._read)
                data = f.read()
        except FileNotFoundError:
            return
        for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
            try:
                self._take(orjson.loads(line))
            except (orjson.JSONDecodeError, KeyError, TypeError) as e:
                raise VersionError(f"{self.path}: byte {self._read}: not a version record: {e!r}") from e
            self._read += len(line)

    def _take(self, record: dict[str, int]) -> None:
        self._lineage = record["lineage"]
        if str(record["kind"]) == "resume":
            self._abandoned |= {v for v, s in self._steps.items() if s > record["step"]}
        elif (version := record["version"]) <= self._last:
            raise VersionError(f"{self.path}: byte {self._read}: version {version} follows {self._last}, ids must rise")
        else:
            self._steps[version] = record["step"]
            self._last = version
