"""How a run stands, from its folder and Slurm's answer alone: before, during and after it, anywhere that sees the folder."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from prl.config.load import ConfigError, load_resolved
from prl.launch.local import tail
from prl.launch.slurm.again import remembered
from prl.launch.slurm.state import over, recorded, states
from prl.monitor.history import statuses
from prl.trainer import ledger
from prl.transport.run_dir import RunDir

JOB, RESULT, FAILURES, STOP = "job.json", "result.json", "failures.json", "stop"
"""Files of a run's folder: the job that carries it out, how it ended, its lives that failed, and that a stop was asked for."""
SILENT_S = 10.0
"""A supervisor that lives writes every two seconds; a shared filesystem may show it late."""
LINES = 20


def read(path: Path) -> dict[str, Any]:
    """A JSON file; empty where it is not there, or not whole."""
    try:
        found = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def job_of(run: RunDir) -> str:
    """The number of the job that carries out the run. OSError where it was never submitted."""
    if "job" not in (found := read(run / JOB)):
        raise OSError(f"{run.root}: not the folder of a run that was submitted to Slurm (no {JOB} in it)")
    return str(found["job"])


def asked(job: str) -> dict[str, tuple[str, str]] | None:
    """Component to state and reason, of a job that Slurm has forgotten from its accounting; None while nothing answers."""
    if (found := states(job)) != {}:
        return found
    return {name: (state, "None") for name, state in recorded(job).items()}


def since(t: float, now: float) -> str:
    """`3 s`, `4 min 5 s`, `2 h 3 min` from t to now."""
    seconds = max(0, round(now - t))
    if seconds < 60:
        return f"{seconds} s"
    return f"{seconds // 60} min {seconds % 60} s" if seconds < 3600 else f"{seconds // 3600} h {seconds % 3600 // 60} min"


def describe(run: RunDir, jobs: Mapping[str, tuple[str, str]] | None, now: float) -> Iterator[str]:
    """Lines for a user. `jobs`: Slurm's answer (`asked`)."""
    job, state, result = job_of(run), run.read_supervisor() or {}, read(run / RESULT)
    living = state.get("phase") not in (None, "done", "failed") and not result and not (jobs is not None and over(jobs))
    yield f"run    {run.root}"
    if jobs is None:
        yield f"job    {job}: Slurm does not answer here"
    elif not jobs:
        yield f"job    {job}: ended, and Slurm has forgotten it"
    else:
        told = (f"{name} {is_.lower()}" + (f" ({why})" if why != "None" else "") for name, (is_, why) in jobs.items())
        yield f"job    {', '.join(sorted(told))}"
    if (run / STOP).exists() and not result:
        yield "stop   asked for"
    if result:
        yield f"ended  exit code {result.get('code')}" + (f": {result['cause']}" if result.get("cause") else "")
    elif living:
        what = f"{state['stage']} {state['phase']} for {since(state['since'], now)}"
        sign = f"no sign of life for {since(state['t'], now)}" if now - state["t"] > SILENT_S else "alive"
        yield f"phase  {what}; the supervisor on {state['host']}: {sign}"
        if state.get("waits_for"):
            yield f"waits  for {state['waits_for']}"
    elif jobs is not None and over(jobs):
        yield "ended  without a result: the supervisor was killed, or never ran"
    elif state.get("cause"):
        yield f"phase  between two lives; the last one: {state['cause']}"
    else:
        yield "phase  not begun"
    yield steps(run, now)
    yield from roles(run, set(state.get("roles", ())) if living else set(), now)
    yield from failures(run, state, now)
    if not result and not living and jobs is not None and over(jobs):
        yield f"the last lines of {run / 'logs' / 'slurm.log'}:"
        yield from (f"  {line}" for line in tail(run / "logs" / "slurm.log", 0, LINES))


def steps(run: RunDir, now: float) -> str:
    path = run / "ledger.jsonl"
    try:
        done = ledger.surviving(ledger.read(path)) if path.exists() else []
        planned = load_resolved(run.config_path).trainer.steps
    except (ledger.LedgerError, ConfigError, OSError) as e:
        return f"step   {e}"
    last = max(done, key=lambda entry: entry["step"], default=None)
    return f"step   {last['step']} of {planned}, {since(last['t'], now)} ago" if last else f"step   none of {planned} yet"


def roles(run: RunDir, alive: set[str], now: float) -> Iterator[str]:
    """A table. `alive`: those that the supervisor has; others with a status have ended, or are guests."""
    rows = [("role", "node", "phase", "step", "last sign", "waits for")]
    for name, s in statuses(run).items():
        guest = name.startswith("inference-") and now - s.get("t", 0.0) < SILENT_S
        phase = str(s.get("phase", "")) if name in alive or guest else "ended"
        waits = str(s.get("waits_for", "")) if phase != "ended" else ""
        rows.append((name, str(s.get("host", "")), phase, str(s.get("step", "")), f"{since(s.get('t', now), now)} ago", waits))
    rows += [(name, "", "not there yet", "", "", "") for name in sorted(alive - {row[0] for row in rows})]
    if len(rows) == 1:
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()


def failures(run: RunDir, state: Mapping[str, Any], now: float) -> Iterator[str]:
    """Lives that have failed, and the last words of the role that was lost last."""
    try:
        lives = remembered(run / FAILURES)
    except (OSError, ValueError):
        lives = []
    for i, life in enumerate(lives, 1):
        yield f"life {i} ended after step {life.step}: {life.cause}"
    *earlier, last = state.get("lost") or [None]
    for lost in earlier:
        yield f"lost   {lost['role']} {since(lost['t'], now)} ago: {lost['why']}"
    if last:
        yield f"lost   {last['role']} {since(last['t'], now)} ago: {last['why']}; its last lines:"
        yield from (f"  {line}" for line in last["lines"])


def show(run: RunDir) -> None:
    """Print it. OSError where the folder is not that of a submitted run."""
    for line in describe(run, asked(job_of(run)), time.time()):
        print(line)
