"""The rows of `bench pipeline` from runs with known numbers."""

from collections import Counter

import pytest

from prl.bench.pipeline import ASYNC, NO_REPLAY, REPLAY, SYNC, SYNC_ALL, Measured, plan, rows_of, variants, waits
from prl.bench.rows import Row
from prl.bench.runs import Job, Settled
from prl.config.load import load
from prl.monitor.history import History


def measured(step_s: float, *, kl: float = 1e-4, memory: float = 500.0, wait: float = 0.0) -> Measured:
    steady = Settled(
        first=2,
        last=6,
        seconds=4 * step_s,
        step_s=(step_s,) * 4,
        generated_per_s=100.0,
        waited={"trainer": Counter({"batch n from the orchestrator": 4 * wait, "something short": 0.001})},
        trainer_s={"train": 4 * (step_s - wait)},
        records=tuple({"step": s, "mismatch_kl_own": kl, "mismatch_kl": 2 * kl} for s in range(3, 7)),
    )
    return Measured(Job("run", History(), {"trainer": memory}, 20.0, 0.0), steady)


def rows(**changed: list[Measured]) -> dict[tuple[str, str], Row]:
    runs = {
        ASYNC: [measured(1.0, wait=0.25), measured(0.8, wait=0.25, memory=700.0)],
        SYNC: [measured(1.5), measured(1.3)],
        SYNC_ALL: [measured(1.2)],
        REPLAY: [measured(1.0, kl=1e-5)],
        NO_REPLAY: [measured(1.0, kl=3e-4)],
    } | changed
    return {(r.name, r.against): r for r in rows_of(runs, batch_size=256)}


def test_the_goal_is_on_asynchronous_over_synchronous() -> None:
    found = rows()
    row = found[f"{ASYNC}: steps", SYNC]
    assert row.value == pytest.approx((1 + 1 / 0.8) / 2)
    assert row.ratio == pytest.approx(row.value / ((1 / 1.5 + 1 / 1.3) / 2))
    assert row.met is True
    assert [r for r in found.values() if r.goal is not None] == [row]
    assert rows(**{SYNC: [measured(1.1)]})[f"{ASYNC}: steps", SYNC].met is False


def test_the_best_synchronous_setting_is_shown_too() -> None:
    row = rows()[f"{ASYNC}: steps", SYNC_ALL]
    assert row.ratio == pytest.approx(1.125 * 1.2)


def test_shares_of_the_time_add_up_and_short_waits_are_left_out() -> None:
    found = rows()
    waited = found[f"{ASYNC}: trainer waited for batch n from the orchestrator", ""]
    assert waited.value == pytest.approx(100 * 2 / 7.2)
    assert waited.value + found[f"{ASYNC}: trainer in train", ""].value == pytest.approx(100)
    assert not [name for name, _ in found if "something short" in name]


def test_waits_are_summed_over_runs_longest_first() -> None:
    runs = [m.steady for m in (measured(1.0, wait=0.2), measured(1.0, wait=0.6))]
    assert [(r, w) for r, w, _ in waits(runs)] == [
        ("trainer", "batch n from the orchestrator"),
        ("trainer", "something short"),
    ]
    assert waits(runs)[0][2] == pytest.approx(0.4)


def test_mismatch_with_and_without_replay_and_memory_are_not_a_matter_of_time() -> None:
    found = rows()
    row = found[f"{NO_REPLAY}: mismatch KL", "replayed"]
    assert (row.value, row.ratio) == (pytest.approx(3e-4), pytest.approx(30))
    memory = found[f"{ASYNC}: peak memory of trainer", ""]
    assert memory.value == 600.0
    assert not row.timed and not memory.timed


def test_a_step_without_tokens_of_its_own_version_is_no_mismatch() -> None:
    run = measured(1.0, kl=1e-5)
    run.steady.records[0]["mismatch_kl_own"] = None
    assert rows(**{REPLAY: [run]})[f"{REPLAY}: mismatch KL", ""].value == pytest.approx(1e-5)


def test_compared_variants_take_turns_in_going_first() -> None:
    assert plan(2) == [ASYNC, SYNC, SYNC, ASYNC, SYNC_ALL, REPLAY, NO_REPLAY]


@pytest.mark.parametrize("name", variants(2))
def test_variants_are_what_they_are_called(name: str) -> None:
    config = load("configs/demo.yaml", variants(2)[name])
    assert config.orchestrator.synchronous == (name != ASYNC)
    assert config.inference.dtype == "bfloat16"
    assert config.model.dtype == ("float32" if name in (REPLAY, NO_REPLAY) else "bfloat16")
    assert config.trainer.router_replay == (name != NO_REPLAY)
    plain = load("configs/demo.yaml", []).launch.threads
    assert config.launch.threads == ({"trainer": 2, "inference": 2} if name == SYNC_ALL else plain)
