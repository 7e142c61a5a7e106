"""`python -m prl.launch add-replicas RUN -n N`: replicas for a run, from a job of their own that may end at any moment.

    add-replicas ── sbatch ──► a job without trainer: its batch host calls `Bring`
                               ├─ srun: inference-4     as the run's own replicas, steps with names that are free in the run
                               └─ srun: inference-5

The run's supervisor sees them come and go (prl.launch.guests). They serve while its RL stage runs, wait while the run is
between two lives, and end with it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from prl.cli import exit_code
from prl.config.load import ConfigError, load_resolved
from prl.config.schema import RunConfig, Slurm
from prl.launch.local import Executor, role_environment
from prl.launch.roles import role_specs
from prl.launch.slurm.environment import REQUEUED_S, Allocation, addresses, ask, hostnames, scrubbed
from prl.launch.slurm.executor import Ended, HetSlurmExecutor
from prl.launch.slurm.findings import minutes
from prl.launch.slurm.script import Part, Submission, run_job, submission
from prl.launch.slurm.state import over, states
from prl.launch.slurm.status import RESULT, STOP, job_of
from prl.launch.slurm.steps import SlurmExecutor
from prl.launch.supervisor import CONFIG, DONE, FAILED, Stage
from prl.rl import StopRequests, say
from prl.transport.run_dir import RunDir, keep_private

HELP = """Add inference replicas to a running run, from a Slurm job of their own.

They may be preempted, cancelled or run out of time at any moment: their requests go on at the other replicas. A preempted job
comes back by itself when there is room. It ends with the run; scancel ends it before.

\b
Examples:
  python -m prl.launch add-replicas outputs/first -n 4 --partition scavenge
"""
LOOK_S = 0.5
SILENT_S = 20.0
"""Without a sign of the run's supervisor its life is taken to have ended."""
ASK_S = 30.0
"""How often Slurm is asked then whether the run's job is still there."""
BACK_OFF_S = 3.0
TRIES = 5
"""Ends of a replica that nobody asked for."""
LEAVE_S = 8.0
LIMIT_MIN = 2
"""With less time left, it is the time limit that a job was warned of."""
WARN_S = 30
"""Before the time limit: requests in flight go elsewhere at once, nothing is saved."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def reserve(run: RunDir, first: int, count: int, job: str) -> list[int]:
    """Numbers of replicas from `first` on that no other job has; a job that is run again gets its own back."""
    folder = run / "guests"
    folder.mkdir(exist_ok=True, mode=0o700)
    numbers: list[int] = []
    number = first
    while len(numbers) < count:
        path = folder / f"{number}.job"
        with suppress(FileExistsError):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.write(fd, job.encode())
            os.close(fd)
        if path.read_text() == job:
            numbers.append(number)
        number += 1
    return numbers


class Host:
    """What keeps the replicas of one job in step with the run: `serve` returns the exit code."""

    def __init__(
        self,
        run: RunDir,
        config: RunConfig,
        executor: Executor,
        numbers: Sequence[int],
        *,
        stops: Callable[[], int],
        there: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ):
        """`there`: whether the run's own job is still known to wait or run."""
        self.run, self.executor, self.stops, self.there, self.clock = run, executor, stops, there, clock
        names = frozenset(f"inference-{number}" for number in numbers)
        self.specs = {spec.name: spec for spec in role_specs(run, config, Stage("rl", frozenset(), names), len(names))}
        self.running: set[str] = set()
        self.announced: set[str] = set()
        self.lost: Counter[str] = Counter()
        self._start_at = dict.fromkeys(names, 0.0)
        self._sign, self._sign_at, self._ask_at = 0.0, clock(), 0.0

    def wanted(self) -> bool | int:
        """Whether the run needs replicas now; an exit code where it never will again."""
        state, now = self.run.read_supervisor() or {}, self.clock()
        if (self.run / RESULT).exists() or (self.run / STOP).exists() or self.run.stages().get("rl", {}).get("done"):
            return DONE
        if state.get("t", 0.0) != self._sign:
            self._sign, self._sign_at = state.get("t", 0.0), now
        if now - self._sign_at > SILENT_S:
            if now > self._ask_at:
                self._ask_at = now + ASK_S
                if not self.there():
                    say("the run's job is gone")
                    return DONE
            return False
        return bool(state.get("stage") == "rl" and state.get("phase") in ("starting", "running", "draining"))

    def serve(self) -> int:
        try:
            while not self.stops():
                wanted = self.wanted()
                if wanted is not True and wanted is not False:
                    return wanted
                self._ended()
                self._withdrawn()
                if all(self.lost[name] >= TRIES for name in self.specs):
                    say(f"every replica has ended {TRIES} times: given up")
                    return FAILED
                now = self.clock()
                due = [n for n in self.specs if n not in self.running and now >= self._start_at[n] and self.lost[n] < TRIES]
                if wanted and due:
                    self._start(due)
                if not wanted and self.running:
                    say("the run needs no replicas now: they end, and wait for it")
                    self._end(self.running)
                time.sleep(LOOK_S)
            say("asked to end: requests go on at other replicas")
            return DONE
        finally:
            self.leave()

    def _start(self, names: Sequence[str]) -> None:
        self.run.forget_roles(names)
        self.executor.start([self.specs[name] for name in names])
        self.running |= set(names)
        self.announced -= set(names)
        say(f"started {', '.join(sorted(names))}")

    def _ended(self) -> None:
        for name, code in self.executor.poll().items():
            self.running.discard(name)
            self.run.forget_roles([name])
            self.lost[name] += 1
            self._start_at[name] = self.clock() + BACK_OFF_S * self.lost[name]
            say(f"{name} ended with exit code {code}")

    def _withdrawn(self) -> None:
        """One that the supervisor has given up on, or a new stage has forgotten, begins anew."""
        for name in sorted(self.running):
            if self.run.address(name) is not None:
                self.announced.add(name)
            elif name in self.announced:
                say(f"{name} is no longer announced: it is started again")
                self._end([name])

    def _end(self, names: Sequence[str] | set[str]) -> None:
        names = sorted(names)
        self.executor.end(names)
        self.run.forget_roles(names)
        self.running -= set(names)
        self.announced -= set(names)

    def leave(self) -> None:
        """Withdraw, so that nothing new comes, then end."""
        self.run.forget_roles(list(self.specs))
        self.executor.signal(sorted(self.running), signal.SIGTERM)
        deadline = self.clock() + LEAVE_S
        while self.running and self.clock() < deadline:
            self.running -= self.executor.poll().keys()
            time.sleep(0.05)
        self.executor.close()
        self.run.forget_roles(list(self.specs))


