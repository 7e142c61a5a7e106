"""The plan's step times beside real steps: what a calibration gives, and that the plan reads it."""

from pathlib import Path

import pytest
import yaml

from prl.bench.plan import CASES, NEAR, REFERENCES, entry, measure, small_ops, step_seconds, work
from prl.plan import main
from prl.plan.hardware import Hardware
from prl.plan.work import times

ROOT = Path(__file__).parents[2]
RATES = {
    "float32": 80e9,
    "bf16": 150e9,
    "fp8": 120e9,
    "attention": 50e9,
    "peak float32": 100e9,
    "peak bf16": 200e9,
    "copy": 20e9,
}


def test_a_calibration_is_a_machine_of_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(entry(RATES, 1e9, 0.25)))
    assert main([str(ROOT / "configs" / "demo.yaml"), "--hardware", str(file)]) == 0
    assert "on mine" in capsys.readouterr().out


def test_small_ops_take_what_products_leave() -> None:
    """Steps made up of products at their rates and of bytes at a quarter of a copy's."""
    machine = Hardware.model_validate(entry(RATES, 1e9, 0.25))
    took = {name: times(work(case, machine), machine).serial for name, case in REFERENCES.items()}
    assert small_ops(RATES, took) == pytest.approx(0.25)
    assert small_ops(RATES, dict.fromkeys(took, 0.0)) == 1.0


def test_a_step_is_the_slowest_ranks_without_the_first() -> None:
    ranks = [{"cases": {"x": [(9, 9), (1, 0.5), (3, 0.7), (2, 0.6)]}}, {"cases": {"x": [(9, 9), (1, 0.8), (1, 0.8), (1, 0.8)]}}]
    assert step_seconds(ranks, "x") == (0.8, 2)


def test_no_case_is_calibrated_on() -> None:
    assert len(CASES) >= 6 and not [c for c in CASES.values() if c in REFERENCES.values()]
    assert {c.config.trainer.recompute for c in CASES.values()} == {"none", "full", "selective"}
    meshes = [c.config.trainer for c in CASES.values() if c.config.trainer.ranks == 2]
    assert {(m.mesh.cp, m.mesh.ep) for m in meshes} == {("auto", "auto"), ("auto", 2), (2, 1)}


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_steps_take_what_the_plan_says(tmp_path: Path) -> None:
    result = measure(tmp_path / "mine.yaml")
    judged = [row for row in result.rows if row.goal == NEAR]
    assert len(judged) == len(CASES) and not [row.name for row in judged if row.met is False]
