"""The plan's memory beside a real step's: peak live tensor bytes by category."""

from typing import Any

import pytest

from prl.bench.memory import CASES, MODELS, Case, categories, measure, track


@pytest.mark.parametrize(
    ("model", "dtype", "trainer"),
    [
        ("dense", "float32", {}),
        ("GLM-4.5", "bfloat16", {"precision": "fp8"}),
        ("GLM-5", "bfloat16", {"recompute": "selective"}),
    ],
)
def test_a_step_needs_what_the_plan_says(model: str, dtype: str, trainer: dict[str, Any]) -> None:
    """Within 5%, each category."""
    (found,) = track(Case(MODELS[model], (512,) * 4, dtype, trainer))
    planned = categories(found.predicted)
    judged = {kind for kind, n in found.categories.items() if n > 0.01 * found.total}
    assert {"activations", "optimizer", "parameters"} <= judged
    for kind in judged:
        assert planned[kind] == pytest.approx(found.categories[kind], rel=0.05), kind
    assert sum(planned.values()) == pytest.approx(found.total, rel=0.05)


def test_experts_on_two_ranks_need_what_the_plan_says() -> None:
    """Both ranks together within 5%, since the plan's experts get as many tokens each; of what is under way between them it
    counts a part as activations."""
    mesh = {"ranks": 2, "pack_tokens": 1024, "mesh": {"ep": 2}, "recompute": "full"}
    found = track(Case(MODELS["GLM-4.5"], (512,) * 4, "bfloat16", mesh))
    planned = [categories(f.predicted) for f in found]
    assert sum(sum(p.values()) for p in planned) == pytest.approx(sum(f.total for f in found), rel=0.05)
    for kind in ("optimizer", "parameters", "gradients"):
        assert all(p[kind] == pytest.approx(f.categories[kind], rel=0.05) for p, f in zip(planned, found, strict=True)), kind


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_cases_of_a_gigabyte_need_what_the_plan_says() -> None:
    result = measure()
    assert len([name for name in CASES if any(row.name.startswith(name) for row in result.rows)]) >= 6
    assert not [row.name for row in result.rows if "process" not in row.name and row.met is False]
