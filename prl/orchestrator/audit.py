"""What `python -m prl.report --audit RUN` proves, from the files of a run alone and without importing torch.

In the surviving lineage (what a resume voided is left out):

  steps        the ledger's steps run from 1 on without a gap, each once
  rollouts     no rollout id is trained twice
  versions     version ids are never used twice; each ledger step's version belongs to that step and survives
  batches      a step trained exactly the rollouts of its cut, and as many as orchestrator.batch_size
  staleness    no cut holds a rollout over orchestrator.max_staleness
  fates        a step's rollouts and the fates "trained" in it are the same, once its acknowledgement is recorded
  once         no member of a task has two final fates
  sums         every member of every task before the frontier has a final fate, or was still open at the last record
  checkpoints  each checkpoint is whole; its step is in the ledger and its version is of that step; the orchestrator's half
               is of that step too
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from prl.config.load import load_resolved
from prl.orchestrator import fates
from prl.orchestrator.scheduler import FINAL, Rules
from prl.orchestrator.state import StateError, decode
from prl.trainer import checkpoint, ledger
from prl.transport.run_dir import RunDir
from prl.transport.versions import VersionError, VersionLog

SHOWN = 5
"""Ids named per broken rule."""


@dataclass
class AuditReport:
    """`problems` name the broken rule, what was expected, what was found and the ids."""

    problems: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        lines = [f"{name:>24}: {value}" for name, value in self.counts.items()]
        verdict = "audit passed: every batch was trained once and nothing was skipped"
        return "\n".join([*lines, *(f"BROKEN {p}" for p in self.problems), *([verdict] if self.ok else [])])


def audit(run: RunDir) -> AuditReport:
    """Check every rule; reads config.yaml, ledger.jsonl, tasks.jsonl, versions.jsonl and checkpoints/."""
    report = AuditReport()
    rules = Rules.of(load_resolved(run.config_path))
    try:
        versions = VersionLog(run / "versions.jsonl")
        entries, records = _resumed(ledger.read(run / "ledger.jsonl"), ledger.read(run / "tasks.jsonl"))
        steps = _steps(report, ledger.surviving(entries), versions)
        kept = fates.surviving(records)
        _batches(report, steps, [r for r in kept if r["kind"] == "cut"], rules)
        _fates(report, steps, kept, rules)
        _checkpoints(report, run, steps, versions)
    except (ledger.LedgerError, VersionError) as e:
        _broken(report, "files", str(e))
        return report
    except (KeyError, TypeError, ValueError) as e:
        _broken(report, "files", f"a record in ledger.jsonl or tasks.jsonl is not of this schema: {e!r}")
        return report
    resumes = sum(r["kind"] == "resume" for r in records)
    report.counts |= {
        "steps": len(steps),
        "rollouts trained": sum(len(s["rollouts"]) for s in steps.values()),
        "resumes": resumes,
        "records voided": len(records) - len(kept) - resumes,
    }
    return report


def _resumed(entries: list[dict[str, Any]], records: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Both files as they are once trainer and orchestrator have recorded the last resume: either may end before it has."""
    ends = [max((r["t"] for r in file), default=0.0) for file in (entries, records)]
    by_trainer, by_orchestrator = ([r for r in file if r["kind"] == "resume"] for file in (entries, records))
    if by_orchestrator and by_orchestrator[-1]["t"] > ends[0]:
        entries = [*entries, by_orchestrator[-1]]
    elif by_trainer and by_trainer[-1]["t"] > ends[1]:
        step = by_trainer[-1]["step"]
        seqs = [r["seq"] for r in fates.surviving(records) if r["kind"] == "cut" and r["step"] == step]
        if seqs or not step:
            records = [*records, {**by_trainer[-1], "from": seqs[-1] + 1 if seqs else 0}]
    return entries, records


def _broken(report: AuditReport, rule: str, text: str, ids: Iterable[Any] = ()) -> None:
    ids = sorted(ids, key=str)
    named = (
        f": {', '.join(map(str, ids[:SHOWN]))}" + (f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else "") if ids else ""
    )
    report.problems.append(f"{rule}: {text}{named}")


def _steps(report: AuditReport, entries: list[dict[str, Any]], versions: VersionLog) -> dict[int, dict[str, Any]]:
    order = [e["step"] for e in entries]
    if order != list(range(1, len(order) + 1)):
        _broken(report, "steps", f"expected 1 to {len(order)}, each once and in order, found {order[:50]}")
    trained = Counter(i for e in entries for i in e["rollouts"])
    if twice := [i for i, n in trained.items() if n > 1]:
        _broken(report, "rollouts", f"{len(twice)} trained more than once", twice)
    if twice := [v for v, n in Counter(e["version"] for e in entries).items() if n > 1]:
        _broken(report, "versions", f"{len(twice)} version ids stand for more than one step", twice)
    for e in entries:
        try:
            of, survives = versions.step_of(e["version"]), versions.is_surviving(e["version"])
        except VersionError as error:
            _broken(report, "versions", f"step {e['step']}: {error}")
            continue
        if of != e["step"] or not survives:
            state = "survives" if survives else "is abandoned"
            _broken(report, "versions", f"step {e['step']} names version {e['version']}, which is of step {of} and {state}")
    return {e["step"]: e for e in entries}


