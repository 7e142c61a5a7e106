"""`python -m prl.evaluate`: the held-out solve rate of a model, sampled at temperature 1 and greedy beside it."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console
from rich.table import Table

from prl.cli import exit_code
from prl.config.load import ConfigError, load
from prl.config.schema import RunConfig
from prl.launch.role import demand_kernels
from prl.models.spec import SpecError
from prl.orchestrator.evaluation import Evaluation, evaluate, held_out
from prl.transport.run_dir import RunDir

HELP = """Evaluate a model on held-out tasks with an engine in this process; print a table.

SOURCE is the folder of a run or a configuration file; its environments, sampling and `evaluation` sections count. The model is
--model, else a run's own (RUN/model, or RUN/sft/model before RL has ended), else the configuration's model.path.

Exit code 1 if the evaluation was cut at evaluation.timeout_s: its numbers then are none.

\b
Examples:
  python -m prl.evaluate outputs/demo
  python -m prl.evaluate outputs/demo --model outputs/demo/sft/model --json -
  python -m prl.evaluate configs/demo.yaml --model outputs/demo/control/model evaluation.tasks=1024
"""

log = logging.getLogger(__name__)
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(help=HELP)
def command(
    source: Annotated[Path, typer.Argument(help="Folder of a run or configuration file.", metavar="RUN|CONFIG")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, as in every command.")] = None,
    model: Annotated[Path | None, typer.Option(help="Model folder (config.json, safetensors).")] = None,
    json: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the numbers too; - for stdout.")] = None,
) -> None:
    folder = source if source.is_dir() else None
    if json not in (None, "-") and not Path(json).parent.is_dir():  # said now, not after the evaluation
        print(f"--json {json}: no folder {Path(json).parent}", file=sys.stderr)
        raise typer.Exit(2)
    try:
        config = load(folder / "config.yaml" if folder else source, overrides or ())
        demand_kernels(config.launch.kernels)
        chosen = model or _model_of(folder, config)
        result = evaluate_model(config, chosen)
    except (ConfigError, SpecError, ValueError, FileNotFoundError) as e:
        print(e, file=sys.stderr)
        raise typer.Exit(2) from None
    Console(stderr=json == "-").print(table(result, chosen))
    data = orjson.dumps({"model": str(chosen), **result.record()}, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    if json == "-":
        sys.stdout.buffer.write(data)
    elif json is not None:
        try:
            Path(json).write_bytes(data)
        except OSError as e:
            print(f"--json {json}: cannot be written: {e.strerror}", file=sys.stderr)
            raise typer.Exit(1) from None
    raise typer.Exit(0 if result.complete else 1)


def _model_of(folder: Path | None, config: RunConfig) -> Path:
    own = [folder / "model", folder / "sft" / "model"] if folder else []
    for path in [*own, *([config.model.path] if config.model.path else [])]:
        if (path / "config.json").is_file():
            return path
    raise ValueError(f"no model in {', '.join(map(str, own)) or 'model.path'}: name its folder with --model")


def evaluate_model(
    config: RunConfig, path: Path, *, progress: Callable[[int, int], None] = lambda done, of: None
) -> Evaluation:
    """The model at `path` on all `evaluation.tasks`, by the embedded engine, as version 0."""
    import torch

    from prl.envs.registry import make
    from prl.inference.server import engine_of
    from prl.models.hf import load_hf
    from prl.orchestrator.sft import Local
    from prl.tokenizer import of_run

    engine = Local(engine_of(load_hf(path, dtype=getattr(torch, config.inference.dtype)), config, "embedded"))
    envs = [make(env, seed=config.run.seed) for env in config.envs]

    async def run() -> Evaluation:
        work = evaluate(
            held_out(envs, config.evaluation.tasks),
            envs,
            engine.generate,
            of_run(config),
            config.sampling,
            version=0,
            seed=config.run.seed,
            greedy=config.evaluation.greedy,
            top_p=config.evaluation.top_p,
            top_k=config.evaluation.top_k,
            timeout_s=config.evaluation.timeout_s,
            max_in_flight=config.orchestrator.max_in_flight,
            progress=progress,
        )
        return (await engine.run([work]))[0]

    return asyncio.run(run())


class _Stopped(Exception):
    pass


def control(run: RunDir, config: RunConfig, index: int, stop: threading.Event) -> int:
    """The role that evaluates the control: <run>/control/model to <run>/control/eval.json."""
    metrics = run.metrics("evaluate")
    status = run.status("evaluate", metrics)
    status.set(phase="evaluating")

    def progress(done: int, of: int) -> None:
        status.beat()
        if stop.is_set():
            raise _Stopped

    folder = run / "control" / "model"
    try:
        result = evaluate_model(config, folder, progress=progress)
    except _Stopped:
        status.set(phase="saved")
        return 75
    if not result.complete:
        log.error("the control's evaluation is incomplete: %s", result.reason)
    metrics.log("eval", stage="control", **result.record())
    path = run / "control" / "eval.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(orjson.dumps(result.record(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    temporary.replace(path)
    status.set(phase="done")
    return 0


def table(result: Evaluation, model: Path) -> Table:
    out = Table(title=f"{model}: {result.tasks} held-out tasks in {result.wall_s:.1f} s", show_header=False)
    out.add_column(style="bold")
    out.add_column(justify="right")
    rows: list[tuple[str, float | None]] = [("solve rate, sampled", result.sampled), ("solve rate, greedy", result.greedy)]
    rows += [(f"  {name}, sampled", rate) for name, rate in result.by_env.items() if len(result.by_env) > 1]
    rows += [("mean reward", result.reward), ("response length", result.response_length)]
    for name, value in rows:
        out.add_row(name, "–" if value is None else f"{value:.3f}")
    for outcome, count in sorted(result.outcomes.items()):
        out.add_row(f"  {outcome}", str(count))
    if not result.complete:
        out.add_row("incomplete", result.reason)
    return out


def main(args: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 where the evaluation is incomplete, 2 for a wrong command line, configuration or model."""
    return exit_code(app, args, "python -m prl.evaluate")


if __name__ == "__main__":
    sys.exit(main())
