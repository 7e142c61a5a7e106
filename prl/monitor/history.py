"""What metrics.jsonl and status/ tell of a run so far: read as they grow, for the console, the summary and the report."""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec
import orjson

Record = dict[str, Any]
SPANS_KEPT = 50_000
SAMPLE_STEPS_KEPT = 400


class RunFolder(Protocol):
    """As much of a run's folder as monitoring reads."""

    @property
    def root(self) -> Path: ...

    def stages(self) -> dict[str, Record]: ...


class Tail:
    """The new whole lines of a JSONL file at each `read`. A last line without its end waits; broken lines are counted."""

    def __init__(self, path: Path):
        self.path, self.broken = path, 0
        self._offset = 0
        self._rest = b""

    def read(self) -> Iterator[Record]:
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self._offset:  # a new file under the old name
                    self._offset, self._rest = 0, b""
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError:
                record = None
            if isinstance(record, dict):
                yield record
            else:
                self.broken += 1


def statuses(run: RunFolder) -> dict[str, Record]:
    """What each role's status file says, by role."""
    found = {}
    for path in sorted((run.root / "status").glob("*.json")):
        try:
            record = orjson.loads(path.read_bytes())
        except (OSError, orjson.JSONDecodeError):
            continue
        if isinstance(record, dict):
            found[path.stem] = record
    return found


Number = float | None
"""What is not finite is written as null."""


class Entry(msgspec.Struct, kw_only=True):
    """What every record has. These types are of the fields that monitoring reads; a record may hold more."""

    t: float
    role: str = ""


class Drift(msgspec.Struct, kw_only=True):
    state: str = ""
    text: str = ""
    causes: list[str] = []
    bounds: dict[str, Number] = {}


class Step(Entry, kw_only=True):
    step: int
    loss: Number = None
    reward: Number = None
    tokens_per_s: float = 0.0
    rss_mb: float = 0.0
    mismatch_kl: Number = None
    mismatch_kl_own: Number = None
    mismatch: dict[str, Number] | None = None
    mismatch_own: dict[str, Number] | None = None
    own_tokens: int = 0
    drift: Drift | None = None
    rows: float = 0.0
    unrouted_fraction: Number = None
    recaptured_fraction: Number = None
    selection_flip_fraction: Number = None
    skipped: float = 0.0
    expert_counts: list[list[float]] | None = None
    time: dict[str, float] | None = None
    staleness: dict[int, int] | None = None
    dropped: dict[str, int] | None = None
    dropped_by_length: dict[str, dict[int, int]] | None = None
    outcomes: dict[str, int] | None = None


class Eval(Entry, kw_only=True):
    step: int = 0
    split: str = ""
    loss: Number = None
    tasks: int = 0
    sampled: Number = None
    greedy: Number = None
    complete: bool = True


class Span(Entry, kw_only=True):
    name: str
    t0: float
    t1: float
    what: str | None = None


class Text(Entry, kw_only=True):
    step: int
    reward: Number = None


class Rates(Entry, kw_only=True):
    generated_per_s: float = 0.0


class Event(Entry, kw_only=True):
    name: str
    step: int | None = None


KINDS: dict[str, type[Entry]] = {"step": Step, "eval": Eval, "span": Span, "sample": Text, "engine": Rates, "event": Event}
STAGES = {"sft": "sft", "control": "control", "evaluate": "control"}
"""The roles that are not of the RL phase. What "evaluate" measures is the control's model."""


def stage_of(record: Record) -> str:
    """sft, rl or control, by the record's role."""
    return STAGES.get(record.get("role", "").partition("-")[0], "rl")


