"""`python -m prl.rl CONFIG [key=value …]`: a whole run, from warm start to report, under one supervisor."""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Annotated

import typer

from prl.cli import exit_code
from prl.config.load import ConfigError, Problem, dump, load
from prl.config.schema import RunConfig
from prl.launch.local import Executor, LocalExecutor, RunBusy, RunLock, usable_cores
from prl.launch.roles import limits_of, role_specs, stages_of
from prl.launch.supervisor import CONFIG, DONE, FAILED, State, Supervisor
from prl.monitor.console import Console
from prl.trainer.checkpoint import CheckpointError, latest_complete
from prl.transport.run_dir import RunDir, keep_private

FULL = 1 << 16
"""Bytes; a disk with fewer is taken for the reason of a failure."""
SAME_S = 0.2
"""Signals this close are one request: make and timeout pass theirs on beside the terminal's own."""

HELP = """Train a model by asynchronous reinforcement learning, as the configuration says; show how it goes.

A run lives in the folder run.dir/run.name: configuration, metrics, checkpoints, logs and report. Ctrl-C saves and ends it,
a second Ctrl-C ends it at once; both can be resumed. Exit codes: 0 done, 2 configuration, 75 saved and resumable, 1 failed.

\b
Examples:
  python -m prl.rl configs/demo.yaml
  python -m prl.rl configs/demo.yaml run.name=fast trainer.optim.lr=1e-4 --dry-run
  python -m prl.rl --resume outputs/demo
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class StopRequests:
    """Counts SIGINT, SIGTERM, SIGHUP and SIGUSR2 (Slurm's warning: `--signal=B:USR2@120`) while it is open.

    The first SIGTERM after Slurm's warning is part of the same request: saving takes longer than the warning allowed for.
    """

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)

    def __init__(self) -> None:
        self.count, self.heard = 0, set[int]()
        self._last = -math.inf

    def _heard(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        ending = number == signal.SIGTERM and self.heard == {signal.SIGUSR2}
        self.heard.add(number)
        if now - self._last > SAME_S and not ending:
            self.count += 1
        self._last = now

    def __enter__(self) -> StopRequests:
        self._before = {n: signal.signal(n, self._heard) for n in self.NUMBERS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def say(line: str) -> None:
    with suppress(OSError):  # a full disk, a terminal that is gone: no reason for a run to end, or not to
        print(line, file=sys.stderr, flush=True)


def open_run(
    config: str | None, overrides: Sequence[str], resume: Path | None, site: Path | None = None
) -> tuple[RunDir, RunConfig]:
    """The run's folder (not created yet) and its configuration; ConfigError says what is wrong and how to mend it."""
    if resume is not None:
        run = RunDir(resume)
        if not run.config_path.is_file():
            raise ConfigError(str(resume), [Problem("--resume", "not the folder of a run: no config.yaml in it")])
        return run, load(run.config_path, overrides)
    if config is None:
        raise ConfigError("command line", [Problem("CONFIG", "missing: name a YAML file, or a run with --resume")])
    if "=" in config and not Path(config).exists():
        raise ConfigError("command line", [Problem("CONFIG", f"missing: name a YAML file before the override {config}")])
    loaded = load(config, overrides, site=site)
    run = RunDir(loaded.run.dir / loaded.run.name)
    if run.root.exists() and (not run.root.is_dir() or any(run.root.iterdir())):
        mend = f"continue it with --resume {run.root}, choose another run.name, or remove it"
        raise ConfigError(config, [Problem("run.name", f"{run.root} is there already; {mend}")])
    return run, loaded


def store(path: Path, text: str) -> None:
    """Write a file whole, or not at all; one that says this already is left alone."""
    if path.is_file() and path.read_text("utf-8") == text:
        return
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, "utf-8")
    temporary.replace(path)


def here(run: RunDir, config: RunConfig, lock: RunLock) -> Executor:
    """This machine."""
    return LocalExecutor(run, lock, keep_env=config.launch.pass_env, cleanup=[run.weights_path(config.transport.weights)])


def execute(
    run: RunDir,
    config: RunConfig,
    *,
    reopen: bool = False,
    without: Collection[str] = (),
    began: Callable[[], None] = lambda: None,
    executor_of: Callable[[RunDir, RunConfig, RunLock], Executor] = here,
    stops: StopRequests | None = None,
) -> State:
    """Run every stage that is not finished, in a created folder. `reopen`: RL goes on though it was finished.

    `began` is called once the run is ours; `executor_of` says where its roles run. RunBusy where another supervisor has it;
    OSError where a role cannot be started.
    """
    lock = RunLock(run)
    try:
        began()
        done = {name for name, stage in run.stages().items() if stage["done"] and not (reopen and name != "sft")}
        finished = done | set(without)
        store(run.config_path, dump(config))
        executor = executor_of(run, config, lock)
        try:
            with stops or StopRequests() as requests, Console(run, config):
                cores = usable_cores()
                supervisor = Supervisor(
                    run,
                    executor,
                    limits_of(config),
                    lambda stage: role_specs(run, config, stage, cores),
                    stops=lambda: requests.count,
                    say=say,
                )
                return supervisor.supervise(stages_of(config, finished))
        finally:
            executor.close()
    finally:
        lock.release()


