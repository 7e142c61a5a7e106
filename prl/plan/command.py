"""The command line of `python -m prl.plan`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from prl.bench.output import refusal
from prl.cli import exit_code
from prl.config.load import ConfigError, load
from prl.config.named import SetupError
from prl.models.spec import read_spec
from prl.plan.hardware import find
from prl.plan.plan import PlanError, make
from prl.plan.show import lines

HELP = """Say what a run needs and how long its steps take, without a GPU and without weights.

CONFIG is a run's file; of the model its config.json is enough, in model.path or beside CONFIG (configs/models has GLM-5's and
GLM-4.5-Air's). Exit code 2: it cannot run so; the nearest that can is said.

\b
Examples:
  python -m prl.plan configs/rl_glm5.yaml --nodes 28
  python -m prl.plan configs/rl_glm45_air.yaml trainer.mesh.cp=auto --hardware H100 --json -
  python -m prl.plan configs/demo.yaml --hardware cpu
  python -m prl.plan configs/sft_glm5.yaml --length 8192
"""
NODES = "Of the whole run; those that do not train generate. Default: one for each engine of vLLM, a GPU for an embedded one."
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(help=HELP)
def command(
    config: Annotated[Path, typer.Argument(help="YAML file of the run.", metavar="CONFIG")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, as in every command.")] = None,
    hardware: Annotated[str, typer.Option(help="A machine of the table, or a YAML file of one.", metavar="NAME|FILE")] = "H200",
    nodes: Annotated[int | None, typer.Option(min=1, help=NODES)] = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="Mean tokens of a rollout or conversation; default: the longest allowed.")
    ] = None,
    sampled: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Share of them that the model writes.")] = None,
    json_to: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the plan there too; - for stdout.")
    ] = None,
) -> None:
    if why := refusal(json_to):
        print(why, file=sys.stderr)
        raise typer.Exit(2)
    try:
        machine = find(hardware)
        run = load(config, overrides or (), planning=True)
        spec = read_spec(run.model.architecture or run.model.path or {})
        plan = make(spec, run, machine, nodes=nodes, length=length, sampled=sampled)
    except (ConfigError, SetupError, PlanError, FileNotFoundError) as e:
        print(e, file=sys.stderr)
        raise typer.Exit(2) from None
    print("\n".join(lines(plan)), file=sys.stderr if json_to == "-" else sys.stdout)
    if json_to is not None:
        text = json.dumps(plan.record(), indent=2) + "\n"
        if json_to == "-":
            print(text, end="")
        else:
            Path(json_to).write_text(text)
    if plan.problems:
        for problem in plan.problems:
            print(f"cannot run: {problem}", file=sys.stderr)
        if plan.asked.problem:
            near = plan.nearest()
            said = (
                "nothing up to eight times the ranks fits" if near is None else f"nearest that fits: {' '.join(near.changes)}"
            )
            print(said, file=sys.stderr)
        raise typer.Exit(2)


def main(args: Sequence[str] | None = None) -> int:
    """Exit code as in HELP."""
    return exit_code(app, args, "python -m prl.plan")
