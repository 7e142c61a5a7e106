"""`python -m prl.launch CONFIG [key=value …]`: submit a run to Slurm and follow it."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import orjson
import typer

from prl.cli import exit_code
from prl.config.load import ConfigError, Problem, dump, load
from prl.config.schema import RunConfig
from prl.launch.local import RunBusy, RunLock, role_environment
from prl.launch.slurm.environment import scrubbed
from prl.launch.slurm.executor import HetSlurmExecutor
from prl.launch.slurm.lead import Lead
from prl.launch.slurm.script import Submission, run_job, submission
from prl.launch.slurm.state import follow
from prl.launch.slurm.status import JOB, RESULT, STOP, read, show
from prl.launch.slurm.status import job_of as submitted
from prl.launch.slurm.stop import stop
from prl.launch.supervisor import CONFIG, DONE, FAILED
from prl.rl import interpreter, open_run, say, store
from prl.transport.run_dir import RunDir, keep_private

HELP = """Submit a run to Slurm and follow it; the exit code is the run's.

The job is its own supervisor: this command may end at any moment (Ctrl-C too) without harm to the run. What is true of the
cluster (account, partitions, GPUs) stands in a site file, see configs/site.

\b
Examples:
  python -m prl.launch configs/slurm_tiny.yaml --site configs/site/mine.yaml --dry-run
  python -m prl.launch configs/slurm_tiny.yaml run.name=first trainer.steps=20
  python -m prl.launch --resume outputs/first
  python -m prl.launch --status outputs/first
  python -m prl.launch doctor --site configs/site/mine.yaml
  python -m prl.launch add-replicas outputs/first -n 4 --partition scavenge
"""
COMMANDS = {"doctor": "prl.launch.slurm.doctor", "add-replicas": "prl.launch.slurm.guests"}
"""Commands of their own, by the first word."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def job_of(run: RunDir, config: RunConfig, *, reopen: bool = False, sft: bool = False) -> Submission:
    """The job that carries out a run. ConfigError where one of its paths is none for Slurm."""
    assert config.launch.slurm is not None
    root = run.root.resolve()
    lead = Lead(root, reopen=reopen, sft=sft)
    job = run_job(config.run.name, root, config.launch.slurm, Path.cwd(), lead, inference=not sft)
    try:
        submission(job)
    except ValueError as e:
        raise ConfigError(str(root), [Problem("run.dir", str(e))]) from None
    return job


def submit(job: Submission, config: RunConfig) -> str:
    """The id of the run's job. OSError with what helps where Slurm does not take it."""
    inherited = role_environment(scrubbed(os.environ), config.launch.pass_env, 1)
    return HetSlurmExecutor(job.folder, environment=inherited).submit_job(job).job_id


def dry(config: str | None, given: Sequence[str], resume: Path | None, site: Path | None, *, sft: bool) -> int:
    """Print what would be submitted, its plan, and last what stands in the way of it; the exit code."""
    refused = ""
    try:
        run, resolved = open_run(config, given, resume, site)
        read_slurm(resolved, str(config or resume), sft=sft)
    except ConfigError as e:
        if config is None:
            raise
        refused = str(e)
        resolved = load(config, given, site=site, planning=True)
        read_slurm(resolved, config, sft=sft)
        run = RunDir(resolved.run.dir / resolved.run.name)
    print(submission(job_of(run, resolved, sft=sft)), end="", flush=True)
    for line in () if sft else planned(resolved):
        say(line)
    if refused:
        say(f"would not be submitted: {refused}")
    return CONFIG if refused else DONE


def read_slurm(config: RunConfig, name: str, *, sft: bool) -> None:
    """ConfigError where the configuration says nothing of a job, or of a warm start that is wished for."""
    if config.launch.slurm is None:
        problem = Problem("launch.slurm", "not set: name a site file with --site, or run on this machine with prl.rl")
        raise ConfigError(name, [problem])
    if sft and config.sft is None:
        raise ConfigError(name, [Problem("sft", "not set: steps, batch_size, … of the fine-tuning")])


