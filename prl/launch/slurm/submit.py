"""Submit a job, ask for its state, and follow it to its end."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from prl.launch.local import role_environment
from prl.launch.slurm.environment import TIMEOUT_S, ask, scrubbed
from prl.launch.slurm.script import Submission, submission

LIVING = frozenset(
    ["PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "SUSPENDED", "STOPPED"]
    + ["RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT"]
)
"""States of jobs that wait, run, or are about to be run again."""


def submit(job: Submission, environment: Mapping[str, str], *, keep_env: tuple[str, ...] = ()) -> str:
    """The id of the job, submitted from wherever this runs, another job included. OSError with sbatch's words."""
    done = subprocess.run(
        ["sbatch", "--parsable"],
        input=submission(job),
        env=role_environment(scrubbed(environment), keep_env, 1),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode:
        raise OSError(f"sbatch: exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]  # a federation adds the cluster's name


def states(job: str) -> dict[str, tuple[str, str]] | None:
    """Component (`J+0`, or `J`) to its state and Slurm's reason for it; None while slurmctld does not answer.

    Empty: the job is no longer known, so it has ended a while ago.
    """
    try:
        told = ask("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%i|%T|%r")
    except OSError as e:
        return {} if "Invalid job id" in str(e) else None
    found = {}
    for line in told.splitlines():
        name, state, reason = line.strip().split("|", 2)
        found[name] = (state, reason)
    return found


def over(found: Mapping[str, tuple[str, str]]) -> bool:
    """Whether no component waits or runs."""
    return not any(state in LIVING for state, _ in found.values())


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
