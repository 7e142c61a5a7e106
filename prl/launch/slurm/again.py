"""Whether a job whose run has failed is run again, and when: pure, on what the run's folder remembers of earlier failures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

FIRST_S, LONGEST_S = 2.0, 300.0
"""The back-off doubles from the first to the longest."""


class Failure(msgspec.Struct, frozen=True):
    """One end of a run that was neither its own nor asked for."""

    step: int
    """The last optimizer step that had been trained."""
    cause: str


def remembered(path: Path) -> list[Failure]:
    return msgspec.json.decode(path.read_bytes(), type=list[Failure]) if path.exists() else []


def again(failures: Sequence[Failure], tries: int) -> float | str:
    """Seconds until the next try, or why there is none. The last failure is the one that has just happened."""
    if len(failures) >= tries:
        return f"failed {len(failures)} times (launch.slurm.tries)"
    if failures[-2:-1] == failures[-1:]:
        return f"failed twice at step {failures[-1].step} in the same way"
    return min(FIRST_S * 2 ** (len(failures) - 1), LONGEST_S)
