"""The console command `prl`: `prl rl …` is `python -m prl.rl …`, and so on. A command is imported only when it is called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

import typer

COMMANDS = {
    "rl": "Train by asynchronous reinforcement learning: warm start, RL, control, report.",
    "sft": "Train on worked answers.",
    "evaluate": "Solve held-out tasks with a model and print the rates.",
    "serve": "Serve a model over HTTP.",
    "report": "Write a run's report; --audit proves that every batch was trained once.",
    "score": "Logprobs and experts of given tokens; how two engines differ.",
    "bench": "Measure the pipeline and its kernels.",
    "plan": "What a run needs and how long its steps take, without a GPU.",
}
HELP = """Asynchronous reinforcement learning of Mixture-of-Experts language models.

\b
Examples:
  prl rl configs/demo.yaml trainer.optim.lr=1e-4
  prl report outputs/demo --audit
"""


def exit_code(app: typer.Typer, args: Sequence[str] | None, name: str) -> int:
    """Run a command line; `args` None: that of the process."""
    try:
        app(args=args, prog_name=name)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


app = typer.Typer(help=HELP, add_completion=False, rich_markup_mode=None, no_args_is_help=True)


def _call(context: typer.Context) -> None:
    main: Callable[[Sequence[str]], int] = importlib.import_module(f"prl.{context.info_name}").main
    raise typer.Exit(main(context.args))


for _name, _help in COMMANDS.items():
    app.command(
        _name,
        help=_help,
        add_help_option=False,  # the command's own help is shown
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
    )(_call)


def main(args: Sequence[str] | None = None) -> int:
    """The exit code of the command called."""
    return exit_code(app, args, "prl")


if __name__ == "__main__":
    sys.exit(main())
