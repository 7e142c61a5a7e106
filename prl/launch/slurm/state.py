"""How jobs stand: asked of slurmctld (squeue), of those that it has forgotten of the accounting (sacct), if there is one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from submitit.slurm.slurm import SlurmInfoWatcher

from prl.launch.slurm.environment import ask

LIVING = frozenset(
    ["PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "SUSPENDED", "STOPPED"]
    + ["RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT"]
)
"""States of jobs that wait, run, or are about to be run again."""
FORGOTTEN = "FORGOTTEN"
"""The state of a job that has ended, nobody remembers how."""
UNKNOWN = "UNKNOWN"
"""Not told yet."""
ASK_S = 5
"""The longest between two questions for the states of jobs that somebody waits for."""


def states(*jobs: str) -> dict[str, tuple[str, str]] | None:
    """Component (`J+0`, or `J`) to its state and Slurm's reason for it; None while slurmctld does not answer.

    Jobs that have ended a while ago are no longer known and left out.
    """
    try:
        told = ask("squeue", "--noheader", "--states=all", f"--jobs={','.join(jobs)}", "--format=%i|%T|%r")
    except OSError as e:
        return {} if "Invalid job id" in str(e) else None
    found = {}
    for line in told.splitlines():
        name, state, reason = line.strip().split("|", 2)
        found[name] = (state, reason)
    return found


def recorded(*jobs: str) -> dict[str, str]:
    """Component to the state it ended in, by the accounting; empty where there is none."""
    words = ("--noheader", "--parsable2", "--allocations", f"--jobs={','.join(jobs)}", "--format=JobID,State")
    try:
        told = ask("sacct", *words)
    except OSError:
        return {}
    pairs = (line.split("|", 1) for line in told.splitlines() if "|" in line)
    # A component that lost a node has a line as RESIZING before its last; CANCELLED has the user's number after it.
    return {name: state.split()[0] for name, state in pairs if state.split()[:1] and state.split()[0] not in LIVING}


def over(found: Mapping[str, tuple[str, str]]) -> bool:
    """Whether no component waits or runs."""
    return not any(state in LIVING for state, _ in found.values())


class Watcher(SlurmInfoWatcher):
    """submitit's watcher of jobs named as Slurm names components: one squeue for all of them, at most every ASK_S."""

    def __init__(self) -> None:
        super().__init__(delay_s=ASK_S)

    def update(self) -> None:
        asked = self._registered - self._finished
        if not asked:
            return
        self._num_calls += 1
        leaders = sorted({key.partition("+")[0] for key in asked})
        if (found := states(*leaders)) is not None:
            told = {key: {"State": state, "Reason": reason} for key, (state, reason) in found.items()}
            if gone := asked - told.keys():
                ends = recorded(*sorted({key.partition("+")[0] for key in gone}))
                told |= {key: {"State": ends.get(key, FORGOTTEN), "Reason": ""} for key in gone}
            self._info_dict.update(told)
        self._last_status_check = time.time()
        self._finished |= {key for key in asked if self.is_done(key, mode="cache")}

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        return self.get_state(job_id, mode=mode) not in LIVING | {UNKNOWN}


def follow(job: str, log: Path, *, say: Callable[[str], None], write: Callable[[str], None], every_s: float = 1.0) -> None:
    """Tell how the job stands and what its batch host writes until it has ended."""
    before, position, pending = "", log.stat().st_size if log.exists() else 0, b""
    while True:
        found = states(job)
        if log.exists():
            with log.open("rb") as f:
                f.seek(position)
                pending += f.read()
                position = f.tell()
            whole, newline, pending = pending.rpartition(b"\n")
            write((whole + newline).decode(errors="replace"))
        if found is not None:
            if over(found):
                return
            shown = [f"{name} {state.lower()}" + (f" ({why})" if why != "None" else "") for name, (state, why) in found.items()]
            now = ", ".join(shown)
            if now != before:
                say(now)
                before = now
        time.sleep(every_s)
