"""Runs of the main job for a bench: started as a user would, watched, and read once they have settled."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import orjson
import psutil

from prl.bench.machine import CpuTimes, share_of_others
from prl.config.load import ConfigError, Problem
from prl.monitor.history import History, Tail
from prl.transport.run_dir import RunDir

POLL_S = 0.1
STOP_S = 15.0
TAIL_LINES = 15


def say(what: str) -> None:
    """Name on stderr what is measured next, with the time since the process began: a bench takes minutes."""
    print(f"{time.time() - psutil.Process().create_time():6.1f} s  {what}", file=sys.stderr, flush=True)


class BenchError(RuntimeError):
    """A run that could not be measured: names it, and says what it said last."""


@dataclass(frozen=True)
class Watched:
    """A command that ran to its end."""

    stdout: str
    wall_s: float
    others: float
    """Share of all CPU time that processes other than ours used meanwhile."""


def watch(
    name: str,
    command: Sequence[str],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    poll: Callable[[], None] = lambda: None,
    show: bool = False,
) -> Watched:
    """Run a command to its end, calling `poll` about ten times a second; BenchError where it fails or takes too long.

    `show`: its stderr is the user's; else it is kept for the error. However this is left, the command runs no more: it is
    asked to end, then killed.
    """
    if not show:
        say(name)
    before, t0 = CpuTimes.now(), time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as err, tempfile.TemporaryFile("w+", errors="replace") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=None if show else err, env=env)
        try:
            while process.poll() is None:
                if time.monotonic() - t0 > timeout_s:
                    raise BenchError(f"{name}: not done within {timeout_s:g} s\n{_tail(err)}")
                poll()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_S)
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        wall = time.monotonic() - t0
        if process.returncode != 0:
            raise BenchError(f"{name}: {' '.join(command)} ended with exit code {process.returncode}\n{_tail(err)}")
        out.seek(0)
        text = out.read()
    return Watched(text, wall, share_of_others(before, CpuTimes.now()))


def _tail(log: IO[str]) -> str:
    log.seek(0)
    return "\n".join(log.read().splitlines()[-TAIL_LINES:])


class PeakMemory:
    """The largest resident size of each role of a run, in MiB, as seen at each call. Shared memory counts for every role."""

    def __init__(self, run: RunDir):
        self.run = run
        self.mb: dict[str, float] = {}

    def __call__(self) -> None:
        for path in (self.run / "status").glob("*.json"):
            status = self.run.read_status(path.stem)
            with suppress(psutil.NoSuchProcess):
                if status is not None:
                    rss = psutil.Process(status["pid"]).memory_info().rss / 2**20
                    self.mb[path.stem] = max(rss, self.mb.get(path.stem, 0.0))


@dataclass(frozen=True)
class Job:
    """A run of the main job that ended with 0."""

    name: str
    history: History
    memory_mb: dict[str, float]
    wall_s: float
    others: float


def run_job(
    folder: Path,
    name: str,
    config: Path,
    overrides: Sequence[str],
    *,
    module: str = "prl.rl",
    timeout_s: float = 600.0,
    show: bool = False,
) -> Job:
    """`python -m prl.rl CONFIG …` in `folder`/`name`; the folder stays for who wants to read more of it."""
    run = RunDir(folder / name)
    memory = PeakMemory(run)
    command = [sys.executable, "-m", module, str(config), f"run.dir={folder}", f"run.name={name}"]
    quiet = [] if show else ["monitor.console=off"]
    watched = watch(name, [*command, *quiet, *overrides], timeout_s=timeout_s, poll=memory, show=show)
    records = [*Tail(run / "metrics.jsonl").read()]
    return Job(name, History(records), memory.mb, watched.wall_s, watched.others)


@dataclass(frozen=True)
class Settled:
    """A run between its first steps, which include what happens once, and its last, for which nothing is generated any more."""

    first: int
    last: int
    """Steps after `first` up to `last` are counted."""
    seconds: float
    step_s: tuple[float, ...]
    """Of each step: from the end of the one before to its own."""
    generated_per_s: float | None
    """Rollouts finished per second, whatever became of them."""
    waited: dict[str, Counter[str]]
    """Seconds by role and by what it waited for."""
    trainer_s: dict[str, float]
    """What the trainer did in `seconds`, by name of its spans, waits apart."""
    records: tuple[dict[str, Any], ...]
    """The trainer's step records."""

    @property
    def steps(self) -> int:
        return self.last - self.first

    @property
    def steps_per_s(self) -> float:
        return self.steps / self.seconds


def run_ranks(
    commands: Sequence[Sequence[str]], what: str, timeout_s: float, env: Mapping[str, str] | None = None
) -> list[Any]:
    """What each process printed last, a JSON line; none is left behind. BenchError where one fails or is too slow."""
    processes = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) for c in commands]
    found = []
    try:
        for r, process in enumerate(processes):
            out, err = process.communicate(timeout=timeout_s)
            if process.returncode:
                raise BenchError(f"{what}: rank {r} ended with {process.returncode}:\n{err[-2000:]}")
            found.append(orjson.loads(out.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        raise BenchError(f"{what}: no end after {timeout_s:g} s") from None
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return found


def check_steps(steps: int, warmup: int, cooldown: int) -> None:
    """ConfigError where `settled` would find nothing to measure in a run of so many steps."""
    if steps <= warmup + cooldown:
        why = f"got {steps}: {warmup} of warm-up and the last {cooldown} (orchestrator.max_staleness + 1) do not count"
        raise ConfigError("command line", [Problem("--steps", f"expected at least {warmup + cooldown + 1}, {why}")])


def settled(history: History, *, warmup: int, cooldown: int) -> Settled:
    """Leave out the first `warmup` and the last `cooldown` steps. BenchError where nothing is left."""
    trainer, orchestrator = history.steps["trainer"], history.steps["orchestrator"]
    first, last = warmup, max(trainer, default=0) - cooldown
    missing = [s for s in range(max(first, 1), last + 1) if s not in trainer]
    if first < 1 or last <= first or missing:
        raise BenchError(
            f"the run has the trainer's records of {len(trainer)} steps; between {warmup} steps of warm-up and {cooldown} at "
            f"the end none can be measured{f' (step {missing[0]} is missing)' if missing else ''}"
        )
    records = [trainer[s] for s in range(first, last + 1)]
    t0, t1 = records[0]["t"], records[-1]["t"]
    generated = None
    if first in orchestrator and last in orchestrator:
        done = sum(sum(orchestrator[s]["outcomes"].values()) for s in range(first + 1, last + 1))
        generated = done / (orchestrator[last]["t"] - orchestrator[first]["t"])
    clipped = [{**s, "t0": max(s["t0"], t0), "t1": min(s["t1"], t1)} for s in history.spans if s["t0"] < t1 and s["t1"] > t0]
    did: Counter[str] = Counter()
    for s in clipped:
        if s["role"] == "trainer" and s["name"] != "wait":
            did[s["name"]] += s["t1"] - s["t0"]
    return Settled(
        first=first,
        last=last,
        seconds=t1 - t0,
        step_s=tuple(b["t"] - a["t"] for a, b in zip(records, records[1:], strict=False)),
        generated_per_s=generated,
        waited=dict(History(clipped).waited),
        trainer_s=dict(did),
        records=tuple(records[1:]),
    )
