"""What every bench gives: rows of figures, goals that are met, missed or not judged, one table, one JSON file."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
from rich.console import Console
from rich.markup import escape
from rich.table import Table

DONE, MISSED, NOT_JUDGED = 0, 1, 3
"""Exit codes of a bench that ran to its end: goals met (or none set), one missed, some not judged. 2 is wrong usage."""

WIDTH = 140
"""Columns of the table where the output is no terminal."""
Verdict = Literal["met", "missed", "not judged"]


@dataclass(frozen=True)
class Goal:
    """Bounds, both included, of a row's ratio, or of its value where it has no ratio."""

    least: float | None = None
    most: float | None = None

    def met(self, figure: float) -> bool:
        """NaN meets nothing."""
        low = self.least is None or figure >= self.least
        return low and (self.most is None or figure <= self.most) and figure == figure

    def __str__(self) -> str:
        if self.least is not None and self.most is not None:
            return f"{self.least:g} to {self.most:g}"
        return f">= {self.least:g}" if self.least is not None else f"<= {self.most:g}"


@dataclass(frozen=True)
class Row:
    """One figure. `ratio` is value / the same figure of what it is compared with, `against`."""

    name: str
    value: float | None
    unit: str
    quartiles: tuple[float, float] | None = None
    """First and third quartile of what `value` is the median of."""
    ratio: float | None = None
    against: str = ""
    goal: Goal | None = None
    ratio_quartiles: tuple[float, float] | None = None
    """The same of what `ratio` is the median of."""
    about: Mapping[str, str] = field(default_factory=dict)
    """What the row is of, for whoever reads the JSON: op, shape, backend."""
    timed: bool = True
    """Depends on who else uses the machine: a goal on it is judged on a quiet machine only."""

    @property
    def met(self) -> bool | None:
        """None without a goal."""
        figure = self.value if self.ratio is None else self.ratio
        return None if self.goal is None else figure is not None and self.goal.met(figure)


@dataclass(frozen=True)
class Result:
    """What a bench found. `loaded` says why the machine was not quiet, a line a reason; then no timed goal is judged."""

    bench: str
    rows: Sequence[Row]
    machine: Mapping[str, Any]
    load: Mapping[str, float]
    loaded: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    """What the rows were made of, as measured."""

    def verdict(self, row: Row) -> Verdict | None:
        if row.met is None:
            return None
        if row.timed and self.loaded:
            return "not judged"
        return "met" if row.met else "missed"

    @property
    def exit_code(self) -> int:
        verdicts = {self.verdict(row) for row in self.rows}
        return MISSED if "missed" in verdicts else NOT_JUDGED if "not judged" in verdicts else DONE

    def as_dict(self) -> dict[str, Any]:
        """The JSON file: `met` is true, false, or null for "no goal" and "not judged"; `verdict` tells these two apart."""
        rows = []
        for row in self.rows:
            verdict = self.verdict(row)
            met = None if verdict in (None, "not judged") else verdict == "met"
            quartiles = row.quartiles and list(row.quartiles)
            spread = row.ratio_quartiles and list(row.ratio_quartiles)
            goal = None if row.goal is None else str(row.goal)
            rows.append(
                {"name": row.name, "value": row.value, "unit": row.unit, "quartiles": quartiles, "ratio": row.ratio}
                | {"ratio_quartiles": spread, "against": row.against or None, "goal": goal, "met": met, "verdict": verdict}
                | dict(row.about)
            )
        return {
            "bench": self.bench,
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": dict(self.machine),
            "load": dict(self.load),
            "loaded": list(self.loaded),
            "settings": dict(self.settings),
            "rows": rows,
            "details": dict(self.details),
        }

    def table(self) -> Table:
        out = Table(title=f"{self.bench}: {self.machine.get('cpu')}, {self.machine.get('cores')} cores", title_justify="left")
        out.add_column("what", overflow="fold", ratio=1)
        out.add_column("value (quartiles)", justify="right")
        out.add_column("ratio", overflow="fold")
        out.add_column("goal", no_wrap=True)
        colours = {"met": "green", "missed": "red", "not judged": "yellow"}
        for row in self.rows:
            verdict = self.verdict(row)
            spread = "" if row.quartiles is None else f" ({shown(row.quartiles[0])} – {shown(row.quartiles[1])})"
            low_high = row.ratio_quartiles
            ratios = "" if low_high is None else f" ({low_high[0]:.2f} – {low_high[1]:.2f})"
            out.add_row(
                escape(row.name),
                f"{shown(row.value)}{spread} {row.unit}".rstrip(),
                "" if row.ratio is None else f"{row.ratio:.2f}{ratios} × {row.against}",
                "" if verdict is None else f"{row.goal}: [{colours[verdict]}]{verdict}[/]",
            )
        return out


def shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def quartiles(values: Sequence[float]) -> tuple[float, float] | None:
    """First and third, interpolated; None for fewer than three values, which have none worth the name."""
    if len(values) < 3:
        return None
    low, high = np.quantile(np.asarray(values, np.float64), [0.25, 0.75])
    return float(low), float(high)


def median(values: Sequence[float]) -> float | None:
    return float(np.median(np.asarray(values, np.float64))) if len(values) else None


def ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def publish(result: Result, json_to: str | None) -> int:
    """Print the table, or write JSON to the file `json_to` beside it ("-": JSON on stdout, the table on stderr).

    Returns the exit code.
    """
    console = Console(stderr=json_to == "-")
    if not console.is_terminal:
        console = Console(stderr=json_to == "-", width=WIDTH)
    console.print(result.table())
    for reason in result.loaded:
        console.print(f"machine loaded: {reason}", style="yellow", markup=False)
    if json_to is not None:
        text = orjson.dumps(result.as_dict(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        if json_to == "-":
            sys.stdout.buffer.write(text)
            sys.stdout.buffer.flush()
        else:
            path = Path(json_to)
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.tmp")
            temporary.write_bytes(text)
            temporary.replace(path)
    return result.exit_code
