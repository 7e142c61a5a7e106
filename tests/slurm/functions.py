"""Functions that the tests of the executor submit; a module of its own, since tasks import what they unpickle."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from submitit.core.job_environment import JobEnvironment
from submitit.core.utils import DelayedSubmission

from prl.launch.slurm.executor import Ended


def who() -> dict[str, Any]:
    """Where a task of a component finds itself."""
    job = JobEnvironment()
    names = ("SLURM_CPUS_PER_TASK", "SLURM_JOB_PARTITION", "GREETING", "PMIX_RANK", "SLURM_MEM_PER_CPU", "SBATCH_PARTITION")
    print(f"rank {job.global_rank}")
    told = {name: os.environ.get(name) for name in names}
    return told | {"rank": job.global_rank, "of": job.num_tasks, "hosts": job.hostnames, "host": os.uname().nodename}


def rest(seconds: float) -> str:
    time.sleep(seconds)
    return "rested"


def die() -> None:
    """As by the kernel's out-of-memory killer; the other ranks wait for ever."""
    if JobEnvironment().global_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def fail() -> None:
    raise RuntimeError("no luck")


class Saves:
    """Waits to be interrupted; takes `seconds` to save; its second life returns what it saved."""

    def __init__(self, seconds: float, saved: str = ""):
        self.seconds, self.saved = seconds, saved

    def __call__(self, notes: str) -> str:
        self._note(notes, "began")
        while not self.saved:
            time.sleep(0.1)
        return self.saved

    def checkpoint(self, notes: str) -> DelayedSubmission:
        time.sleep(self.seconds)
        self._note(notes, "saved")
        return DelayedSubmission(Saves(self.seconds, f"saved by {os.uname().nodename}"), notes)

    def _note(self, notes: str, what: str) -> None:
        with Path(notes).open("a") as f:
            f.write(f"{os.environ.get('SLURM_RESTART_COUNT', '0')} {what} {time.time()}\n")


class Leads:
    """Is killed in its first life; in its second it waits for SIGUSR2, which it answers itself."""

    handles_signals = True

    def __call__(self, notes: str) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        Path(notes).write_text(os.environ.get("SLURM_RESTART_COUNT", "0"))
        if "SLURM_RESTART_COUNT" not in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.sigwait({signal.SIGUSR2})
        raise Ended(75, "saved for later")
