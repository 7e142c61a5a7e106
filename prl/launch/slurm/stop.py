"""End a run that a job carries out: a first request saves, a second one does not wait for that."""

from __future__ import annotations

import time
from collections.abc import Callable

import orjson

from prl.launch.slurm.environment import ask
from prl.launch.slurm.state import over, states
from prl.launch.slurm.status import RESULT, STOP, job_of, read
from prl.launch.supervisor import SAVED
from prl.rl import store
from prl.transport.run_dir import RunDir

AT_ONCE_S = 15.0
"""How long a supervisor has to end its roles at a second request, before Slurm ends the job."""


def stop(run: RunDir, *, say: Callable[[str], None]) -> None:
    """Ask for it and return; OSError where there is nothing to stop, or Slurm does not answer.

    The request stays in the folder, so that no later life of the run trains on, whatever ended this one. The supervisor
    hears of it as of the time limit's warning: SIGUSR2 to the batch host.
    """
    job, again = job_of(run), (run / STOP).exists()
    if (found := states(job)) is None:
        raise OSError(f"job {job}: Slurm does not answer here; ask for it on a login node")
    if over(found):
        raise OSError(f"job {job} has ended already: nothing is to be stopped")
    store(run / STOP, f"{time.time():.0f}\n")
    ask("scancel", "--state=PENDING", job)  # what has not begun has nothing to save; a running job is left alone
    if over(states(job) or found):
        if not read(run / RESULT):
            result = {"job": job, "restarts": 0, "code": SAVED, "cause": "stopped before it began"}
            store(run / RESULT, orjson.dumps(result).decode())
        say(f"job {job} had not begun: it is cancelled")
        return
    ask("scancel", "--batch", "--signal=USR2", job)
    if not again:
        say(f"job {job} was asked to save and end; ask again to end it at once")
        return
    say(f"job {job} was asked to end at once")
    deadline = time.monotonic() + AT_ONCE_S
    while (now := states(job)) is None or not over(now):
        if time.monotonic() > deadline:
            say(f"job {job} does not end by itself: Slurm ends it")
            ask("scancel", job)
            return
        time.sleep(0.5)
