"""docs/claims.md names tests that exist, and `tests/claims.py` writes what became of them."""

import ast
from pathlib import Path

import orjson
import pytest

from tests import claims

ROOT = Path(__file__).parents[1]
NAMED = sorted({item for row in claims.rows_of(claims.PAGE.read_text()) for item in row.tests})


def test_every_row_is_shown_by_something() -> None:
    rows = claims.rows_of(claims.PAGE.read_text())
    assert len(rows) > 50 and all(row.items and row.result for row in rows)
    assert len({row.claim for row in rows}) == len(rows)


@pytest.mark.parametrize("item", NAMED)
def test_a_named_test_exists(item: str) -> None:
    path, *names = item.split("::")
    body = ast.parse((ROOT / path).read_text()).body
    for name in names:
        found = [n for n in body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and n.name == name]
        # A state machine of hypothesis is a class that is assigned.
        assigned = [n for n in body if isinstance(n, ast.Assign) and any(getattr(t, "id", "") == name for t in n.targets)]
        assert found or assigned, f"{item}: no {name} in {path}"
        body = getattr(found[0], "body", []) if found else []


def test_results_are_written_and_other_rows_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(
        "import pytest\n@pytest.mark.parametrize('n', [1, 2])\ndef test_good(n): pass\n"
        "def test_bad(): assert 0\ndef test_not(): assert 0\n"
    )
    (tmp_path / "tests" / "room").mkdir()
    (tmp_path / "tests" / "room" / "conftest.py").write_text("")
    (tmp_path / "tests" / "room" / "test_more.py").write_text("def test_good(): pass\n")
    result = {"at": "2026-01-02T03:04:05Z", "rows": [
        {"name": "seed 0: gain", "value": 0.31, "ratio": None, "goal": ">= 0.25", "verdict": "met"},
        {"name": "speed", "value": 2.0, "ratio": 1.5, "against": "slow", "goal": None, "verdict": None}]}  # fmt: skip
    (tmp_path / "kept.json").write_bytes(orjson.dumps(result))
    page = tmp_path / "claims.md"
    page.write_text(
        "# x\n\n| claim | shown by | last result |\n|---|---|---|\n"
        "| all good | `tests/test_some.py::test_good` | not measured |\n"
        "| two rooms | `tests/room/test_more.py`, `tests/test_some.py::test_good` | not measured |\n"
        "| one bad | `tests/test_some.py::test_good`, `tests/test_some.py::test_bad` | not measured |\n"
        "| gone | `tests/test_some.py::test_gone` | not measured |\n"
        "| kept | `kept.json#gain`, `kept.json#speed` | not measured |\n"
        "| stale | `true`, `kept.json#gain` | not measured |\n"
        "| command | `exit 3` | not measured |\n"
        "| other | `false` | not measured |\n"
        "\n| number | value | by |\n|---|---|---|\n| a | b | c |\n"
    )
    monkeypatch.setattr(claims, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    for only in ("all good", "two rooms", "one bad", "gone", "kept", "command"):
        claims.main(["--only", only], page)
    text = page.read_text()
    got = {row.claim: row.result.partition(": ")[2] or row.result for row in claims.rows_of(text)}
    assert got["all good"] == "2 passed"
    assert got["two rooms"] == "3 passed"
    assert got["one bad"] == "1 of 3 failed: test_bad"
    assert got["gone"] == "failed: tests/test_some.py::test_gone did not run"
    assert got["kept"].startswith("seed 0: gain: 0.31 (>= 0.25: met); 2026-01-02: speed: 2, 1.5 × slow")
    assert got["stale"] == "not measured", "a file from before the command is no result of it"
    assert got["command"] == "failed, exit code 3" and got["other"] == "not measured"
    assert text.endswith("| a | b | c |\n")
    assert claims.main(["--kept"], page) == 0
    assert {row.claim: row.result for row in claims.rows_of(page.read_text())}["stale"].startswith("2026-01-02: seed 0: gain")