def planned(config: RunConfig) -> list[str]:
    """What `prl.plan` says of the run on the nodes that its job asks for."""
    from prl.config.named import SetupError
    from prl.models.spec import read_spec
    from prl.plan.hardware import find
    from prl.plan.plan import PlanError, make
    from prl.plan.show import lines

    slurm = config.launch.slurm
    assert slurm is not None
    try:
        machine = find("H200" if slurm.trainer.gpus_per_node else "cpu")
        spec = read_spec(config.model.architecture or config.model.path or {})
        # The embedded engine is one process, however many GPUs its node has.
        nodes = None if config.inference.engine == "embedded" else slurm.trainer.nodes + slurm.inference.nodes
        plan = make(spec, config, machine, nodes=nodes, search=False)
    except (SetupError, PlanError, FileNotFoundError) as e:
        return [f"no plan: {e}"]
    return [*lines(plan), *(f"cannot run: {problem}" for problem in plan.problems)]


@app.command(help=HELP)
def command(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="CONFIG [KEY=VALUE]…", help="YAML file, and values that replace its own.")
    ] = None,
    site: Annotated[
        Path | None, typer.Option(metavar="YAML", envvar="PRL_SITE", help="What is true of the cluster (configs/site).")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be submitted, and to stderr the run's plan, and end.")
    ] = False,
    sft: Annotated[bool, typer.Option("--sft", help="The warm start alone (section sft), on trainer nodes alone.")] = False,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Continue this run from its last checkpoint.")] = None,
    status: Annotated[Path | None, typer.Option(metavar="RUN", help="Print how this run stands, and what has failed.")] = None,
    attach: Annotated[Path | None, typer.Option(metavar="RUN", help="Follow the job of this run again.")] = None,
    end: Annotated[
        Path | None, typer.Option("--stop", metavar="RUN", help="Have this run save and end; a second time, end at once.")
    ] = None,
) -> None:
    if folder := status or attach or end:
        raise typer.Exit(steer(folder, show if status else attend if attach else lambda run: stop(run, say=say)))
    given = list(arguments or [])
    config = given.pop(0) if given and resume is None else None
    try:
        if dry_run:
            raise typer.Exit(dry(config, given, resume, site, sft=sft))
        run, resolved = open_run(config, given, resume, site)
        read_slurm(resolved, str(config or resume), sft=sft)
        changed = resume is not None and bool(given) and resolved != load(run.config_path)
        job = job_of(run, resolved, reopen=changed, sft=sft)
        keep_private()  # sbatch passes it on to the job
        run.create()
    except (ConfigError, OSError) as e:
        say(str(e))
        raise typer.Exit(CONFIG) from None
    number = ""
    try:
        lock = RunLock(run, wait_s=0)  # nobody carries it out as its configuration is written
        try:
            store(run.config_path, dump(resolved))
            for name in (RESULT, STOP):
                (run / name).unlink(missing_ok=True)
            number = submit(job, resolved)
            store(run / JOB, orjson.dumps({"job": number}).decode())
        finally:
            lock.release()
        say(f"job {number} carries out {run.root}; end this command when you like: the job goes on (scancel {number} ends it)")
    except (RunBusy, OSError) as e:
        say(f"failed: {run.root}: {e}")
        if not number:
            say(f"submit it again with: {interpreter()} -m prl.launch --resume {shlex.quote(str(run.root))} [KEY=VALUE …]")
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        say("interrupted before the job's id was known: see squeue --me")
        raise typer.Exit(FAILED) from None
    raise typer.Exit(steer(run.root, attend))


def attend(run: RunDir) -> int:
    """Follow a run's job to its end; the run's exit code."""
    number, log = submitted(run), run / "logs" / "slurm.log"
    try:
        follow(number, log, say=say, write=lambda text: print(text, end="", flush=True))
    except KeyboardInterrupt:
        say(f"job {number} goes on")
        return DONE
    if "code" in (result := read(run / RESULT)):
        return int(result["code"])
    say(f"failed: job {number} ended without a result; see {log}")
    return FAILED


def steer(folder: Path, act: Callable[[RunDir], int | None]) -> int:
    """Do something with a run that was submitted; the exit code."""
    try:
        return act(RunDir(folder)) or DONE
    except OSError as e:
        say(f"failed: {e}")
        return FAILED


def main(args: Sequence[str] | None = None) -> int:
    """Exit code 0 done, 2 configuration, 75 saved and resumable, 1 failed."""
    words = sys.argv[1:] if args is None else list(args)
    if words and words[0] in COMMANDS:
        return int(importlib.import_module(COMMANDS[words[0]]).main(words[1:]))
    return exit_code(app, args, "python -m prl.launch")


if __name__ == "__main__":
    sys.exit(main())
