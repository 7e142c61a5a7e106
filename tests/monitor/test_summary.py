"""summary.json says what the records say, and nothing that they do not."""

import io
from pathlib import Path

import orjson
import pytest
from rich.console import Console as Terminal

from prl.monitor.summary import table, write_summary
from tests.monitor.synthetic import records, write_run

REQUIRED = {
    "held_out_sft", "held_out_final", "mismatch_kl", "staleness_max", "unrouted_fraction", "recaptured_fraction",
    "rollouts_trained", "rollouts_dropped", "steps", "wall_s",
}  # fmt: skip


def test_a_whole_run(tmp_path: Path) -> None:
    made = records(40)
    summary = write_summary(write_run(tmp_path / "run", made))
    assert orjson.loads((tmp_path / "run" / "summary.json").read_bytes()) == summary
    assert summary.keys() >= REQUIRED
    steps = [r for r in made if r["kind"] == "step" and r["role"] == "trainer"]
    assert summary["held_out_sft"] == 0.12 and summary["held_out_control"] == 0.41
    assert summary["held_out_final"] == pytest.approx(0.12 + 0.6 * (1 - 2.718281828459045**-3))
    assert summary["mismatch_kl"] == pytest.approx(sum(r["mismatch_kl"] for r in steps[-20:]) / 20)
    assert (summary["steps"], summary["staleness_max"], summary["rollouts_trained"]) == (40, 2, 160)
    assert summary["rollouts_dropped_by"] == {"solved": 40 * 8 + 20, "stale": sum(s % 3 for s in range(1, 41))}
    assert summary["rollouts_dropped"] == sum(summary["rollouts_dropped_by"].values())
    assert summary["rl_wall_s"] == 70 and summary["rl_steps_per_s"] == pytest.approx(1 / 1.5)
    assert summary["unrouted_fraction"] == pytest.approx((3 * 18 * 0.001 + 6 * 0.005) / (3 * 18 + 6)), "by rows, not by tokens"
    assert summary["wall_s"] == pytest.approx(max(r["t"] for r in made) - min(r["t"] for r in made))


def test_a_run_that_did_not_get_far(tmp_path: Path) -> None:
    made = [r for r in records(10) if r["role"] == "sft"]
    summary = write_summary(write_run(tmp_path / "run", made))
    assert summary["held_out_sft"] is None and summary["held_out_final"] is None and summary["mismatch_kl"] is None
    assert (summary["steps"], summary["rollouts_trained"], summary["sft_steps"]) == (0, 0, 60)
    assert write_summary(write_run(tmp_path / "empty", []))["wall_s"] is None


def test_an_evaluation_on_too_few_tasks_is_no_held_out_value(tmp_path: Path) -> None:
    made = [r for r in records(40) if not (r["kind"] == "eval" and r.get("step") == 40)]
    assert write_summary(write_run(tmp_path / "run", made))["held_out_final"] is None


def test_steps_of_an_abandoned_lineage_are_not_counted_as_trained(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", records(4))
    with (run.root / "ledger.jsonl").open("ab") as file:
        file.write(orjson.dumps({"kind": "resume", "step": 2}) + b"\n")
        file.write(orjson.dumps({"kind": "step", "step": 3, "rollouts": ["a", "b"]}) + b"\n")
    assert write_summary(run)["rollouts_trained"] == 2 * 4 + 2


def test_the_closing_table_holds_the_numbers(tmp_path: Path) -> None:
    terminal = Terminal(width=100, record=True, file=io.StringIO())
    terminal.print(table(write_summary(write_run(tmp_path / "run", records(40)))))
    text = terminal.export_text()
    assert "0.120" in text and "+0.570" in text and "0.410" in text and "160" in text
    terminal.print(table(write_summary(write_run(tmp_path / "empty", []))))
    assert "–" in terminal.export_text()
