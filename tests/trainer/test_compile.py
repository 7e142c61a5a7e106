"""Compiled blocks: the same numbers, and graphs that serve every length. Most tests trace and skip the code generator."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from prl.samples import Rollout, pack, pad
from prl.trainer.step import Stepper, StepReport
from tests.distributed.ranks import Ranks
from tests.trainer import invariance
from tests.trainer.helpers import rollouts, sample
from tests.trainer.invariance import Case, train, worst
from tests.trainer.test_recompute import ADAPTED, KINDS, glm_5, glm_45

COMPILE = torch.compile
ALL_PARTS = KINDS["all parts"]


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


def test_a_count_of_tokens_that_is_a_width_and_padding_find_their_graphs(tracing: None) -> None:
    """The first row has as many tokens as the model is wide; of later ones some end in padding."""
    stepper = glm_45("float64", compile=True)
    seen = []
    for step, (lengths, multiple) in enumerate([((20, 12), 1), ((20, 9), 1), ((11, 8), 4)], 1):
        rng = np.random.default_rng(step)
        samples = [sample(rng, 2, n - 2) for n in lengths]
        (batch,) = pack([Rollout("r", "e", "t", 0, 0, samples=samples)], step=step, budget=64, ranks=1)
        batch.micro_batches[:] = [pad(mb, multiple) for mb in batch.micro_batches]
        seen.append(stepper(batch).metrics["compile"]["graphs"])
    assert seen == seen[:1] * 3


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "beside", [{"recompute": "full"}, ALL_PARTS, {"offload_activations": 1}, {"lora": ADAPTED}], ids=lambda beside: str(beside)
)
def test_with_what_else_a_block_does(beside: dict[str, Any], tracing: None) -> None:
    adapters = {"lora": beside["lora"]} if "lora" in beside else {}
    got = steps(glm_5, "float64", 3, compile=True, **beside)
    compare(got, steps(glm_5, "float64", 3, **adapters), 1e-10)
    seen = [r.metrics["compile"] for r in got]
    assert seen[0]["graphs"] and seen[1:] == seen[:1] * 2, "none is compiled after the first step"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("dtype", "bound", "n"), [("float64", 1e-10, 3), ("float32", 1e-5, 3), ("bfloat16", 2**-8, 1)])
@pytest.mark.parametrize("make", [glm_5, glm_45])
def test_generated_code(make: Any, dtype: str, bound: float, n: int) -> None:
    """In bfloat16 the first step alone: after an update the last rows, which are not replayed, may choose other experts."""
    compare(steps(make, dtype, n, compile=True), steps(make, dtype, n), bound)


def compiled(rank: int, case: Case) -> tuple[dict[str, np.ndarray], list[dict[str, int]]]:
    """As `train`, and what was compiled up to the end of each step."""
    seen = []
    step = Stepper.__call__

    def counted(*args: Any) -> StepReport:
        report = step(*args)
        seen.append(report.metrics["compile"])
        return report

    torch._dynamo.reset()
    counters.clear()
    torch.compile = functools.partial(COMPILE, backend="aot_eager")
    Stepper.__call__ = counted  # type: ignore[method-assign]
    try:
        return train(rank, case), seen
    finally:
        torch.compile, Stepper.__call__ = COMPILE, step  # type: ignore[method-assign]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "case",
    [
        Case(2, {"ep": 1}, {"compile": True}),
        Case(2, {"ep": 2}, {"compile": True, "recompute": "full"}),
        Case(2, {"ep": 2}, {"compile": True, **ALL_PARTS}),
        Case(2, {"ep": 1}, {"compile": True, "recompute": "full", "offload_activations": 1}, lora=ADAPTED),
        Case(2, {"cp": 2, "ep": 2}, {"compile": True, "recompute": "full"}, pack_tokens=28),
        Case(2, {"cp": 2, "ep": 1}, {"compile": True}, architecture="qwen3, three heads", rollouts=9),
    ],
    ids=["fsdp", "experts, full", "experts, all parts", "adapters, everything", "shared rows", "ring"],
)
def test_ranks(case: Case, ranks: Ranks) -> None:
    expected = ranks.run(1, train, case.alone(), timeout_s=300)[0]
    got = ranks.run(2, compiled, case, timeout_s=500)
    difference, where = worst(got[0][0], expected)
    assert difference <= 1e-10, (difference, where)
    for _, seen in got:
        assert seen[0]["graphs"] and seen[1:] == seen[:1] * 2, "none is compiled after the first step"
