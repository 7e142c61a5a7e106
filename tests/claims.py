"""Run what docs/claims.md names, and write its last column anew.

    python tests/claims.py                 all of it (hours: the measurements are in it)
    python tests/claims.py --only sandbox  rows that hold this text
    python tests/claims.py --kept          run nothing, read the result files that are there

A row is `| claim | shown by | last result |`. What shows it stands in backticks:

* `tests/…py`, `tests/…py::name`: tests, the slow ones too;
* `FILE.json#TEXT`: rows of a bench's result whose name holds TEXT, or keys of another JSON object;
* anything else: a command that makes such files or ends with 0. One that several rows name runs once.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "claims.md"
TIMEOUT_S = 4 * 3600
NOT_MEASURED = "not measured"


@dataclass
class Row:
    line: int
    """Index of its line in the page."""
    claim: str
    shown_by: str
    result: str

    @property
    def items(self) -> list[str]:
        return re.findall(r"`([^`]+)`", self.shown_by)

    @property
    def tests(self) -> list[str]:
        return [i for i in self.items if is_test(i)]

    @property
    def files(self) -> list[str]:
        return [i for i in self.items if is_file(i)]

    @property
    def commands(self) -> list[str]:
        return [i for i in self.items if not is_test(i) and not is_file(i)]


def is_test(item: str) -> bool:
    return item.startswith("tests/") and " " not in item


def is_file(item: str) -> bool:
    return ".json#" in item and item.split("#")[0].endswith(".json") and " " not in item.split("#")[0]


def rows_of(page: str) -> list[Row]:
    """The rows of the tables whose first column is "claim". Raises ValueError naming the line."""
    rows = []
    inside = False
    for number, line in enumerate(page.splitlines()):
        heading = line.startswith("| claim |")
        inside = heading or (inside and line.startswith("|"))
        if not inside or heading or line.startswith("|---"):
            continue
        cells = [c.strip() for c in line.strip().strip("|").split(" | ")]
        if len(cells) != 3:
            raise ValueError(f"line {number + 1}: {len(cells)} cells, expected claim, shown by, last result: {line}")
        rows.append(Row(number, *cells))
    return rows


def with_results(page: str, results: dict[str, str]) -> str:
    """The page with the results of these claims; it may have been edited since they were read."""
    lines = page.splitlines()
    for row in rows_of(page):
        lines[row.line] = f"| {row.claim} | {row.shown_by} | {results.get(row.claim, row.result)} |"
    return "\n".join(lines) + "\n"


@dataclass(eq=False)  # pytest keeps its plugins in sets
class Tests:
    """A pytest plugin: keeps the tests that are asked for, with what became of each."""

    wanted: list[str]
    outcomes: dict[str, str] = field(default_factory=dict)

    def of(self, item: str, ids: Iterable[str]) -> list[str]:
        return [i for i in ids if i == item or i.startswith((f"{item}::", f"{item}["))]

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        ids = {id for item in self.wanted for id in self.of(item, [i.nodeid for i in items])}
        items[:] = [i for i in items if i.nodeid in ids]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = "failed" if report.failed else report.outcome

    def run(self) -> None:
        if self.wanted:
            paths = sorted({item.split("::")[0] for item in self.wanted})
            pytest.main(["-m", "not gpu", "-q", "--rootdir", str(ROOT), *paths], plugins=[self])

    def result(self, items: Iterable[str]) -> str:
        """Such as "3 passed", "1 of 3 failed (name)"."""
        ids = {item: self.of(item, self.outcomes) for item in items}
        if missing := [item for item, found in ids.items() if not found]:
            return f"failed: {', '.join(missing)} did not run"
        all_ids = sorted({id for found in ids.values() for id in found})
        count = Counter(self.outcomes[id] for id in all_ids)
        if count["failed"]:
            names = ", ".join(id.split("::")[-1] for id in all_ids if self.outcomes[id] == "failed")
            return f"{count['failed']} of {len(all_ids)} failed: {names}"
        return ", ".join(f"{n} {outcome}" for outcome, n in count.most_common())


def run_command(command: str) -> str | None:
    """None where it ended with 0, else what went wrong. A bench that misses a goal ends with 1, and its file says so too."""
    print(f"claims: {command}", flush=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    try:
        code = subprocess.run(
            ["bash", "-c", command], cwd=ROOT, env=os.environ | {"PATH": path}, timeout=TIMEOUT_S, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return f"no end after {TIMEOUT_S} s"
    return None if code == 0 else f"exit code {code}"


def figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def file_result(item: str, since: float = 0.0) -> str | None:
    """What the file says, with its date; None where there is none, or none newer than `since`."""
    name, _, text = item.partition("#")
    path = ROOT / name
    if not path.is_file() or path.stat().st_mtime < since:
        return None
    found = orjson.loads(path.read_bytes())
    day = found.get("at", time.strftime("%Y-%m-%d", time.gmtime(path.stat().st_mtime)))[:10]
    if "rows" in found:
        parts = [
            f"{row['name']}: {figure(row['value'])}"
            + (f", {row['ratio']:.3g} × {row['against']}" if row.get("ratio") is not None else "")
            + (f" ({row['goal']}: {row['verdict']})" if row.get("goal") else "")
            for row in found["rows"]
            if text in row["name"]
        ]
    else:
        parts = [f"{key} {figure(value)}" for key, value in found.items() if text in key and value is not None]
    return f"{day}: {', '.join(parts)}" if parts else f"{day}: nothing named {text} in {name}"


def main(args: list[str] | None = None, page: Path = PAGE) -> int:
    """Exit code 0 where every result is a good one or a value, 1 where something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", default="", help="rows that hold this text")
    parser.add_argument("--kept", action="store_true", help="run nothing; read the result files that are there")
    options = parser.parse_args(args)
    rows = [r for r in rows_of(page.read_text()) if options.only.lower() in f"{r.claim} {r.shown_by}".lower()]
    if options.kept:
        rows = [r for r in rows if r.files]
    tests = Tests([] if options.kept else [item for r in rows for item in r.tests])
    tests.run()
    started, wrong = time.time(), dict[str, str | None]()
    if not options.kept:
        wrong = {c: run_command(c) for c in dict.fromkeys(c for r in rows for c in r.commands)}
    today = time.strftime("%Y-%m-%d", time.gmtime())
    failed = False
    for row in rows:
        results = []
        if tests.wanted and row.tests:
            results.append(f"{today}: {tests.result(row.tests)}")
        for item in row.files:
            what = "; ".join(w for c in row.commands if (w := wrong.get(c)))
            since = started if row.commands and not options.kept else 0.0
            results.append(file_result(item, since) or (f"{today}: failed, {what}" if what else NOT_MEASURED))
        if not row.files and row.commands:
            results += [f"{today}: {'passed' if (w := wrong[c]) is None else f'failed, {w}'}" for c in row.commands]
        row.result = "; ".join(dict.fromkeys(results)) or NOT_MEASURED
        failed |= "failed" in row.result or "missed" in row.result
    page.write_text(with_results(page.read_text(), {row.claim: row.result for row in rows}))
    print("\n".join(f"{row.result:40} {row.claim}" for row in rows))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
