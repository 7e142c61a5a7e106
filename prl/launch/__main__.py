"""`python -m prl.launch CONFIG [key=value …]`: submit a run to Slurm and follow it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import orjson
import typer

from prl.cli import exit_code
from prl.config.load import ConfigError, Problem, dump, load
from prl.config.schema import RunConfig
from prl.launch.local import RunBusy, RunLock
from prl.launch.slurm.lead import RESULT
from prl.launch.slurm.script import Submission, batch, submission
from prl.launch.slurm.submit import follow, submit
from prl.launch.supervisor import CONFIG, FAILED
from prl.rl import open_run, say, store
from prl.transport.run_dir import RunDir, keep_private

JOB = "job.json"
HELP = """Submit a run to Slurm and follow it; the exit code is the run's.

The job is its own supervisor: this command may end at any moment (Ctrl-C too) without harm to the run. What is true of the
cluster (account, partitions, GPUs) stands in a site file, see configs/site.

\b
Examples:
  python -m prl.launch configs/slurm_tiny.yaml --site configs/site/mine.yaml --dry-run
  python -m prl.launch configs/slurm_tiny.yaml run.name=first trainer.steps=20
  python -m prl.launch --resume outputs/first
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def job_of(run: RunDir, config: RunConfig, *, reopen: bool = False) -> Submission:
    """The job that carries out a run."""
    assert config.launch.slurm is not None
    root = run.root.resolve()
    words = [sys.executable, "-m", "prl.launch.slurm.lead", str(root), *(["--reopen"] if reopen else [])]
    return Submission(f"prl-{config.run.name}", root, Path.cwd(), config.launch.slurm, batch(words))


@app.command(help=HELP)
def command(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="CONFIG [KEY=VALUE]…", help="YAML file, and values that replace its own.")
    ] = None,
    site: Annotated[
        Path | None, typer.Option(metavar="YAML", envvar="PRL_SITE", help="What is true of the cluster (configs/site).")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted and end.")] = False,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Continue this run from its last checkpoint.")] = None,
) -> None:
    given = list(arguments or [])
    config = given.pop(0) if given and resume is None else None
    try:
        run, resolved = open_run(config, given, resume, site)
        if resolved.launch.slurm is None:
            problem = Problem("launch.slurm", "not set: name a site file with --site, or run on this machine with prl.rl")
            raise ConfigError(str(config or resume), [problem])
        changed = resume is not None and bool(given) and resolved != load(run.config_path)
        job = job_of(run, resolved, reopen=changed)
        if dry_run:
            print(submission(job), end="")
            return
        keep_private()  # sbatch passes it on to the job
        run.create()
    except (ConfigError, OSError) as e:
        say(str(e))
        raise typer.Exit(CONFIG) from None
    try:
        lock = RunLock(run, wait_s=0)  # nobody carries it out as its configuration is written
        try:
            store(run.config_path, dump(resolved))
            (run / RESULT).unlink(missing_ok=True)
            number = submit(job, os.environ, keep_env=tuple(resolved.launch.pass_env))
            store(run / JOB, orjson.dumps({"job": number}).decode())
        finally:
            lock.release()
        say(f"job {number} carries out {run.root}; end this command when you like: the job goes on (scancel {number} ends it)")
        follow(number, job.log, say=say, write=lambda text: print(text, end="", flush=True))
        if not (run / RESULT).exists():
            say(f"failed: job {number} ended without a result; see {job.log}")
            raise typer.Exit(FAILED)
        raise typer.Exit(int(orjson.loads((run / RESULT).read_bytes())["code"]))
    except (RunBusy, OSError) as e:
        say(f"failed: {run.root}: {e}")
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        say(f"job {number} goes on")
        raise typer.Exit(0) from None


def main(args: Sequence[str] | None = None) -> int:
    """Exit code 0 done, 2 configuration, 75 saved and resumable, 1 failed."""
    return exit_code(app, args, "python -m prl.launch")


if __name__ == "__main__":
    sys.exit(main())
