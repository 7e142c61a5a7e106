"""What is read from a run's files while they grow, tear and are resumed."""

import time
from pathlib import Path

import orjson
from hypothesis import given
from hypothesis import strategies as st

from prl.monitor.history import KINDS, History, Tail, statuses
from prl.monitor.metrics import Metrics
from prl.monitor.status import Status
from prl.transport.run_dir import RunDir


def lines(*records: object) -> bytes:
    return b"".join(orjson.dumps(r) + b"\n" for r in records)


def test_a_tail_gives_each_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert list(tail.read()) == []
    whole = lines({"a": 1}, {"a": 2}, {"a": 3})
    seen = []
    with path.open("ab", buffering=0) as file:
        for i in range(0, len(whole), 5):
            file.write(whole[i : i + 5])
            seen += tail.read()
    assert seen == [{"a": 1}, {"a": 2}, {"a": 3}] and tail.broken == 0


def test_torn_and_foreign_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines({"a": 1}) + b'{"a": 2, "b\n\xff\xfe\n[1]\n' + lines({"a": 3}) + b'{"a": 4')
    tail = Tail(path)
    assert list(tail.read()) == [{"a": 1}, {"a": 3}] and tail.broken == 3


FIELDS = sorted({name for kind in KINDS.values() for name in kind.__struct_fields__} | {"kind"})
WORDS = st.sampled_from([*KINDS, "resume", "wait", "sft", "trainer", "supervisor"])
VALUES = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | WORDS
NESTED = VALUES | st.lists(VALUES, max_size=2) | st.dictionaries(WORDS | st.sampled_from(["1", "p99"]), VALUES, max_size=2)


@given(st.lists(st.dictionaries(st.sampled_from(FIELDS), NESTED)))
def test_any_record_is_taken_or_left_out_and_counted(records: list[dict[str, object]]) -> None:
    history = History(dict(r) for r in records)
    kept = sum(len(steps) for steps in history.steps.values()) + sum(map(len, history.evals.values()))
    assert history.left_out.total() + kept <= len(records)
    assert all(
        isinstance(r["t"], int | float) and isinstance(r["role"], str) for s in history.steps.values() for r in s.values()
    )


def test_a_field_of_another_type_leaves_its_record_out_and_says_which() -> None:
    step = {"t": 1.0, "role": "trainer", "kind": "step", "step": 1, "loss": 0.5}
    wrong = [
        {"step": "2"},
        {"loss": "low"},
        {"mismatch": {"p99": []}},
        {"staleness": {"many": 1}},
        {"expert_counts": [1]},
        {"t": None},
    ]
    history = History([step, *({**step, "step": 2, **w} for w in wrong)])
    assert list(history.steps["trainer"]) == [1] and history.left_out.total() == len(wrong)
    assert "trainer step: Expected `float | null`, got `str` - at `$.loss`" in history.left_out


def test_a_resume_voids_the_steps_after_it() -> None:
    def step(n: int, t: float, value: int) -> list[dict[str, object]]:
        return [{"t": t, "role": role, "kind": "step", "step": n, "loss": value} for role in ("trainer", "orchestrator")]

    history = History(
        [
            *(r for n in range(1, 6) for r in step(n, n, 0)),
            {"t": 4.5, "role": "orchestrator", "kind": "eval", "step": 4, "sampled": 0.5, "complete": True},
            {"t": 2.5, "role": "orchestrator", "kind": "eval", "step": 2, "sampled": 0.4, "complete": True},
            {"t": 6, "role": "trainer", "kind": "event", "name": "resume", "step": 2},
            *step(3, 7, 1),
        ]
    )
    assert history.series("trainer", "loss") == ([1, 2, 3], [0, 0, 1])
    assert sorted(history.steps["orchestrator"]) == [1, 2, 3]
    assert [e["step"] for e in history.evals["rl"]] == [2]


def test_the_time_between_two_lives_is_not_of_the_run() -> None:
    def at(t: float, kind: str, role: str, **values: object) -> dict[str, object]:
        return {"t": t, "kind": kind, "role": role, **values}

    history = History([at(10, "event", "supervisor", name="start"), at(12, "step", "trainer", step=1)])
    assert history.elapsed() == 2 and history.elapsed(now=15) == 5
    history.add(at(1012, "event", "supervisor", name="resume"))
    history.add(at(1013, "event", "trainer", name="resume", step=1))
    history.add(at(1015, "step", "trainer", step=2))
    assert history.elapsed() == 5 and history.elapsed(now=1016) == 6 and history.began["rl"] == 1012
    assert History().elapsed(now=1) is None


def test_an_evaluation_that_was_cut_is_counted_and_never_a_value() -> None:
    cut = {"t": 1, "role": "orchestrator", "kind": "eval", "step": 1, "sampled": 0.9, "complete": False}
    history = History([cut])
    assert history.evals["rl"] == [] and history.cut_evals == 1


def test_a_validation_is_no_evaluation_and_a_later_one_of_its_step_replaces_it() -> None:
    def validation(step: int, loss: float) -> dict[str, object]:
        return {"t": 1.0, "role": "sft", "kind": "eval", "split": "validation", "step": step, "loss": loss}

    dev = {"t": 1.0, "role": "sft", "kind": "eval", "split": "dev", "step": 4, "greedy": 0.5}
    history = History([dev, validation(4, 2.0), validation(8, 1.5), validation(8, 1.0)])
    assert history.evals["sft"] == [dev]
    assert {step: r["loss"] for step, r in history.validation.items()} == {4: 2.0, 8: 1.0}


def test_what_the_writers_write_is_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "status").mkdir()
    metrics = Metrics(tmp_path / "metrics.jsonl", "trainer")
    status = Status(tmp_path / "status" / "trainer.json", "trainer", metrics)
    with status.waiting("batch 7 from the orchestrator"):
        assert statuses(RunDir(tmp_path))["trainer"]["waits_for"] == "batch 7 from the orchestrator"
        time.sleep(0.01)
    metrics.log("step", step=7, loss=0.5, mismatch={"p99": 0.1})
    history = History(Tail(tmp_path / "metrics.jsonl").read())
    assert history.series("trainer", "mismatch.p99") == ([7], [0.1])
    assert history.waited["trainer"]["batch n from the orchestrator"] > 0.009
    (tmp_path / "status" / "torn.json").write_text('{"role": ')
    assert set(statuses(RunDir(tmp_path))) == {"trainer"}
