"""The whole role with real neighbours; only the trainer's arithmetic is replaced (tests/orchestrator/rig.py)."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from prl.config.schema import RunConfig
from prl.orchestrator.audit import AuditReport, audit
from prl.trainer import checkpoint, ledger
from prl.transport.run_dir import RunDir
from tests.orchestrator.rig import config, finish, records, running


def trained(run: RunDir) -> dict[int, str]:
    """The surviving steps and the checksums of their batches."""
    return {e["step"]: e["checksum"] for e in ledger.surviving(ledger.read(run / "ledger.jsonl"))}


def test_an_asynchronous_run_trains_full_fresh_batches_and_evaluates_one_version_at_a_time(tmp_path: Path) -> None:
    c = config(tmp_path, steps=5)
    with running(c, step_s=0.1) as (run, orchestrator, trainer):
        finish(orchestrator, trainer)
    assert (orchestrator.code, trainer.code) == (0, 0)
    steps = records(run, "step")
    assert [s["step"] for s in steps] == [1, 2, 3, 4, 5]
    assert all(len(b.rollout_ids) == 16 and b.counts.rollouts == 16 for b in trainer.batches)
    assert all(int(k) <= 2 for s in steps for k in s["staleness"]) and any(set(s["staleness"]) != {"0"} for s in steps)
    evals = records(run, "eval")
    assert [(e["stage"], e["step"]) for e in (evals[0], evals[-1])] == [("start", 0), ("final", 5)]
    assert [e["tasks"] for e in evals] == [16, *[8] * (len(evals) - 2), 16]
    assert all(e["complete"] and 0 <= e["sampled"] <= 1 and 0 <= e["greedy"] <= 1 for e in evals)
    report = audit(run)
    assert report.ok, str(report)
    assert report.counts["rollouts trained"] == 80
    waits = Counter(s["what"].partition(" of ")[0] for s in records(run, "span") if s["name"] == "wait")
    assert any(w.startswith("the evaluation") for w in waits) and any(w.startswith("rollouts for batch") for w in waits)


def test_a_synchronous_run_never_trains_a_stale_token(tmp_path: Path) -> None:
    with running(config(tmp_path, steps=3, orchestrator={"synchronous": True})) as (run, orchestrator, trainer):
        finish(orchestrator, trainer)
    assert orchestrator.code == 0 and [set(s["staleness"]) for s in records(run, "step")] == [{"0"}] * 3


def test_two_replicas_go_on_training_while_one_is_evaluated(tmp_path: Path) -> None:
    with running(config(tmp_path, steps=4, inference={"replicas": 2})) as (run, orchestrator, trainer):
        finish(orchestrator, trainer)
    assert orchestrator.code == 0 and audit(run).ok
    assert all(e["complete"] for e in records(run, "eval"))


def test_environments_that_raise_hang_and_lie_become_counted_outcomes(tmp_path: Path) -> None:
    with running(config(tmp_path, steps=3, env="Faulty")) as (run, orchestrator, trainer):
        finish(orchestrator, trainer)
    assert orchestrator.code == 0 and audit(run).ok
    outcomes: Counter[str] = Counter()
    for step in records(run, "step"):
        outcomes.update(step["outcomes"])
    assert {"environment_error", "timed_out", "bad_reward", "finished"} <= set(outcomes)
    totals = records(run, "event")[-1]["totals"]
    assert totals["retried: environment_error"] and totals["bad_reward"]
    (final,) = [e for e in records(run, "eval") if e["stage"] == "final"]
    assert final["failed"] == sum(n for o, n in final["outcomes"].items() if o not in ("finished", "truncated")) > 0


def test_an_advantage_that_raises_ends_the_run_at_once_with_its_reason(tmp_path: Path) -> None:
    c = config(tmp_path, env="Signed", orchestrator={"advantage": {"kind": "max_rl"}}, launch={"wait_timeout_s": 60})
    with running(c) as (run, orchestrator, _):
        finish(orchestrator, timeout_s=20)
    assert isinstance(orchestrator.raised, ValueError) and "max_rl" in str(orchestrator.raised)
    assert audit(run).ok


@pytest.mark.parametrize("env, when_learned, code", [("Never", "stop", 75), ("Always", "stop", 0), ("Always", "save", 75)])
def test_a_run_without_signal_ends_with_its_reason(tmp_path: Path, env: str, when_learned: str, code: int) -> None:
    c = config(tmp_path, env=env, orchestrator={"when_learned": when_learned, "max_refills": 2})
    with running(c) as (run, orchestrator, trainer):
        finish(orchestrator, trainer)
    assert (orchestrator.code, trainer.code) == (code, code)
    (end,) = [e for e in records(run, "event") if e["name"] == "end"]
    assert code == 0 or "orchestrator.max_refills = 2" in end["reason"] and ("unsolved" in end["reason"]) == (env == "Never")
    assert code == 0 or ("warm-start" in end["reason"]) == (env == "Never")
    assert audit(run).ok


def test_a_stopped_run_saves_at_once_and_goes_on_where_it_was(tmp_path: Path) -> None:
    c = config(tmp_path, steps=6, checkpoint={"every": 100})
    with running(c, step_s=0.3) as (run, orchestrator, trainer):
        while len(trainer.batches) < 3:
            time.sleep(0.01)
        t0 = time.monotonic()
        orchestrator.stop.set()
        finish(orchestrator, trainer)
    assert (orchestrator.code, trainer.code) == (75, 75) and time.monotonic() - t0 < 5
    (saved,) = checkpoint.complete(run)
    assert saved[0] >= 3, "the state came with every batch, so any step can be saved"
    assert audit(run).ok
    with running(c) as (run, orchestrator, trainer):
        finish(orchestrator, trainer)
    assert orchestrator.code == 0
    assert trainer.batches[0].step == saved[0] + 1
    report = audit(run)
    assert report.ok and report.counts["resumes"] == 1, str(report)


def test_an_evaluation_cut_at_its_deadline_is_not_a_held_out_value(tmp_path: Path) -> None:
    c = config(tmp_path, steps=1, env="Faulty", evaluation={"timeout_s": 0.2})
    with running(c) as (run, orchestrator, trainer):
        finish(orchestrator, trainer)
    assert orchestrator.code == 0
    for e in records(run, "eval"):
        assert not e["complete"] and e["sampled"] is None and e["greedy"] is None and "deadline" in e["reason"]


def test_the_evaluated_replica_keeps_its_weights_while_the_trainer_goes_on(tmp_path: Path) -> None:
    c = config(tmp_path, steps=6, env="Slow", inference={"replicas": 2}, evaluation={"every": 1})
    with running(c, step_s=0.05) as (run, orchestrator, trainer):
        finish(orchestrator, trainer)
    assert orchestrator.code == 0 and audit(run).ok
    evals = records(run, "eval")
    assert len(evals) > 2 and all(e["complete"] for e in evals), [e["reason"] for e in evals]


def test_an_evaluation_that_loses_its_replica_begins_anew_on_another(tmp_path: Path) -> None:
    """Nothing that the lost one failed is in the value, though it still answers."""
    narrow = {"max_in_flight": 16}  # so the held-out tasks take two seconds
    c = config(tmp_path, steps=3, env="Slow", inference={"replicas": 2}, orchestrator=narrow, evaluation={"tasks": 64})
    with running(c, engines_first=True) as (run, orchestrator, trainer):
        deadline = time.monotonic() + 20
        while (run.read_status("orchestrator") or {}).get("phase") != "evaluating":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.4)  # some of it is judged by then
        (run / "rendezvous" / "inference-1.json").unlink()
        finish(orchestrator, trainer)
    assert orchestrator.code == 0 and audit(run).ok
    evals = records(run, "eval")
    stages = [e["stage"] for e in evals]  # one while it runs is left out where the first is still under way
    assert stages in (["start", "running", "final"], ["start", "final"]) and all(e["complete"] for e in evals)
    assert "engine_error" not in evals[0]["outcomes"] and sum(evals[0]["outcomes"].values()) == 128


def test_after_a_resume_nothing_is_generated_before_the_trainer_has_put_it_on_record(tmp_path: Path) -> None:
    """The weight store still has the abandoned lineage's weights, and the engine comes up with them."""
    c = config(tmp_path, steps=4, checkpoint={"every": 2})
    with running(c, step_s=0.2) as (run, orchestrator, trainer):
        while len(trainer.batches) < 3:
            time.sleep(0.005)
        trainer.stop.set()  # dies after step 3, with a checkpoint of step 2
        trainer.join(10)
    assert checkpoint.complete(run)[-1][0] == 2
    begin = threading.Event()
    with running(c, begin=begin) as (run, orchestrator, trainer):
        deadline = time.monotonic() + 20
        while not (waits_for := (run.read_status("orchestrator") or {}).get("waits_for")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert waits_for == "the trainer to publish the weights of step 2"
        begin.set()
        finish(orchestrator, trainer)
    assert orchestrator.code == 0 and audit(run).ok
    totals = records(run, "event")[-1]["totals"]
    assert "retried: abandoned" not in totals and "abandoned" not in totals


KILLS = [2, pytest.param(20, marks=[pytest.mark.long, pytest.mark.timeout(900)])]


@pytest.mark.parametrize("kills", KILLS)
def test_a_deterministic_run_killed_at_random_moments_trains_the_same_batches(tmp_path: Path, kills: int) -> None:
    def lockstep(name: str) -> RunConfig:
        return config(
            tmp_path / name,
            steps=2 + 2 * kills,
            env="Twice",
            run={"deterministic": True},
            orchestrator={"synchronous": True},
            inference={"prefix_cache": False},
            evaluation={"every": 4},
        )

    calm, rough = lockstep("calm"), lockstep("rough")
    with running(calm) as (run, orchestrator, trainer):
        finish(orchestrator, trainer)
    expected = trained(run)
    assert len(set(expected.values())) == 2 + 2 * kills
    report = run_with_kills(rough, kills=kills, rng=random.Random(0))
    assert report.counts["resumes"] == kills and trained(RunDir(tmp_path / "rough" / "run")) == expected


@pytest.mark.parametrize("kills", KILLS)
def test_an_asynchronous_run_killed_at_random_moments_trains_every_batch_once(tmp_path: Path, kills: int) -> None:
    steps = 4 + 3 * kills
    report = run_with_kills(config(tmp_path, steps=steps), kills=kills, rng=random.Random(1))
    assert report.counts["resumes"] == kills
    assert report.counts["steps"] == steps and report.counts["rollouts trained"] == 16 * steps


def run_with_kills(c: RunConfig, *, kills: int, rng: random.Random) -> AuditReport:
    """Kill the orchestrator's process at random moments, the other roles with it; the audit must pass after each."""
    for kill in range(kills + 1):
        with running(c, process=True, step_s=0.05) as (run, process, trainer):
            steps, delay = (rng.randint(1, 3), 0.2 * rng.random()) if kill < kills else (1_000, 0.0)
            deadline = time.monotonic() + 60
            while process.code is None and len(trainer.batches) < steps and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(delay)
            code = process.code
        report = audit(run)
        assert report.ok, str(report)
        if code is not None:
            break
    assert code == 0, (run / "logs" / "orchestrator.log").read_text()[-2000:]
    return report
