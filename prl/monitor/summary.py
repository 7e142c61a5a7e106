"""summary.json and the closing table: a run in a few numbers, from its files alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import orjson
from rich.table import Table

from prl.config.load import load_resolved
from prl.config.schema import RunConfig
from prl.monitor.history import History, RunFolder, Tail, load_history

LAST = 20
"""Steps that the closing mismatch KL is the mean of."""


def mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def held_out(history: History, stage: str, tasks: int) -> list[dict[str, Any]]:
    """The stage's complete evaluations on at least `tasks` tasks: what counts as a held-out value."""
    return [e for e in history.evals[stage] if e.get("tasks", 0) >= tasks and e.get("sampled") is not None]


def weighted(history: History, key: str) -> float | None:
    """Mean over the trainer's steps of a fraction of rows, weighted by rows."""
    records = [r for r in history.steps["trainer"].values() if r.get(key) is not None and "rows" in r]
    rows = sum(r["rows"] for r in records)
    return sum(r[key] * r["rows"] for r in records) / rows if rows else None


class Trained(msgspec.Struct):
    """Of a ledger's entry, what is read here."""

    kind: str
    step: int
    rollouts: list[str] = []


def trained_rollouts(run: RunFolder) -> int:
    """Distinct rollouts of the surviving lineage, from the ledger. OSError where an entry is not of its schema."""
    path, by_step = run.root / "ledger.jsonl", dict[int, list[str]]()
    for entry in Tail(path).read():
        try:
            found = msgspec.convert(entry, Trained)
        except msgspec.ValidationError as e:
            raise OSError(f"{path}: damaged: entry of step {entry.get('step')}: {e}") from e
        if found.kind == "resume":
            by_step = {step: ids for step, ids in by_step.items() if step <= found.step}
        elif found.kind == "step":
            by_step[found.step] = found.rollouts
    return len({id for ids in by_step.values() for id in ids})


def dropped_rollouts(history: History) -> Counter[str]:
    """Rollouts that were finished and not trained, by reason."""
    total: Counter[str] = Counter()
    for record in history.steps["orchestrator"].values():
        total.update(record.get("dropped") or {})
    return total


def drift_of(history: History) -> str:
    """In one line, whether trainer and engine stayed in their band."""
    states = Counter((r.get("drift") or {}).get("state") for r in history.steps["trainer"].values())
    judged = states["within"] + states["above"] + states["alarm"]
    if not judged:
        return "not judged"
    return f"{states['within']} of {judged} judged steps within the band, {states['alarm']} in alarm"


def summarise(run: RunFolder, config: RunConfig, history: History) -> dict[str, Any]:
    """The numbers of summary.json; None where a run has not got that far."""
    tasks = config.evaluation.tasks
    rl, control = held_out(history, "rl", tasks), held_out(history, "control", tasks)
    # The model that RL starts from is the one that SFT ends with.
    start = next((e for e in rl if e.get("step") == 0), None)
    final = next((e for e in reversed(rl) if e.get("step", 0) > 0), None)
    steps = history.steps["trainer"]
    latest = [steps[s] for s in sorted(steps)[-LAST:]]
    staleness = history.staleness()
    dropped = dropped_rollouts(history)
    stages = {name: stage["wall_s"] for name, stage in run.stages().items()}
    return {
        "run": config.run.name,
        "seed": config.run.seed,
        "held_out_sft": start and start["sampled"],
        "held_out_sft_greedy": start and start.get("greedy"),
        "held_out_final": final and final["sampled"],
        "held_out_final_greedy": final and final.get("greedy"),
        "held_out_control": control[-1]["sampled"] if control else None,
        "held_out_control_greedy": control[-1].get("greedy") if control else None,
        "held_out_tasks": tasks,
        "evaluations_cut": history.cut_evals,
        "mismatch_kl": mean([r["mismatch_kl"] for r in latest if r.get("mismatch_kl") is not None]),
        "mismatch_kl_own": mean([r["mismatch_kl_own"] for r in latest if r.get("mismatch_kl_own") is not None]),
        "drift_alarms": sum(e["name"] == "drift" for e in history.events),
        "drift": drift_of(history),
        "staleness_max": max(staleness, default=None),
        "staleness_mean": sum(s * n for s, n in staleness.items()) / staleness.total() if staleness else None,
        "unrouted_fraction": weighted(history, "unrouted_fraction"),
        "recaptured_fraction": weighted(history, "recaptured_fraction"),
        "selection_flip_fraction": weighted(history, "selection_flip_fraction"),
        "selection_flip_fraction_max": max(
            (r["selection_flip_fraction"] for r in steps.values() if r.get("selection_flip_fraction") is not None), default=None
        ),
        "rollouts_trained": trained_rollouts(run),
        "rollouts_dropped": dropped.total(),
        "rollouts_dropped_by": dict(sorted(dropped.items())),
        "steps": max(steps, default=0),
        "steps_planned": config.trainer.steps,
        "steps_skipped": max((r.get("skipped", 0) for r in steps.values()), default=0),
        "sft_steps": max(history.steps["sft"], default=0),
        "control_steps": max(history.steps["control"], default=0),
        "records_left_out": history.left_out.total(),
        "records_left_out_by": dict(sorted(history.left_out.items())),
        "wall_s": history.elapsed(),
        "rl_wall_s": stages.get("rl"),
        "rl_steps_per_s": len(steps) / history.rl_seconds() if history.rl_seconds() else None,
        "stages_wall_s": stages,
        "waited_s": {role: round(waits.total(), 3) for role, waits in sorted(history.waited.items())},
        "rss_mb": {
            role: peak
            for role, h in sorted(history.steps.items())
            if (peak := max((r.get("rss_mb", 0) for r in h.values()), default=0))
        },
    }


