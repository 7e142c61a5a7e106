"""What a job's batch host runs: `python -m prl.launch.slurm.lead RUN` is the run's supervisor, its roles are steps of the job.

The exit code is the run's; result.json in the run's folder has it too, with the cause, for those who follow the job.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import orjson
import typer

from prl.cli import exit_code
from prl.config.load import ConfigError, load_resolved
from prl.config.schema import RunConfig
from prl.launch.local import Executor
from prl.launch.slurm.environment import Allocation, allocation
from prl.launch.slurm.steps import SlurmExecutor
from prl.launch.supervisor import CONFIG, FAILED
from prl.rl import carry_out, say, store
from prl.transport.run_dir import RunDir

RESULT = "result.json"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def command(
    folder: Annotated[Path, typer.Argument(metavar="RUN")],
    reopen: Annotated[bool, typer.Option(help="Go on with RL though it was finished.")] = False,
) -> None:
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
    again = job.restarts > 0 or (run / "ledger.jsonl").exists()
    code = carry_out(run, config, resumed=again, reopen=reopen, executor_of=lambda r, c, lock: steps(r, c, job))
    store(run / RESULT, orjson.dumps({"job": job.job, "restarts": job.restarts, "code": code}).decode())
    raise typer.Exit(code)


def steps(run: RunDir, config: RunConfig, job: Allocation) -> Executor:
    return SlurmExecutor(run, job, keep_env=config.launch.pass_env, cleanup=[run.weights_path(config.transport.weights)])


def main(args: list[str] | None = None) -> int:
    return exit_code(app, args, "python -m prl.launch.slurm.lead")


if __name__ == "__main__":
    sys.exit(main())
