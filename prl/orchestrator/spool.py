"""spool/: finished rollouts that wait for a batch while a checkpoint is taken. Append-only segments; free of torch.

A segment is rollouts back to back (`transport.wire.rollout_to_bytes`); the orchestrator's state names each by id with its
place. A new segment starts with every checkpoint and every start, so whole segments can go once no checkpoint needs them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from prl.samples import Rollout
from prl.transport.wire import WireError, rollout_from_bytes, rollout_to_bytes

Place = tuple[int, int, int]
"""(segment, offset, length) in bytes."""


def still_needed(first_segments: Mapping[int, int], complete: Sequence[int], keep: int) -> dict[int, int]:
    """Of each step's first segment, the ones of the `keep` newest complete checkpoints and of later steps.

    A later step's checkpoint may be in the making. Older checkpoints, kept for good, have their rollouts generated anew.
    """
    kept = complete[-keep:]
    return {step: segment for step, segment in first_segments.items() if step in kept or step > max(kept, default=0)}


class Spool:
    def __init__(self, folder: Path, run_id: str):
        self.folder, self._run_id = folder, run_id
        self._places: dict[str, Place] = {}
        self._segment = max(self._segments(), default=-1)
        self._fd = -1
        self._offset = 0
        self.roll()

    def put(self, rollouts: Iterable[Rollout]) -> dict[str, Place]:
        """Write those that are not there yet; the places of exactly these, the others are forgotten."""
        places: dict[str, Place] = {}
        for rollout in rollouts:
            if (place := self._places.get(rollout.id)) is None:
                block = rollout_to_bytes(rollout, run_id=self._run_id)
                if (n := os.write(self._fd, block)) != len(block):
                    raise OSError(f"{self._path(self._segment)}: {n} of {len(block)} bytes written (disk full?)")
                place = (self._segment, self._offset, len(block))
                self._offset += len(block)
            places[rollout.id] = place
        self._places = places
        return dict(places)

    def sync(self) -> None:
        os.fsync(self._fd)

    def roll(self) -> None:
        """Start a new segment."""
        self.close()
        self._segment += 1
        self._offset = 0
        self._fd = os.open(self._path(self._segment), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)

    def load(self, places: Mapping[str, Place]) -> tuple[dict[str, Rollout], list[str]]:
        """The rollouts that can be read, and what is wrong with each of the others."""
        found: dict[str, Rollout] = {}
        broken: list[str] = []
        for rollout_id, (segment, offset, length) in places.items():
            try:
                with self._path(segment).open("rb") as f:
                    f.seek(offset)
                    rollout = rollout_from_bytes(f.read(length), run_id=self._run_id)
                if rollout.id != rollout_id:
                    raise WireError("content", f"holds rollout {rollout.id}")
            except (OSError, WireError) as e:
                broken.append(f"rollout {rollout_id}: {self._path(segment)}, byte {offset}: {e}")
            else:
                found[rollout_id] = rollout
                self._places[rollout_id] = (segment, offset, length)
        return found, broken

    @property
    def first_needed(self) -> int:
        """The oldest segment that holds a rollout still wanted."""
        return min((segment for segment, _, _ in self._places.values()), default=self._segment)

    def prune(self, before: int) -> None:
        """Remove the segments older than `before`."""
        for segment in self._segments():
            if segment < before and segment != self._segment:
                self._path(segment).unlink(missing_ok=True)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _segments(self) -> list[int]:
        return sorted(int(p.stem) for p in self.folder.glob("*.bin") if p.stem.isdigit())

    def _path(self, segment: int) -> Path:
        return self.folder / f"{segment:06d}.bin"
