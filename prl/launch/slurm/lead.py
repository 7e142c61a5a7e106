"""What a job's batch host runs: `python -m prl.launch.slurm.lead RUN` is the run's supervisor, its roles are steps of the job.

The exit code is the run's; result.json in the run's folder has it too, with the cause, for those who follow the job.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec
import orjson
import typer

from prl.cli import exit_code
from prl.config.load import ConfigError, load_resolved
from prl.config.schema import RunConfig, Slurm
from prl.launch.local import Executor
from prl.launch.slurm.again import Failure, again, remembered
from prl.launch.slurm.environment import Allocation, allocation, ask
from prl.launch.slurm.steps import SlurmExecutor
from prl.launch.supervisor import CONFIG, FAILED
from prl.rl import carry_out, say, store
from prl.trainer import ledger
from prl.transport.run_dir import RunDir, keep_private

RESULT, FAILURES = "result.json", "failures.json"
REQUEUED_S = 60.0
"""How long Slurm may take to end the processes of a job that it was told to requeue."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def command(
    folder: Annotated[Path, typer.Argument(metavar="RUN")],
    reopen: Annotated[bool, typer.Option(help="Go on with RL though it was finished.")] = False,
) -> None:
    keep_private()
    run = RunDir(folder)
    try:
        config = load_resolved(run.config_path)
        slurm = config.launch.slurm
        if slurm is None:
            raise OSError("launch.slurm is not set in its configuration")
        job = allocation(slurm)
    except ConfigError as e:
        say(str(e))
        raise typer.Exit(CONFIG) from None
    except OSError as e:
        say(f"failed: {run.root}: {e}")
        raise typer.Exit(FAILED) from None
    say(f"job {job.job}: " + ", ".join(f"{name} on {' '.join(part.nodes)}" for name, part in job.parts.items()))
    (run / RESULT).unlink(missing_ok=True)
    resumed = job.restarts > 0 or (run / "ledger.jsonl").exists()
    code, cause = carry_out(run, config, resumed=resumed, reopen=reopen, executor_of=lambda r, c, lock: steps(r, c, job))
    if code == FAILED:
        requeue(run, slurm, job, cause)
    store(run / RESULT, orjson.dumps({"job": job.job, "restarts": job.restarts, "code": code, "cause": cause}).decode())
    raise typer.Exit(code)


def requeue(run: RunDir, slurm: Slurm, job: Allocation, cause: str) -> None:
    """Have Slurm run the job again, which ends this process; return, having said why, where that is of no use."""
    failures = [*remembered(run / FAILURES), Failure(last_step(run), cause)]
    store(run / FAILURES, msgspec.json.encode(failures).decode())
    match again(failures, slurm.tries):
        case str(reason):
            say(f"the job is not run again: it has {reason}")
        case seconds:
            say(f"job {job.job} is run again in {seconds:g} s (failure {len(failures)} of {slurm.tries})")
            time.sleep(seconds)
            try:
                ask("scontrol", "requeue", job.job)
            except OSError as e:
                say(f"the job cannot be run again: {e}")
            else:
                time.sleep(REQUEUED_S)


def last_step(run: RunDir) -> int:
    """The last step in the run's ledger that no resume has undone."""
    path = run / "ledger.jsonl"
    return max((entry["step"] for entry in ledger.surviving(ledger.read(path))), default=0) if path.exists() else 0


def steps(run: RunDir, config: RunConfig, job: Allocation) -> Executor:
    return SlurmExecutor(run, job, keep_env=config.launch.pass_env, cleanup=[run.weights_path(config.transport.weights)])


def main(args: list[str] | None = None) -> int:
    return exit_code(app, args, "python -m prl.launch.slurm.lead")


if __name__ == "__main__":
    sys.exit(main())
