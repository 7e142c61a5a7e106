"""The command line of `python -m prl.bench`: measure, print a table, compare with goals."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from prl.bench.output import refusal
from prl.bench.rows import Result, publish
from prl.bench.runs import BenchError
from prl.cli import exit_code
from prl.config.load import ConfigError
from prl.config.named import SetupError

FAILED, CONFIG = 1, 2
DEMO = "configs/demo.yaml"

HELP = """Measure things against each other in one run on this machine.

Exit codes: 0 every goal was met, 1 one was missed or a run failed, 2 wrong usage or no GPU for gpu, 3 goals were not judged
because other work uses the machine (the figures are printed all the same). docs/bench.md says what each figure is.

Without a command it measures each kernel beside the best plain-torch way to do the same, in under two minutes.

\b
Examples:
  python -m prl.bench
  python -m prl.bench --only route --json -
  python -m prl.bench --status
  python -m prl.bench gpu --budget 240
  python -m prl.bench pipeline
  python -m prl.bench pipeline --json - | jq '.rows[] | select(.goal)'
  python -m prl.bench pipeline sft=null model.architecture=null model.path=outputs/demo-0/sft/model
"""

app = typer.Typer(help=HELP, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


Run = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CONFIG] [KEY=VALUE]…", help="YAML file of the run, and values that replace its own."),
]
Json = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the result there too; - for stdout.")]


def _of(run: list[str] | None, config: str) -> tuple[Path, list[str]]:
    """The file, `config` unless the first argument is one, and the overrides."""
    given = list(run or [])
    return Path(given.pop(0) if given and "=" not in given[0] else config), given


def _give(measure: Callable[[], Result], json_to: str | None) -> None:
    """Measure, publish, and end with the exit code."""
    if why := refusal(json_to):
        print(why, file=sys.stderr)
        raise typer.Exit(CONFIG)
    try:
        code = publish(measure(), json_to)
    except (ConfigError, SetupError) as e:  # SetupError: PRL_KERNELS demands what does not run here
        print(e, file=sys.stderr)
        raise typer.Exit(CONFIG) from None
    except (BenchError, OSError) as e:
        print(f"failed: {e}", file=sys.stderr)
        raise typer.Exit(FAILED) from None
    raise typer.Exit(code)


@app.callback(invoke_without_command=True)
def ops(
    context: typer.Context,
    only: Annotated[str, typer.Option(help="Measure the kernels whose row has this in its name.")] = "",
    status: Annotated[bool, typer.Option("--status", help="Show each kernel's backend here, and why not another.")] = False,
    json: Json = None,
) -> None:
    if context.invoked_subcommand is not None:
        if only or status or json:
            raise typer.BadParameter(f"{context.invoked_subcommand} comes first, then its own options")
        return
    if status:
        if only or json:
            raise typer.BadParameter("--status goes alone: it measures nothing")
        print_status()
        return
    from prl.bench.ops import measure

    _give(lambda: measure(only), json)


def print_status() -> None:
    """Exit code 2 where PRL_KERNELS demands what does not run here."""
    import torch
    from rich.console import Console
    from rich.table import Table

    from prl.kernels.registry import PREFERENCE, KernelError, backends, status

    device, demand = "cuda" if torch.cuda.is_available() else "cpu", os.environ.get("PRL_KERNELS")
    title = f"backends for tensors on {device}" + (f", PRL_KERNELS={demand}" if demand else "")
    table = Table("kernel", *PREFERENCE, title=title, title_justify="left")
    states: dict[str, dict[str, str]] = {}
    for op, backend, state in status(device):
        states.setdefault(op, {})[backend] = state
    reasons = dict.fromkeys(
        (backend, state) for row in states.values() for backend, state in row.items() if state not in ("chosen", "available")
    )
    notes = {key: f"no ({i})" for i, key in enumerate(reasons, 1)}
    for op, row in states.items():
        table.add_row(op, *(notes.get((b, row.get(b, "")), row.get(b, "–")) for b in PREFERENCE))
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    console.print("– there is no such kernel")
    for (backend, state), note in notes.items():
        console.print(f"{note[3:]} {backend}: {state}", markup=False)
    try:
        backends(device)
    except KernelError as e:
        print(e, file=sys.stderr)
        raise typer.Exit(CONFIG) from None


@app.command(
    add_help_option=False,  # its own help is shown
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)
def gpu(context: typer.Context) -> None:
    """Every kernel on one GPU at GLM-5's sizes: agreement with the reference, then speed."""
    from prl.bench.gpu import main

    raise typer.Exit(main(context.args))


Repeats = Annotated[int, typer.Option(min=1, help="Runs of each that are compared.")]


@app.command()
def pipeline(
    run: Run = None,
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps of a run.")] = 14,
    warmup: Annotated[int, typer.Option(min=1, help="Of these the first that do not count.")] = 3,
    repeats: Repeats = 2,
    json: Json = None,
) -> None:
    """The main job, asynchronous beside synchronous: speed, waits, memory; mismatch with router replay on and off."""
    from prl.bench.pipeline import measure

    _give(lambda: measure(*_of(run, DEMO), steps=steps, warmup=warmup, repeats=repeats), json)


