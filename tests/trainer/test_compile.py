"""Compiled blocks: the same numbers, and graphs that serve every length. Most tests trace and skip the code generator."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from prl.samples import pack
from prl.trainer.step import StepReport
from tests.distributed.ranks import Ranks
from tests.trainer import invariance
from tests.trainer.helpers import rollouts
from tests.trainer.invariance import Case, train, worst
from tests.trainer.test_recompute import glm_5, glm_45

COMPILE = torch.compile


@pytest.fixture
def tracing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch, "compile", functools.partial(COMPILE, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def steps(make: Any, dtype: str, n: int = 6, **trainer: Any) -> list[StepReport]:
    """Of lengths that all differ."""
    stepper, out = make(dtype, **trainer), []
    for step in range(1, n + 1):
        k = 2 + 2 * step
        rs = invariance.rollouts(step, k, "random") if make is glm_5 else rollouts(step, k)
        out.append(stepper(pack(rs, step=step, budget=10_000, ranks=1)[0]))
    return out


def compare(compiled: list[StepReport], eager: list[StepReport], bound: float) -> None:
    for a, b in zip(compiled, eager, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=bound, abs=bound)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=bound)
        assert a.metrics["expert_counts"] == b.metrics["expert_counts"]


@pytest.mark.parametrize("make", [glm_5, glm_45])
def test_every_length_finds_its_graphs(make: Any, tracing: None) -> None:
    got = steps(make, "float64", compile=True)
    compare(got, steps(make, "float64"), 1e-10)
    assert len({r.metrics["tokens"] for r in got}) == len(got)
    seen = [r.metrics["compile"]["graphs"] for r in got]
    assert seen[1:] == seen[:1] * (len(seen) - 1), "none is compiled after the first step"
    blocks = 3
    assert 0 < got[0].metrics["compile"]["graph_breaks"] <= 3 * blocks


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "trainer", [{}, {"recompute": "full"}, {"recompute": "selective"}, {"offload_activations": 1}], ids=lambda t: str(t)
)
def test_with_what_else_a_block_does(trainer: dict[str, Any], tracing: None) -> None:
    compare(steps(glm_5, "float64", 2, compile=True, **trainer), steps(glm_5, "float64", 2), 1e-10)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-10), ("float32", 1e-5), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("make", [glm_5, glm_45])
def test_generated_code(make: Any, dtype: str, bound: float) -> None:
    compare(steps(make, dtype, 3, compile=True), steps(make, dtype, 3), bound)


def compiled(rank: int, case: Case) -> dict[str, np.ndarray]:
    torch.compile = functools.partial(COMPILE, backend="aot_eager")
    try:
        return train(rank, case)
    finally:
        torch.compile = COMPILE


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ranks_with_experts_between_them(ranks: Ranks) -> None:
    case = Case(2, {"ep": 2}, {"compile": True})
    expected = ranks.run(1, train, case.alone())[0]
    difference, where = worst(ranks.run(2, compiled, case, timeout_s=500)[0], expected)
    assert difference <= 1e-10, (difference, where)
