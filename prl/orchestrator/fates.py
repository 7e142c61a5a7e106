"""tasks.jsonl: what became of every task of the data order. Append-only; free of torch.

{"kind": "fate", "fate", "ordinal", "members": [[index, rollout id]], "reason", "step"}: see `scheduler.Fate`.
{"kind": "cut", "step", "position", "open": [[ordinal, [indices]]], "rules", "batch": [[ordinal, index, rollout id]],
"staleness_max"}: batch `step` was taken out; `position` is the data order's frontier; open members have no final fate yet;
`rules` are the sizes and the staleness bound in force since the record before.
{"kind": "resume", "step", "from"}: the run went on from the checkpoint of `step`, which voids every earlier record from
sequence number `from` on. {"kind": "end", "step", "position", "open", "rules", "code"}: the orchestrator ended.

Every record has "seq", its number in the file, and "t". Nothing is ever deleted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson

from prl.orchestrator.scheduler import Fate
from prl.trainer.ledger import read


class TaskLog:
    """The one writer. A record counts once `sync` has returned."""

    def __init__(self, path: Path):
        self.seq = max((r["seq"] + 1 for r in read(path)), default=0)
        """Number of the next record."""
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        self._pending: list[bytes] = []
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            self._pending.append(b"")  # ends a killed writer's torn line

    def fates(self, fates: Sequence[Fate]) -> None:
        for f in fates:
            step = {} if f.step is None else {"step": f.step}
            self.add("fate", fate=f.fate, ordinal=f.ordinal, members=f.members, reason=f.reason, **step)

    def add(self, kind: str, **values: Any) -> None:
        self._pending.append(orjson.dumps({"kind": kind, "seq": self.seq, **values, "t": time.time()}))
        self.seq += 1

    def sync(self) -> None:
        if self._pending:
            data = b"".join(line + b"\n" for line in self._pending)
            before = os.fstat(self._fd).st_size
            if (n := os.write(self._fd, data)) != len(data):
                os.ftruncate(self._fd, before)  # `close` tries again, and must find no half of it
                raise OSError(f"tasks.jsonl: {n} of {len(data)} bytes written (disk full?)")
            self._pending.clear()
            os.fsync(self._fd)

    def close(self) -> None:
        self.sync()
        os.close(self._fd)


def open_members(members: Iterable[tuple[int, int]]) -> list[tuple[int, list[int]]]:
    """(ordinal, index) pairs as the log keeps them."""
    by_ordinal: dict[int, list[int]] = {}
    for ordinal, index in members:
        by_ordinal.setdefault(ordinal, []).append(index)
    return sorted((o, sorted(indices)) for o, indices in by_ordinal.items())


def surviving(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fates, cuts and ends that no resume record voids, in order."""
    kept: list[dict[str, Any]] = []
    for record in records:
        if record["kind"] == "resume":
            kept = [r for r in kept if r["seq"] < record["from"]]
        else:
            kept.append(record)
    return kept
