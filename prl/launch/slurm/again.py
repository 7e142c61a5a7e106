"""Whether a job whose run has failed is run again, when and where: pure, on what its folder remembers of failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

FIRST_S, LONGEST_S = 2.0, 60.0
"""The back-off doubles from the first to the longest, while the job holds its nodes. Slurm adds its own (121 s by default)."""
WAITS = 30
"""Failures at one step by nodes that were gone: many more than Slurm needs to notice."""


class Failure(msgspec.Struct, frozen=True):
    """One end of a run before it was done, which nobody asked for."""

    step: int
    """The last optimizer step that had been trained."""
    cause: str
    lost: tuple[str, ...] = ()
    """Nodes that do not answer any more. It is their failure then, and not the run's."""
    missing: tuple[str, ...] = ()
    """Nodes that did not answer when the job started, so that nothing was run."""
    limit: bool = False
    """The run has saved because its time was up."""


def remembered(path: Path) -> list[Failure]:
    return msgspec.json.decode(path.read_bytes(), type=list[Failure]) if path.exists() else []


def again(failures: Sequence[Failure], tries: int) -> float | str:
    """Seconds until the next try, or why there is none. The last failure is the one that has just happened."""
    own = [f for f in failures if not f.lost + f.missing and not f.limit]
    if len(own) >= tries:
        return f"failed {len(own)} times (launch.slurm.tries)"
    if failures[-2:-1] == failures[-1:] and not failures[-1].lost + failures[-1].missing:
        return f"ended twice at step {failures[-1].step} in the same way"
    if failures[-1].limit:
        return 0.0
    here = 1
    while here < len(failures) and failures[-1 - here].step == failures[-1].step:
        here += 1
    if here >= WAITS:
        return f"failed {here} times at step {failures[-1].step}, for want of nodes that answer"
    return min(FIRST_S * 2 ** (here - 1), LONGEST_S)


def avoided(failures: Sequence[Failure]) -> frozenset[str]:
    """Nodes that were lost in two lives of the run."""
    times = Counter(node for f in failures for node in f.lost)
    return frozenset(node for node, n in times.items() if n > 1)
