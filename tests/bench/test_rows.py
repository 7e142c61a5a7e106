"""Rows, goals and verdicts: what is met, missed, and not judged on a loaded machine."""

import json
import math
from pathlib import Path

import pytest

from prl.bench.rows import DONE, MISSED, NOT_JUDGED, Goal, Result, Row, median, publish, quartiles, ratio


def result(*rows: Row, loaded: tuple[str, ...] = ()) -> Result:
    return Result("try", rows, {"cpu": "a CPU", "cores": 2}, {"others": 0.0, "spread": 0.0}, loaded)


FAST = Row("fast", 12.0, "per s", ratio=1.5, against="slow", goal=Goal(least=1.3))
SLOW = Row("slow", 9.0, "per s", ratio=1.1, against="slow", goal=Goal(least=1.3))
SOLVED = Row("solved", 0.7, "", goal=Goal(0.05, 0.6), timed=False)


def test_a_goal_is_on_the_ratio_where_there_is_one_and_both_bounds_count() -> None:
    assert FAST.met is True and SLOW.met is False
    assert SOLVED.met is False
    assert Row("x", 0.05, "", goal=Goal(0.05, 0.6)).met is True
    assert Row("x", 0.6, "", goal=Goal(0.05, 0.6)).met is True
    assert Row("x", 0.04, "", goal=Goal(0.05, 0.6)).met is False
    assert Row("x", 0.04, "").met is None


@pytest.mark.parametrize("figure", [None, math.nan])
def test_what_could_not_be_measured_meets_no_goal(figure: float | None) -> None:
    assert Row("x", figure, "s", goal=Goal(most=480)).met is False


def test_on_a_loaded_machine_nothing_that_depends_on_time_gets_a_verdict() -> None:
    for row in (FAST, SLOW):
        loaded = result(row, loaded=("others used half",))
        assert loaded.verdict(row) == "not judged"
        assert loaded.exit_code == NOT_JUDGED
        (shown,) = loaded.as_dict()["rows"]
        assert shown["met"] is None and shown["value"] == row.value
    assert result(FAST).exit_code == DONE
    assert result(SLOW).exit_code == MISSED
    assert result(FAST, Row("other", 1.0, "s")).exit_code == DONE


def test_what_does_not_depend_on_time_is_judged_on_any_machine() -> None:
    loaded = result(FAST, SOLVED, loaded=("others used half",))
    assert [loaded.verdict(r) for r in loaded.rows] == ["not judged", "missed"]
    assert loaded.exit_code == MISSED


def test_json_goes_to_the_file_or_alone_to_stdout(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = result(FAST, SLOW)
    assert publish(found, str(tmp_path / "new" / "out.json")) == MISSED
    out, err = capfd.readouterr()
    assert "1.50 × slow" in out and not err
    assert publish(found, "-") == MISSED
    out, err = capfd.readouterr()
    assert "1.50 × slow" in err
    written = json.loads((tmp_path / "new" / "out.json").read_text())
    assert json.loads(out)["rows"] == written["rows"]
    assert written["rows"][0] == {
        "name": "fast",
        "value": 12.0,
        "unit": "per s",
        "quartiles": None,
        "ratio": 1.5,
        "ratio_quartiles": None,
        "against": "slow",
        "goal": ">= 1.3",
        "met": True,
        "verdict": "met",
    }


def test_statistics() -> None:
    assert quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == (2.0, 4.0)
    assert quartiles([1.0, 2.0]) is None
    assert median([3.0, 1.0, 2.0]) == 2.0 and median([]) is None
    assert ratio(3.0, 2.0) == 1.5 and ratio(None, 2.0) is None and ratio(1.0, 0.0) is None