class History:
    """The surviving course of a run: a step done again after a resume replaces what was recorded first."""

    def __init__(self, records: Iterable[Record] = ()):
        self.steps: dict[str, dict[int, Record]] = defaultdict(dict)
        """By "sft", "control", "trainer" (rank 0) and "orchestrator"; by step."""
        self.evals: dict[str, list[Record]] = defaultdict(list)
        """By stage, in order. An evaluation that was cut is not here."""
        self.validation: dict[int, Record] = {}
        """Of the warm start, the loss on conversations that are held out; by step."""
        self.cut_evals = 0
        self.spans: deque[Record] = deque(maxlen=SPANS_KEPT)
        self.samples: dict[int, list[Record]] = defaultdict(list)
        self.events: deque[Record] = deque(maxlen=1000)
        self.engines: dict[str, Record] = {}
        self.waited: dict[str, Counter[str]] = defaultdict(Counter)
        """Seconds by role and by what it waited for, numbers in it left out."""
        self.began: dict[str, float] = {}
        """First sign of each stage, moved by `idle_s` since."""
        self.idle_s = 0.0
        """Between a life of the run and the next."""
        self.left_out: Counter[str] = Counter()
        """Records by why they are not here."""
        self.first_t: float | None = None
        self.last_t: float | None = None
        for record in records:
            self.add(record)

    def add(self, r: Record) -> None:
        """Take one record in; one whose fields are not of their types is left out and counted."""
        kind = r.get("kind")
        try:
            msgspec.convert(r, KINDS.get(kind, Entry) if isinstance(kind, str) else Entry, str_keys=True)
        except msgspec.ValidationError as e:
            self.left_out[f"{r.get('role')} {kind}: {e}"] += 1
            return
        t, role, step = r["t"], r.setdefault("role", ""), r.get("step")
        if kind == "event" and r["name"] == "resume" and role == "supervisor" and self.last_t is not None:
            idle = max(0.0, t - self.last_t)
            self.idle_s += idle
            self.began = {stage: began + idle for stage, began in self.began.items()}
        self.first_t = min(t, self.first_t if self.first_t is not None else t)
        self.last_t = max(t, self.last_t or t)
        if role != "supervisor":
            self.began.setdefault(stage_of(r), t)
        if kind == "step":
            stage = stage_of(r)
            self.steps[stage if stage != "rl" else role][r["step"]] = r
        elif kind == "eval" and r.get("split") == "validation":
            self.validation[step or 0] = r
        elif kind == "eval" and r.get("complete", True):
            self.evals[stage_of(r)].append(r)
        elif kind == "eval":
            self.cut_evals += 1
        elif kind == "sample":
            self.samples[r["step"]].append(r)
            if len(self.samples) > SAMPLE_STEPS_KEPT:  # the first and the latest steps are what anyone looks at
                del self.samples[sorted(self.samples)[SAMPLE_STEPS_KEPT // 2]]
        elif kind == "engine":
            self.engines[role] = r
        elif kind == "span":
            self.spans.append(r)
            if r["name"] == "wait":
                self.waited[role][re.sub(r"\d+", "n", r.get("what") or "something")] += r["t1"] - r["t0"]
        elif kind == "event":
            self.events.append(r)
            if r["name"] == "resume" and step is not None:
                self._resume(step)

    def _resume(self, step: int) -> None:
        """Steps after `step` belong to an abandoned lineage."""
        for name in ("trainer", "orchestrator"):
            for later in [s for s in self.steps[name] if s > step]:
                del self.steps[name][later]
        self.evals["rl"] = [e for e in self.evals["rl"] if e.get("step", 0) <= step]
        for later in [s for s in self.samples if s > step]:
            del self.samples[later]

    def elapsed(self, now: float | None = None) -> float | None:
        """Seconds that the run has run, until the last record or `now`; None before the first record."""
        end = self.last_t if now is None else now
        return end - self.first_t - self.idle_s if end is not None and self.first_t is not None else None

    def series(self, name: str, key: str) -> tuple[list[int], list[Any]]:
        """Steps and values of `key`, where it has one; `key` may reach into mappings: "mismatch.p99"."""
        xs, ys = [], []
        for step, record in sorted(self.steps[name].items()):
            value: Any = record
            for part in key.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None:
                xs.append(step)
                ys.append(value)
        return xs, ys

    def last(self, name: str) -> Record:
        """The record of the latest step, empty if there is none."""
        steps = self.steps[name]
        return steps[max(steps)] if steps else {}

    def rl_seconds(self) -> float:
        """Time that the surviving steps of RL took the trainer, its waits included."""
        return float(sum(sum((r.get("time") or {}).values()) for r in self.steps["trainer"].values()))

    def staleness(self) -> Counter[int]:
        """Rollouts trained, by staleness."""
        total: Counter[int] = Counter()
        for record in self.steps["orchestrator"].values():
            for value, count in (record.get("staleness") or {}).items():
                total[int(value)] += count
        return total


def load_history(run: RunFolder) -> History:
    tail = Tail(run.root / "metrics.jsonl")
    history = History(tail.read())
    if tail.broken:
        history.left_out["not a JSON object"] += tail.broken
    return history
