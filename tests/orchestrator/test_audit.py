"""Each rule of the audit finds what it is there for, in the files of a real run that are then tampered with."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from prl.orchestrator.audit import audit
from prl.orchestrator.fates import TaskLog
from prl.trainer import ledger
from prl.transport.run_dir import RunDir
from prl.transport.versions import VersionLog
from tests.orchestrator.rig import config, finish, running

Record = dict[str, Any]
Edit = Callable[[list[Record]], list[Record]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped once and resumed."""
    root = tmp_path_factory.mktemp("audited")
    c = config(root, steps=4)
    with running(c, step_s=0.1) as (run, orchestrator, trainer):
        while len(trainer.batches) < 2:
            trainer.stop.wait(0.01)
        orchestrator.stop.set()
        finish(orchestrator, trainer)
    with running(c) as (run, orchestrator, trainer):
        finish(orchestrator, trainer)
    assert orchestrator.code == 0
    return run.root


def edited(whole: Path, tmp_path: Path, name: str, edit: Edit) -> RunDir:
    shutil.copytree(whole, tmp_path / "run")
    path = tmp_path / "run" / name
    records = edit([orjson.loads(line) for line in path.read_bytes().splitlines()])
    path.write_bytes(b"".join(orjson.dumps(r) + b"\n" for r in records))
    return RunDir(tmp_path / "run")


def last(records: list[Record], **like: Any) -> Record:
    return [r for r in records if all(r.get(k) == v for k, v in like.items())][-1]


def changed(like: dict[str, Any], change: Callable[[Record], Any]) -> Edit:
    def edit(records: list[Record]) -> list[Record]:
        change(last(records, **like))
        return records

    return edit


def dropped(like: dict[str, Any]) -> Edit:
    return lambda records: [r for r in records if r is not last(records, **like)]


def swapped(records: list[Record]) -> list[Record]:
    """Step 4 trains a rollout of step 3 once more."""
    third, fourth = last(records, kind="step", step=3), last(records, kind="step", step=4)
    fourth["rollouts"][0] = third["rollouts"][0]
    return records


def twice(records: list[Record]) -> list[Record]:
    fate = last(records, kind="fate")
    return [*records, {**fate, "seq": records[-1]["seq"] + 1}]


def test_a_stopped_and_resumed_run_passes_and_its_sums_close(whole: Path) -> None:
    report = audit(RunDir(whole))
    assert report.ok, str(report)
    c = report.counts
    members = sum(c[f"members {f}"] for f in ("trained", "filtered", "failed", "stale", "open"))
    assert members == 4 * c["tasks to the frontier"] and c["members trained"] == c["rollouts trained"] == 64
    assert "audit passed" in str(report)


def test_each_batch_answers_for_the_rules_that_it_was_cut_by(tmp_path: Path) -> None:
    """A resume may change them: smaller batches, larger groups, a tighter bound."""
    c = config(tmp_path, steps=4)
    with running(c, step_s=0.1) as (run, orchestrator, trainer):
        while len(trainer.batches) < 3:
            trainer.stop.wait(0.01)
        orchestrator.stop.set()
        finish(orchestrator, trainer)
    assert any(r["staleness_max"] for r in ledger.read(run / "tasks.jsonl") if r["kind"] == "cut")
    with running(config(tmp_path, steps=6, orchestrator={"batch_size": 12, "group_size": 6, "max_staleness": 0})) as (
        run,
        orchestrator,
        trainer,
    ):
        finish(orchestrator, trainer)
    assert orchestrator.code == 0
    report = audit(run)
    assert report.ok, str(report)
    assert {len(e["rollouts"]) for e in ledger.surviving(ledger.read(run / "ledger.jsonl"))} == {16, 12}


CASES: list[tuple[str, str, Edit]] = [
    ("steps", "ledger.jsonl", dropped({"kind": "step", "step": 3})),
    ("rollouts", "ledger.jsonl", swapped),
    ("batches", "ledger.jsonl", swapped),
    ("batches", "ledger.jsonl", changed({"kind": "step", "step": 4}, lambda r: r["rollouts"].pop())),
    ("versions", "ledger.jsonl", changed({"kind": "step", "step": 4}, lambda r: r.update(version=0))),
    ("versions", "ledger.jsonl", changed({"kind": "step", "step": 4}, lambda r: r.update(version=99))),
    ("batches", "tasks.jsonl", dropped({"kind": "cut", "step": 4})),
    ("staleness", "tasks.jsonl", changed({"kind": "cut", "step": 4}, lambda r: r.update(staleness_max=3))),
    ("fates", "tasks.jsonl", changed({"fate": "trained", "step": 4}, lambda r: r["members"][0].__setitem__(1, "another"))),
    ("fates", "tasks.jsonl", changed({"fate": "trained", "step": 4}, lambda r: r.update(step=9))),
    ("once", "tasks.jsonl", twice),
    ("sums", "tasks.jsonl", dropped({"kind": "fate"})),
    ("sums", "tasks.jsonl", changed({"kind": "end"}, lambda r: r.update(position=r["position"] + 1))),
    ("files", "tasks.jsonl", lambda records: [*records[:-1], {"kind": "cut"}, records[-1]]),
]


@pytest.mark.parametrize("rule, name, edit", CASES, ids=[f"{r}-{i}" for i, (r, _, _) in enumerate(CASES)])
def test_a_broken_rule_is_named(whole: Path, tmp_path: Path, rule: str, name: str, edit: Edit) -> None:
    report = audit(edited(whole, tmp_path, name, edit))
    assert any(p.startswith(f"{rule}:") for p in report.problems), str(report)


def test_a_damaged_or_foreign_checkpoint_is_named(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    newest.rename(newest.with_name("step_9"))
    assert any(p.startswith("checkpoints:") and "step_9" in p for p in audit(RunDir(tmp_path / "run")).problems)
    half = newest.with_name("step_9") / "orchestrator.bin"
    half.write_bytes(half.read_bytes()[:-1])
    assert any("orchestrator.bin" in p for p in audit(RunDir(tmp_path / "run")).problems)
    (newest.with_name("step_9") / "manifest.json").unlink()
    assert any("manifest.json: cannot be read" in p for p in audit(RunDir(tmp_path / "run")).problems)


@pytest.mark.parametrize("first", ["trainer", "orchestrator"])
def test_a_resume_that_only_one_of_both_came_to_record_breaks_no_rule(whole: Path, tmp_path: Path, first: str) -> None:
    """Step 4 is given up for the checkpoint of step 2, and the other one dies before it says so."""
    shutil.copytree(whole, tmp_path / "run")
    run = RunDir(tmp_path / "run")
    cut = last(ledger.read(run / "tasks.jsonl"), kind="cut", step=3)
    shutil.rmtree(run / "checkpoints" / "step_4")
    if first == "trainer":
        lineage = VersionLog(run / "versions.jsonl").lineage(3)
        ledger.Ledger(run / "ledger.jsonl").resume(step=3, lineage=lineage)
    else:
        log = TaskLog(run / "tasks.jsonl")
        log.add("resume", step=3, **{"from": cut["seq"] + 1})
        log.close()
    report = audit(run)
    assert report.ok and report.counts["steps"] == 3, str(report)


def test_a_run_that_has_just_begun_has_nothing_to_answer_for(tmp_path: Path) -> None:
    from prl.config.load import dump

    run = RunDir(tmp_path / "run").create()
    run.config_path.write_text(dump(config(tmp_path)))
    assert audit(run).ok