def _batches(report: AuditReport, steps: dict[int, dict[str, Any]], cuts: list[dict[str, Any]], rules: Rules) -> None:
    by_step = {c["step"]: c for c in cuts}
    if len(by_step) != len(cuts):
        _broken(report, "batches", "cut more than once", [s for s, n in Counter(c["step"] for c in cuts).items() if n > 1])
    for step, entry in steps.items():
        if step not in by_step:
            _broken(report, "batches", f"step {step} was trained, and tasks.jsonl has no cut of it")
            continue
        cut = {rollout_id for _, _, rollout_id in by_step[step]["batch"]}
        if cut != set(entry["rollouts"]):
            _broken(report, "batches", f"step {step} trained other rollouts than were cut", cut ^ set(entry["rollouts"]))
        if len(entry["rollouts"]) != (size := _rule(by_step[step], rules, "batch_size")):
            _broken(report, "batches", f"step {step} trained {len(entry['rollouts'])} rollouts, expected {size}")
    for step, cut_record in by_step.items():
        if cut_record["staleness_max"] > (lead := _rule(cut_record, rules, "lead")):
            _broken(report, "staleness", f"batch {step} has {cut_record['staleness_max']}, expected at most {lead}")


def _rule(mark: dict[str, Any], rules: Rules, name: str) -> int:
    """A rule as it was when the mark was written; the configuration's where the mark does not tell."""
    return int(mark.get("rules", {}).get(name, getattr(rules, name)))


def _fates(report: AuditReport, steps: dict[int, dict[str, Any]], kept: list[dict[str, Any]], rules: Rules) -> None:
    final = [r for r in kept if r["kind"] == "fate" and r["fate"] in FINAL]
    trained: dict[int, set[str]] = {}
    for r in final:
        if r["fate"] == "trained":
            trained.setdefault(r["step"], set()).update(i for _, i in r["members"])
    for step, ids in trained.items():
        if step not in steps:
            _broken(report, "fates", f"tasks are recorded as trained in step {step}, which the ledger has not", ids)
        elif ids != set(steps[step]["rollouts"]):
            _broken(report, "fates", f"step {step}: fates and ledger differ", ids ^ set(steps[step]["rollouts"]))
    if missing := [s for s in steps if s not in trained and s < max(trained, default=0)]:
        _broken(report, "fates", "no task is recorded as trained in steps", missing)

    members = Counter((r["ordinal"], index) for r in final for index, _ in r["members"])
    if twice := [f"{o}.{i}" for (o, i), n in members.items() if n > 1]:
        _broken(report, "once", f"{len(twice)} members (ordinal.index) have two final fates", twice)
    marks = [r for r in kept if r["kind"] in ("cut", "end")]
    position = marks[-1]["position"] if marks else 0
    is_open = {(o, i) for o, indices in (marks[-1]["open"] if marks else []) for i in indices}
    expected: set[tuple[int, int]] = set()
    begin = 0
    for mark in marks:
        expected |= {(o, i) for o in range(begin, mark["position"]) for i in range(_rule(mark, rules, "group_size"))}
        begin = mark["position"]
    if lost := expected - set(members) - is_open:
        _broken(report, "sums", f"{len(lost)} members (ordinal.index) have no fate", [f"{o}.{i}" for o, i in lost])
    if strange := {m for m in is_open if m[0] >= position}:
        _broken(report, "sums", f"open beyond the frontier {position}", [f"{o}.{i}" for o, i in strange])
    report.counts["tasks to the frontier"] = position
    by_fate = Counter({f"members {fate}": 0 for fate in FINAL})
    for r in final:
        by_fate[f"members {r['fate']}"] += sum(1 for index, _ in r["members"] if (r["ordinal"], index) in expected)
    report.counts |= by_fate
    report.counts["members open"] = len((is_open & expected) - set(members))


def _checkpoints(report: AuditReport, run: RunDir, steps: dict[int, dict[str, Any]], versions: VersionLog) -> None:
    found = checkpoint.folders(run)
    report.counts["checkpoints"] = len(found)
    for step, folder in found:
        try:
            manifest = checkpoint.read_manifest(folder)
            data = checkpoint.orchestrator_state(folder)
            half = decode(data).scheduler.step if data is not None else None
        except (checkpoint.CheckpointError, StateError) as e:
            _broken(report, "checkpoints", f"{folder}: {e}")
            continue
        if manifest.step != step or (step and step not in steps):
            _broken(report, "checkpoints", f"{folder}: step {manifest.step} is not in the ledger's surviving lineage")
        if half not in (step, None):
            _broken(report, "checkpoints", f"{folder}: the orchestrator's half is of step {half}")
        if versions.step_of(manifest.version) != step:
            _broken(
                report, "checkpoints", f"{folder}: version {manifest.version} is of step {versions.step_of(manifest.version)}"
            )
