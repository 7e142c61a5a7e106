"""What a job's batch host runs: `Lead` is the run's supervisor, its roles are steps of the job.

The exit code is the run's; result.json in the run's folder has it too, with the cause, for those who follow the job.
"""

from __future__ import annotations

import re
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import orjson
import typer

from prl.cli import exit_code
from prl.config.load import ConfigError, load_resolved
from prl.config.schema import RunConfig, Slurm
from prl.launch.local import Executor
from prl.launch.slurm.again import Failure, again, avoided, remembered
from prl.launch.slurm.environment import REQUEUED_S, Allocation, allocation, ask, silent
from prl.launch.slurm.executor import Ended
from prl.launch.slurm.script import COMPONENTS, Part
from prl.launch.slurm.status import FAILURES, RESULT, STOP
from prl.launch.slurm.steps import SlurmExecutor
from prl.launch.supervisor import CONFIG, FAILED, SAVED
from prl.rl import FULL, StopRequests, carry_out, say, store
from prl.sft import WITHOUT
from prl.trainer import ledger
from prl.transport.run_dir import RunDir

ROOM_S = 600.0
"""How long a job holds its nodes while the disk is full."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def command(
    folder: Annotated[Path, typer.Argument(metavar="RUN")],
    reopen: Annotated[bool, typer.Option(help="Go on with RL though it was finished.")] = False,
    sft: Annotated[bool, typer.Option(help="The warm start alone, on the trainer's nodes alone.")] = False,
) -> None:
    run = RunDir(folder)
    try:
        config = load_resolved(run.config_path)
        slurm = config.launch.slurm
        if slurm is None:
            raise OSError("launch.slurm is not set in its configuration")
        job = allocation(slurm, inference=not sft)
        missing = silent(job.addresses)
    except ConfigError as e:
        say(str(e))
        raise typer.Exit(CONFIG) from None
    except OSError as e:
        say(f"failed: {run.root}: {e}")
        raise typer.Exit(FAILED) from None
    say(f"job {job.job}: " + ", ".join(f"{name} on {' '.join(part.nodes)}" for name, part in job.parts.items() if part.nodes))
    (run / RESULT).unlink(missing_ok=True)
    resumed = job.restarts > 0 or (run / "ledger.jsonl").exists()
    if (run / STOP).exists():
        code, cause = SAVED, "a stop was asked for before this life of the run began"
        say(f"{cause}: nothing is run")
    elif needed := unmet(job, missing):
        code, cause = FAILED, f"{' '.join(needed)} does not answer"
        requeue(run, slurm, job, Failure(last_step(run), cause, missing=needed))
    else:
        stops = StopRequests()
        code, cause = carry_out(
            run,
            config,
            resumed=resumed,
            reopen=reopen,
            without=WITHOUT if sft else (),
            executor_of=lambda r, c, lock: steps(r, c, job, missing),
            stops=stops,
        )
        if code == SAVED and slurm.at_limit == "requeue":
            if at := preempted(job):
                requeue(run, slurm, job, Failure(last_step(run), f"preempted at {at}", limit=True))
            elif signal.SIGUSR2 in stops.heard:
                requeue(run, slurm, job, Failure(last_step(run), "its time was up", limit=True))
        if code == FAILED:
            lost = tuple(node for node in silent(job.addresses) if node not in missing)
            cause += f"; {' '.join(lost)} does not answer" if lost else ""
            requeue(run, slurm, job, Failure(last_step(run), cause, lost=lost))
    store(run / RESULT, orjson.dumps({"job": job.job, "restarts": job.restarts, "code": code, "cause": cause}).decode())
    raise typer.Exit(code)


def unmet(job: Allocation, missing: Sequence[str]) -> tuple[str, ...]:
    """The nodes without which nothing can begin: any of the trainer's, or all of inference."""
    trainer, inference = (tuple(n for n in job.parts[name].nodes if n in missing) for name in COMPONENTS)
    return trainer or (inference if inference == job.parts["inference"].nodes else ())


def preempted(job: Allocation) -> str | None:
    """When Slurm has announced that it takes a running job's nodes, be it by SIGTERM where it is not set to send SIGUSR2."""
    try:
        told = ask("scontrol", "--oneliner", "show", "job", job.job)
    except OSError:
        return None
    at = re.search(r"\bJobState=RUNNING .*?\bPreemptTime=(\d\S+)", told)
    return at[1] if at else None