@app.command()
def context(
    length: Annotated[list[int] | None, typer.Option(min=64, help="Tokens of the row; default 2048, 4096, … 32768.")] = None,
    cp: Annotated[list[int] | None, typer.Option(min=1, help="Ranks that share it; default 1, 2 and 4.")] = None,
    json: Json = None,
) -> None:
    """Peak memory of a rank as a function of a row's length, for several numbers of ranks that share it."""
    from prl.bench.context import measure

    _give(lambda: measure(length or [2048 << i for i in range(5)], cp or [1, 2, 4]), json)


@app.command()
def memory(
    only: Annotated[list[str] | None, typer.Option(help="Cases whose name has this.")] = None,
    json: Json = None,
) -> None:
    """Memory of training steps beside what `prl.plan` says: live tensors by category, and the process's own."""
    from prl.bench.memory import measure

    _give(lambda: measure(only or ()), json)


@app.command()
def plan(
    hardware: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write this machine there, for `python -m prl.plan --hardware FILE`.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Cases whose name has this.")] = None,
    json: Json = None,
) -> None:
    """Calibrate the plan on this CPU, then step times as planned beside steps that were not calibrated on."""
    from prl.bench.plan import measure

    if hardware is not None and (why := refusal(str(hardware))):
        print(why.replace("--json", "--hardware", 1), file=sys.stderr)
        raise typer.Exit(CONFIG)
    _give(lambda: measure(hardware, only or ()), json)


@app.command()
def trainer(
    run: Run = None,
    turns: Annotated[int, typer.Option(min=3, help="Steps of each side that are compared.")] = 12,
    json: Json = None,
) -> None:
    """Tokens per second of a training step beside transformers under FSDP2, on 1 and 2 ranks; MFU, parts of a step, memory."""
    from prl.bench.trainer import measure

    _give(lambda: measure(*_of(run, "bench/trainer.yaml"), turns=turns), json)


@app.command()
def bitwise(
    run: Run = None,
    turns: Annotated[int, typer.Option(min=3, help="Of each, on and off.")] = 12,
    json: Json = None,
) -> None:
    """What run.bitwise costs a training step and the engine, beside the same without it; whether its logprobs are equal."""
    from prl.bench.bitwise import measure

    _give(lambda: measure(*_of(run, "bench/trainer.yaml"), turns=turns), json)


@app.command()
def fidelity(
    seed: Annotated[list[int] | None, typer.Option(help="Of several the last is held against the others' bands.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="glm_moe_dsa, glm4_moe, qwen3_moe; default all.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Pairs whose name has this.")] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Steps of each run.")] = 4,
    write: Annotated[bool, typer.Option("--write", help="Write the bands that ship, prl/monitor/bands.yaml.")] = False,
    json: Json = None,
) -> None:
    """How far trainer and engine are apart for each pair of types where nothing is wrong; the bands of docs/fidelity.md."""
    from prl.bench.fidelity import MODELS, SEEDS, measure
    from prl.monitor.bands import FILE

    if unknown := set(model or ()) - MODELS.keys():
        raise typer.BadParameter(f"--model: {', '.join(sorted(unknown))}, expected {', '.join(MODELS)}")
    to = FILE if write else None
    _give(lambda: measure(seeds=seed or SEEDS, models=model or tuple(MODELS), only=only or (), rounds=rounds, write=to), json)


@app.command()
def seeds(
    run: Run = None,
    seed: Annotated[list[int] | None, typer.Option(help="Give it as often as you like; default 0, 1 and 2.")] = None,
    json: Json = None,
) -> None:
    """What the demo learns under several seeds (`make demo-seeds`); the runs stay in run.dir."""
    from prl.bench.seeds import measure

    _give(lambda: measure(*_of(run, DEMO), seeds=seed or (0, 1, 2)), json)


@app.command()
def peers(
    run: Run = None,
    python: Annotated[Path, typer.Option(help="Interpreter of the environment that has TRL.")] = Path(".venv-peers/bin/python"),
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps of a run.")] = 30,
    warmup: Annotated[int, typer.Option(min=1, help="Of these the first that do not count.")] = 5,
    repeats: Repeats = 3,
    experts: Annotated[
        str, typer.Option(help="TRL's experts implementation (eager, batched_mm, grouped_mm); empty: its default.")
    ] = "",
    json: Json = None,
) -> None:
    """Rollouts per second beside TRL's GRPOTrainer (`make bench-peers` sets up its environment)."""
    from prl.bench.peers import measure

    if not python.exists():
        print(f"--python: {python} is not there; `make bench-peers` makes the environment", file=sys.stderr)
        raise typer.Exit(CONFIG)
    _give(
        lambda: measure(python, *_of(run, "bench/peers.yaml"), steps=steps, warmup=warmup, repeats=repeats, experts=experts),
        json,
    )


def main(args: Sequence[str] | None = None) -> int:
    """Exit code as in HELP."""
    # So that a run that is under way ends with its bench, and temporary folders go.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    return exit_code(app, args, "python -m prl.bench")