def write_summary(run: RunFolder) -> dict[str, Any]:
    """Write summary.json; returns what is in it."""
    summary = summarise(run, load_resolved(run.root / "config.yaml"), load_history(run))
    path = run.root / "summary.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    temporary.replace(path)
    return summary


def shown(value: float | None, form: str = ".3f") -> str:
    return "–" if value is None else format(value, form)


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    minutes, s = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{s:02}" if minutes >= 60 else f"{minutes}:{s:02}"


def dropped_text(summary: dict[str, Any]) -> str:
    by = ", ".join(f"{reason} {n:,}" for reason, n in summary["rollouts_dropped_by"].items())
    return f"dropped {summary['rollouts_dropped']:,}" + (f": {by}" if by else "")


def table(summary: dict[str, Any]) -> Table:
    """The closing table."""
    s = summary
    gain = s["held_out_final"] - s["held_out_sft"] if None not in (s["held_out_final"], s["held_out_sft"]) else None
    out = Table(title=f"{s['run']}: {s['steps']} of {s['steps_planned']} steps in {duration(s['wall_s'])}", show_header=False)
    out.add_column(style="bold")
    out.add_column(justify="right")
    out.add_column(style="dim")
    for name, value, note in (
        (
            "solve rate after SFT",
            shown(s["held_out_sft"]),
            f"greedy {shown(s['held_out_sft_greedy'])}; {s['held_out_tasks']} held-out tasks",
        ),
        ("solve rate after RL", shown(s["held_out_final"]), f"greedy {shown(s['held_out_final_greedy'])}"),
        ("gain of RL", shown(gain, "+.3f"), ""),
        ("solve rate of the control", shown(s["held_out_control"]), f"more SFT; greedy {shown(s['held_out_control_greedy'])}"),
        ("mismatch KL", shown(s["mismatch_kl"], ".2e"), f"last {LAST} steps; own version {shown(s['mismatch_kl_own'], '.2e')}"),
        ("drift alarms", str(s["drift_alarms"]), s["drift"]),
        ("staleness", shown(s["staleness_max"], "d"), f"at most; mean {shown(s['staleness_mean'], '.2f')}"),
        (
            "rows without own route",
            shown(s["unrouted_fraction"], ".2%"),
            f"recaptured {shown(s['recaptured_fraction'], '.2%')}",
        ),
        ("rollouts trained", str(s["rollouts_trained"]), dropped_text(s)),
        ("RL phase", duration(s["rl_wall_s"]), f"{shown(s['rl_steps_per_s'], '.2f')} steps/s"),
    ):
        out.add_row(name, value, note)
    if s["records_left_out"]:
        out.add_row("records left out", str(s["records_left_out"]), f"of metrics.jsonl: {next(iter(s['records_left_out_by']))}")
    return out