def inside(folder: Path, count: int) -> int:
    """On the batch host."""
    run = RunDir(folder)
    config = load_resolved(run.config_path)
    assert config.launch.slurm is not None
    job, number = os.environ["SLURM_JOB_ID"], job_of(run)
    nodes = hostnames(os.environ["SLURM_JOB_NODELIST"])
    part = Part(None, nodes, config.launch.slurm.inference.gpus_per_node)
    here = Allocation(job, int(os.environ.get("SLURM_RESTART_COUNT", "0")), {"inference": part}, addresses(nodes))
    numbers = reserve(run, config.inference.replicas, count, job)
    say(f"job {job}: replicas {', '.join(map(str, numbers))} for {run.root} on {' '.join(nodes)}")
    executor = SlurmExecutor(
        run, here, lost_s=config.launch.heartbeat_timeout_s, keep_env=config.launch.pass_env, folder=f"guests/{job}"
    )
    with StopRequests() as stops:
        host = Host(run, config, executor, numbers, stops=lambda: stops.count, there=lambda: not gone(number))
        code = host.serve()
        if stops.count and preempted(job):
            say(f"preempted: job {job} comes back when there is room")
            ask("scontrol", "requeue", job)  # at once: Slurm itself would after the grace period, if this still ran then
            time.sleep(REQUEUED_S)
    for n in numbers:
        (run / "guests" / f"{n}.job").unlink(missing_ok=True)
    return code


def preempted(job: str) -> bool:
    """Whether a job that was asked to end has time left, and was not cancelled."""
    try:
        state, _, left = ask("squeue", "--noheader", f"--jobs={job}", "--format=%T|%L").strip().partition("|")
    except OSError:
        return False
    return state == "RUNNING" and ((rest := minutes(left)) is None or rest >= LIMIT_MIN)


def gone(job: str) -> bool:
    """Whether Slurm says that the job has ended; where it says nothing, it may be back later."""
    return (found := states(job)) is not None and over(found)


class Bring:
    """The function of the job's only component."""

    handles_signals = True

    def __init__(self, run: Path, count: int):
        self.run, self.count = run, count

    def __call__(self) -> None:
        if code := inside(self.run, self.count):
            raise Ended(code, f"the replicas for {self.run} have failed")


def job_for(run: RunDir, config: RunConfig, slurm: Slurm, count: int) -> Submission:
    """The job of `count` replicas, as many on a node as the run has on its own."""
    root, part = run.root.resolve(), slurm.inference
    each = config.inference.replicas // part.nodes
    of_one = slurm.model_copy(update={"trainer": part.model_copy(update={"nodes": -(-count // each)}), "warn_s": WARN_S})
    job = run_job(f"{config.run.name}-replicas", root, of_one, Path.cwd(), Bring(root, count), inference=False)
    component = replace(job.components[0], name="guests")
    return replace(job, components=(component,), log=root / "logs" / "slurm-guests.log")


@app.command(help=HELP)
def command(
    folder: Annotated[Path, typer.Argument(metavar="RUN")],
    count: Annotated[int, typer.Option("-n", min=1, help="How many replicas.")],
    partition: Annotated[str | None, typer.Option(help="Default: that of the run's inference.")] = None,
    time_min: Annotated[int | None, typer.Option(min=1, help="Time limit; default: the run's.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted and end.")] = False,
) -> None:
    keep_private()
    run = RunDir(folder)
    try:
        number, config = job_of(run), load_resolved(run.config_path)
        slurm = config.launch.slurm
        assert slurm is not None
        if config.run.deterministic:
            raise OSError(f"{folder}: in deterministic mode (run.deterministic) the replicas are those it began with")
        if (run / RESULT).exists() or gone(number):
            raise OSError(f"{folder}: its job {number} has ended; continue it with --resume, then add replicas")
        part = slurm.inference.model_copy(update={"partition": partition or slurm.inference.partition})
        changed = {"time_min": time_min or slurm.time_min, "inference": part}
        job = job_for(run, config, slurm.model_copy(update=changed), count)
        if dry_run:
            print(submission(job), end="")
            return
        inherited = role_environment(scrubbed(os.environ), config.launch.pass_env, 1)
        own = HetSlurmExecutor(job.folder, environment=inherited).submit_job(job).job_id
    except ConfigError as e:
        say(str(e))
        raise typer.Exit(CONFIG) from None
    except OSError as e:
        say(f"failed: {e}")
        raise typer.Exit(FAILED) from None
    say(f"job {own} brings {count} replicas to {run.root}; scancel {own} ends them, the run goes on; log: {job.log}")


def main(args: Sequence[str] | None = None) -> int:
    """Exit code 0 submitted, 1 not, 2 configuration."""
    return exit_code(app, args, "python -m prl.launch add-replicas")


if __name__ == "__main__":
    sys.exit(main())
