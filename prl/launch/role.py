"""One process of a run: `python -m prl.launch.role ROLE --run DIR --index I`. Started by an executor, not by hand."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from prl.config.load import ConfigError, load_resolved
from prl.config.named import SetupError
from prl.launch.supervisor import CONFIG
from prl.transport.run_dir import RunDir, keep_private

MAINS = {
    "trainer": "prl.trainer.train:main",
    "orchestrator": "prl.orchestrator.main:main",
    "inference": "prl.inference.start:main",
    "sft": "prl.orchestrator.sft:main",
    "control": "prl.orchestrator.sft:control",
    "evaluate": "prl.evaluate:control",
}
"""Role to `main(run, config, index, stop) -> exit code`; imported only in the role's own process."""
_PR_SET_PDEATHSIG = 1


def die_with_parent(supervisor: int) -> None:
    """Have the kernel kill this process when the supervisor dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != supervisor:  # it died before the call
        os._exit(1)


def demand_kernels(backend: str | None) -> None:
    """Have every kernel of this process run on `backend`. SetupError where the environment demands another."""
    given = os.environ.get("PRL_KERNELS")
    if backend and given not in (None, backend):
        raise SetupError(f"launch.kernels is {backend}, PRL_KERNELS is {given}: unset one of them")
    if backend:
        os.environ["PRL_KERNELS"] = backend


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)  # a pretty traceback would print the secret


@app.command()
def main(
    role: Annotated[str, typer.Argument(help=f"One of {', '.join(MAINS)}.")],
    run: Annotated[Path, typer.Option(help="Folder of the run.")],
    index: Annotated[int, typer.Option(help="Rank or replica.")] = 0,
) -> None:
    """Run one role of a run until it ends or is asked to (SIGTERM, SIGINT, SIGUSR2: save at the next safe point and end)."""
    keep_private()
    faulthandler.enable()
    if supervisor := os.environ.get("PRL_SUPERVISOR"):
        die_with_parent(int(supervisor))
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, lambda *_: stop.set())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    folder = RunDir(run)
    module, _, name = MAINS[role].partition(":")
    try:
        config = load_resolved(folder.config_path)
        demand_kernels(config.launch.kernels)
        code = getattr(importlib.import_module(module), name)(folder, config, index, stop)
    except (ConfigError, SetupError) as e:
        print(e, file=sys.stderr)
        code = CONFIG
    for number in (signal.SIGTERM, signal.SIGUSR2):  # the interpreter's own end would restore the default, which kills
        signal.signal(number, signal.SIG_IGN)
    raise SystemExit(code)


if __name__ == "__main__":
    app()
