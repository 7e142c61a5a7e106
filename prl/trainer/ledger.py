"""ledger.jsonl: which rollouts each optimizer step trained. Append-only, durable line by line; free of torch.

{"kind": "step", "step", "version", "lineage", "rollouts": [ids], "checksum", "loss", "t"}, written once the step has finished
on all ranks; a step skipped as not finite also has "skipped": true. {"kind": "resume", "step", "lineage", "t"} voids all
earlier entries of later steps. Nothing is ever deleted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson


class LedgerError(Exception):
    """A line that is damaged and not the torn end of a killed writer, or one that cannot be written."""


class Ledger:
    """The writer: rank 0 alone. Each record is on disk when the call returns."""

    def __init__(self, path: Path):
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")  # a killed writer's torn line stays as it is; the next record starts a new one

    def step(
        self,
        *,
        step: int,
        version: int,
        lineage: int,
        rollouts: Sequence[str],
        checksum: str,
        loss: float,
        skipped: bool = False,
    ) -> None:
        flags = {"skipped": True} if skipped else {}
        self._append(
            kind="step", step=step, version=version, lineage=lineage, rollouts=rollouts, checksum=checksum, loss=loss, **flags
        )

    def resume(self, *, step: int, lineage: int) -> None:
        self._append(kind="resume", step=step, lineage=lineage)

    def close(self) -> None:
        os.close(self._fd)

    def _append(self, **record: Any) -> None:
        line = orjson.dumps({**record, "t": time.time()}, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"
        try:
            written = os.write(self._fd, line)
            os.fsync(self._fd)
        except OSError as e:
            raise LedgerError(f"{self.path}: cannot be written: {e}; make room there, then resume") from e
        if written != len(line):
            raise LedgerError(f"{self.path}: {written} of {len(line)} bytes written: disk full; make room there, then resume")


def read(path: Path) -> list[dict[str, Any]]:
    """All whole records in order. A torn line counts as never written where it ends the file or a resume follows it."""
    records: list[dict[str, Any]] = []
    torn = 0
    lines = path.read_bytes().splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            torn = number
            continue
        if torn and record.get("kind") != "resume":
            raise LedgerError(f"{path}, line {torn}: not a JSON record, and no resume follows it")
        torn = 0
        records.append(record)
    return records


def surviving(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The step entries that no resume record voids, in order."""
    kept: list[dict[str, Any]] = []
    for record in records:
        if record["kind"] == "resume":
            kept = [r for r in kept if r["step"] <= record["step"]]
        else:
            kept.append(record)
    return kept
