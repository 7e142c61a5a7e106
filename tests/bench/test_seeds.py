"""`bench seeds`: a summary against the goals."""

from pathlib import Path

import pytest

from prl.bench.runs import BenchError
from prl.bench.seeds import measure, rows_of

GOOD = {"held_out_sft": 0.2, "held_out_final": 0.5, "held_out_control": 0.3, "mismatch_kl": 1e-4, "wall_s": 400.0}


def verdicts(**changed: float | None) -> dict[str, bool]:
    return {r.name: r.met for r in rows_of({3: GOOD | changed}) if r.met is not None}


def test_a_good_run_meets_every_goal() -> None:
    assert verdicts() == {"seed 3: solve rate after SFT": True, "seed 3: gain of RL": True, "seed 3: wall time": True}


@pytest.mark.parametrize(
    "changed, missed",
    [
        ({"held_out_final": 0.44}, "gain of RL"),
        ({"held_out_sft": 0.04}, "solve rate after SFT"),
        ({"held_out_sft": 0.61, "held_out_final": 0.9}, "solve rate after SFT"),
        ({"held_out_final": None}, "gain of RL"),
        ({"wall_s": 481.0}, "wall time"),
    ],
)
def test_each_goal_can_be_missed(changed: dict[str, float | None], missed: str) -> None:
    assert [name for name, met in verdicts(**changed).items() if not met] == [f"seed 3: {missed}"]


def test_every_seed_has_its_rows_and_only_time_depends_on_the_machine() -> None:
    rows = rows_of({0: GOOD, 1: GOOD | {"held_out_control": None}})
    assert {r.name.partition(":")[0] for r in rows} == {"seed 0", "seed 1"}
    assert {r.name for r in rows if r.goal and r.timed} == {"seed 0: wall time", "seed 1: wall time"}
    above = {r.name: r.value for r in rows if "above" in r.name}
    assert above == {"seed 0: RL above the control": pytest.approx(0.2), "seed 1: RL above the control": None}


def test_runs_that_are_there_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "tiny-seed-1").mkdir()
    with pytest.raises(BenchError, match="tiny-seed-1: there already"):
        measure(Path("configs/tiny.yaml"), [f"run.dir={tmp_path}"], seeds=[0, 1])
    assert [p.name for p in tmp_path.iterdir()] == ["tiny-seed-1"]