def room(run: RunDir) -> bool:
    """Whether the disk can take one more checkpoint like the largest, waited for while the job holds its nodes."""
    sizes = (sum(f.stat().st_size for f in c.rglob("*") if f.is_file()) for c in (run / "checkpoints").glob("step_*"))
    needed, deadline, told = FULL + max(sizes, default=0), time.monotonic() + ROOM_S, False
    while (free := shutil.disk_usage(run.root).free) < needed:
        if time.monotonic() > deadline:
            return False
        if not told:
            say(f"the disk of {run.root} has {free:,} bytes left: waiting {ROOM_S:g} s for {needed:,}")
            told = True
        time.sleep(1.0)
    return True


def requeue(run: RunDir, slurm: Slurm, job: Allocation, failure: Failure) -> None:
    """Have Slurm run the job again, which ends this process; return, having said why, where that is of no use."""
    if (run / STOP).exists():
        say("the job is not run again: a stop was asked for")
        return
    if not room(run):
        say("the job is not run again: the disk is still full")
        return
    failures = [*remembered(run / FAILURES), failure]
    store(run / FAILURES, msgspec.json.encode(failures).decode())
    match again(failures, slurm.tries):
        case str(reason):
            say(f"the job is not run again: it has {reason}")
        case seconds:
            say(f"{failure.cause}: job {job.job} is run again in {seconds:g} s")
            time.sleep(seconds)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which a requeue sends, and KillWait later SIGKILL
            try:
                ask("scontrol", "requeue", job.job)
            except OSError as e:
                say(f"the job cannot be run again: {e}")
            else:
                avoid(job, avoided(failures))
                time.sleep(REQUEUED_S)


def avoid(job: Allocation, nodes: frozenset[str]) -> None:
    """Have the job wait for other nodes, where its partitions have enough. Only a job that waits can be changed so."""
    for name, part in job.parts.items():
        if not (bad := sorted(nodes & set(part.nodes))):
            continue
        for _ in range(10):  # it may not wait yet
            try:
                if (others := spare(job, part, bad)) is not None:
                    ask("scontrol", "update", f"JobId={component(job, part)}", f"ExcNodeList={','.join(bad)}")
                    say(f"{name}: {' '.join(bad)} was lost twice and is avoided from now on; {others} other nodes are there")
                break
            except OSError:
                time.sleep(0.3)


def spare(job: Allocation, part: Part, bad: Sequence[str]) -> int | None:
    """How many nodes the component's partition has besides; None where they are too few."""
    partition = ask("squeue", "--noheader", f"--jobs={component(job, part)}", "--format=%P").strip()
    told = ask("sinfo", "--noheader", "--Node", f"--partition={partition}", "--responding", "--format=%N").split()
    others = len(set(told) - set(bad))
    return others if others >= len(part.nodes) else None


def component(job: Allocation, part: Part) -> str:
    return job.job if part.group is None else f"{job.job}+{part.group}"


def last_step(run: RunDir) -> int:
    """The last step in the run's ledger that no resume has undone."""
    path = run / "ledger.jsonl"
    return max((entry["step"] for entry in ledger.surviving(ledger.read(path))), default=0) if path.exists() else 0


def steps(run: RunDir, config: RunConfig, job: Allocation, missing: Sequence[str]) -> Executor:
    return SlurmExecutor(
        run,
        job,
        lost_s=config.launch.heartbeat_timeout_s,
        lost=missing,
        keep_env=config.launch.pass_env,
        cleanup=[run.weights_path(config.transport.weights)],
    )


def main(args: list[str] | None = None) -> int:
    return exit_code(app, args, "python -m prl.launch.slurm.lead")


class Lead:
    """The function of a run's first component."""

    handles_signals = True

    def __init__(self, run: Path, *, reopen: bool = False, sft: bool = False):
        self.run, self.options = run, [option for option, given in (("--reopen", reopen), ("--sft", sft)) if given]

    def __call__(self) -> None:
        """Ended, with the run's exit code, where that is not 0."""
        if code := main([str(self.run), *self.options]):
            raise Ended(code, f"the run has ended with exit code {code}: see {self.run / RESULT}")