def interpreter() -> str:
    """What a user types for this Python: `python` where that finds it, else its path."""
    if shutil.which("python") == sys.executable:
        return "python"
    return os.path.relpath(sys.executable) if Path(sys.executable).is_relative_to(Path.cwd()) else sys.executable


def tell(run: RunDir, state: State, command: str = "prl.rl") -> None:
    """Why the run ended before it was done, and how to go on."""
    if state.phase == "failed":
        say(f"failed: {state.cause}")
        if state.last_words:
            say(f"the last lines of {run / 'logs' / state.culprit}.log:")
        for line in state.last_words:
            say(f"  {line}")
        if shutil.disk_usage(run.root).free < FULL:
            say(f"the disk of {run.root} is full: free some space, then")
    else:
        reason = (run.read_status("orchestrator") or {}).get("reason", state.cause)
        say(f"saved before the run was done: {reason} (exit code {state.code}: it can go on)")
    if state.code == CONFIG:  # the stored configuration is wrong; going on without a change would end the same way
        say(f"mend it with: {interpreter()} -m {command} --resume {run.root} KEY=VALUE")
    else:
        say(f"continue with: {interpreter()} -m {command} --resume {run.root}")


def where_from(run: RunDir) -> str:
    """What RL goes on from, in words; empty where it has not begun. CheckpointError where the newest checkpoint is damaged."""
    if (folder := latest_complete(run)) is not None:
        return f"RL goes on from {folder}"
    ledger = run / "ledger.jsonl"
    return "RL begins anew: none of its checkpoints is left" if ledger.exists() and ledger.stat().st_size else ""


def report(run: RunDir) -> None:
    """Write summary and report of a finished run and print the closing table."""
    from rich.console import Console as Terminal

    from prl.monitor.report import write_report
    from prl.monitor.summary import table, write_summary

    summary = write_summary(run)
    page = write_report(run)
    Terminal().print(table(summary))
    print(f"report: {page}")


def carry_out(
    run: RunDir,
    config: RunConfig,
    *,
    resumed: bool,
    reopen: bool = False,
    overrides: Sequence[str] = (),
    without: Collection[str] = (),
    executor_of: Callable[[RunDir, RunConfig, RunLock], Executor] = here,
    stops: StopRequests | None = None,
) -> tuple[int, str]:
    """`execute` a run, then write its report or say why it ended; the exit code and the cause. `stops` tells what was heard."""
    try:
        metrics = run.metrics("supervisor")

        def began() -> None:
            if (reopen or not run.stages().get("rl", {}).get("done")) and (words := where_from(run)):
                say(words)
            metrics.log("event", name="resume" if resumed else "start", overrides=overrides)

        state = execute(run, config, reopen=reopen, without=without, began=began, executor_of=executor_of, stops=stops)
        metrics.log("event", name="end", code=state.code, cause=state.cause)
        if state.code == DONE:
            print(run / "sft" / "model") if "rl" in without else report(run)
        else:
            tell(run, state, "prl.rl" if executor_of is here else "prl.launch")
    except (RunBusy, CheckpointError, OSError) as e:
        say(f"failed: {run.root}: {e}")
        return FAILED, str(e)
    return state.code, state.cause


@app.command(help=HELP)
def command(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="CONFIG [KEY=VALUE]…", help="YAML file, and values that replace its own.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and end.")] = False,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Continue this run from its last checkpoint.")] = None,
) -> None:
    given = list(arguments or [])
    config = given.pop(0) if given and resume is None else None
    try:
        run, resolved = open_run(config, given, resume)
        if not resolved.envs:
            raise ConfigError(
                str(config or resume), [Problem("envs", "empty: RL needs an environment (python -m prl.sft does not)")]
            )
        changed = resume is not None and bool(given) and resolved != load(run.config_path)
        if dry_run:
            print(dump(resolved), end="")
            return
        keep_private()
        try:
            run.create()
        except OSError as e:
            raise ConfigError(str(run.root), [Problem("run.dir", f"cannot be written: {e}")]) from e
    except ConfigError as e:
        say(str(e))
        raise typer.Exit(CONFIG) from None
    code, _ = carry_out(run, resolved, resumed=resume is not None, reopen=changed, overrides=given)
    raise typer.Exit(code)


def main(args: Sequence[str] | None = None) -> int:
    """Exit code 0 done, 2 configuration, 75 saved and resumable, 1 failed."""
    return exit_code(app, args, "python -m prl.rl")


if __name__ == "__main__":
    sys.exit(main())
