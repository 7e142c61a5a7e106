"""`python -m prl.sft CONFIG [key=value …]`: the warm start of a run alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from prl.cli import exit_code
from prl.config.load import ConfigError, Problem, dump
from prl.launch.local import RunBusy
from prl.launch.supervisor import CONFIG, DONE, FAILED
from prl.rl import execute, open_run, say, tell
from prl.transport.run_dir import keep_private

HELP = """Train a model on the worked answers of the configuration's environments (its section `sft`).

The model is written to run.dir/run.name/sft/model, an ordinary Hugging Face folder; `python -m prl.rl --resume` goes on from
it with RL. Ctrl-C saves and ends it. Exit codes: 0 done, 2 configuration, 75 saved and resumable, 1 failed.

\b
Examples:
  python -m prl.sft configs/demo.yaml
  python -m prl.sft configs/demo.yaml run.name=longer sft.steps=2000 sft.stop_at=null
  python -m prl.sft --resume outputs/longer
"""

WITHOUT = ("rl", "control", "evaluate")
"""The stages that are no warm start."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(help=HELP)
def command(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="CONFIG [KEY=VALUE]…", help="YAML file, and values that replace its own.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and end.")] = False,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Continue this run.")] = None,
) -> None:
    given = list(arguments or [])
    config = given.pop(0) if given and resume is None else None
    try:
        run, resolved = open_run(config, given, resume)
        if resolved.sft is None:
            raise ConfigError(str(config or resume), [Problem("sft", "not set: steps, batch_size, … of the fine-tuning")])
        if dry_run:
            print(dump(resolved), end="")
            return
        keep_private()
        run.create()
    except (ConfigError, OSError) as e:
        say(str(e))
        raise typer.Exit(CONFIG) from None
    try:
        state = execute(run, resolved, without=WITHOUT)
    except (RunBusy, OSError) as e:
        say(f"failed: {e}")
        raise typer.Exit(FAILED) from None
    if state.code == DONE:
        print(run / "sft" / "model")
    else:
        tell(run, state, "prl.sft")
    raise typer.Exit(state.code)


def main(args: Sequence[str] | None = None) -> int:
    """Exit code 0 done, 2 configuration, 75 saved and resumable, 1 failed."""
    return exit_code(app, args, "python -m prl.sft")


if __name__ == "__main__":
    sys.exit(main())
