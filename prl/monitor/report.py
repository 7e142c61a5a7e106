"""report.html: one self-contained page on a run, from its files alone; a part that a run did not get to is left out.

Figures are plain plotly dictionaries and made by pure functions of the history; the page is report_template.html.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jinja2
import orjson
import plotly.io
from plotly.offline import get_plotlyjs

from prl.config.load import dump, load_resolved
from prl.config.schema import RunConfig
from prl.monitor.history import History, Record, RunFolder, load_history
from prl.monitor.summary import LAST, dropped_text, duration, shown, summarise

BLUE, TEAL, ORANGE, PURPLE, RED, GREY, PALE = "#2f6fde", "#129a83", "#d97b16", "#8457c9", "#cf3f4f", "#8b93a1", "#d9dde4"
SPAN_COLOURS = {"train": BLUE, "publish": PURPLE, "checkpoint": RED, "update": ORANGE, "evaluation": TEAL, "wait": PALE}
MORE_COLOURS = ("#4aa3df", "#7a9a3c", "#b0568f", "#5b6b8c")
COLOURS = (BLUE, ORANGE, TEAL, PURPLE, *MORE_COLOURS)
TIMELINE_STEPS = 8
"""Steps that the timeline shows at first."""
TIMELINE_SPANS = 4000
"""Spans that it holds at most, those in the middle."""
Figure = dict[str, Any]


def line(x: list[Any], y: list[Any], name: str, colour: str, **more: Any) -> dict[str, Any]:
    style = {"color": colour, "width": more.pop("width", 2), "dash": more.pop("dash", "solid")}
    return {"type": "scatter", "mode": more.pop("mode", "lines"), "x": x, "y": y, "name": name, "line": style} | more


def figure(data: list[dict[str, Any]], x: str, y: str, *, height: int = 320, **layout: Any) -> Figure:
    def axis(title: str, own: dict[str, Any]) -> dict[str, Any]:
        return {"title": {"text": title}, "gridcolor": "#eceff3", "zeroline": False, "automargin": True} | own

    return {
        "data": data,
        "layout": {
            "height": height,
            "margin": {"l": 56, "r": 16, "t": 12, "b": 44},
            "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#333a45"},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
            "hovermode": layout.pop("hovermode", "x unified"),
            "xaxis": axis(x, layout.pop("xaxis", {})),
            "yaxis": axis(y, layout.pop("yaxis", {})),
            **layout,
        },
    }


def begins(history: History, stage: str) -> float | None:
    """When a stage began to learn: its first step or evaluation."""
    steps = history.steps["trainer" if stage == "rl" else stage].values()
    times = [r["t"] for r in steps] + [e["t"] for e in history.evals[stage]]
    return min(times, default=None)


def learning(h: History) -> Figure | None:
    """Reward and held-out solve rate over the time of the RL phase, the control over its own."""
    t0, control_t0 = begins(h, "rl"), begins(h, "control")
    if t0 is None:
        return None
    data = []
    rewards = [(r["t"] - t0, r["reward"]) for _, r in sorted(h.steps["orchestrator"].items()) if r.get("reward") is not None]
    if rewards:
        data.append(line([t for t, _ in rewards], [v for _, v in rewards], "reward of the batch", GREY, width=1.2, opacity=0.7))
    for key, name, dash in (("sampled", "held out, temperature 1", "solid"), ("greedy", "held out, greedy", "dot")):
        for stage, start, colour in (("rl", t0, BLUE), ("control", control_t0, ORANGE)):
            evals = [(e["t"] - (start or 0), e[key], e.get("step", 0)) for e in h.evals[stage] if e.get(key) is not None]
            if stage == "control" and evals:
                # The control goes on from where RL started.
                evals = [(0.0, e[key], 0) for e in h.evals["rl"][:1] if e.get("step") == 0 and e.get(key) is not None] + evals
            if evals:
                x, y, steps = map(list, zip(*evals, strict=True))
                title = name if stage == "rl" else f"control (more SFT), {name.split(', ')[1]}"
                data.append(line(x, y, title, colour, dash=dash, mode="lines+markers", text=[f"step {s}" for s in steps]))
    return figure(data, "seconds of the phase", "solve rate", height=380, yaxis={"rangemode": "tozero"}) if data else None


def mismatch(h: History) -> Figure | None:
    """Mismatch KL by step, all versions and the trainer's own."""
    keys = (("mismatch_kl", "all versions", BLUE), ("mismatch_kl_own", "documents of the trained version alone", TEAL))
    data = [line(*h.series("trainer", key), name, colour) for key, name, colour in keys]
    bound = h.series("trainer", "drift.bounds.kl")
    if bound[0]:
        data.append(line(*bound, "end of the band", RED, width=1.2, dash="dash"))
    return figure(data, "step", "nats per token", yaxis=LOG) if any(d["x"] for d in data) else None


def mismatch_quantiles(h: History) -> Figure | None:
    """|trainer - engine| logprob: its quantiles by step."""
    colours = {"max": RED, "p99": ORANGE, "p90": PURPLE, "p50": BLUE}
    data = [line(*h.series("trainer", f"mismatch.{q}"), q, colour) for q, colour in colours.items()]
    return figure(data, "step", "|Δ logprob|", yaxis=LOG) if any(d["x"] for d in data) else None


LOG = {"type": "log", "exponentformat": "power"}


def staleness(h: History) -> Figure | None:
    counts = h.staleness()
    if not counts:
        return None
    xs = list(range(max(counts) + 1))
    share = [counts[x] / counts.total() for x in xs]
    text = [f"{s:.1%}" for s in share]
    bar = {"type": "bar", "x": xs, "y": share, "marker": {"color": BLUE}, "text": text, "textposition": "auto"}
    return figure(
        [bar],
        "steps behind",
        "share of rollouts",
        xaxis={"dtick": 1},
        yaxis={"tickformat": ".0%"},
        hovermode="closest",
    )


def dropped(h: History) -> Figure | None:
    """Rollouts that were not trained, by length and reason."""
    by_reason: dict[str, Counter[int]] = defaultdict(Counter)
    for record in h.steps["orchestrator"].values():
        for reason, by_length in (record.get("dropped_by_length") or {}).items():
            by_reason[reason].update({int(bound): n for bound, n in by_length.items()})
    lengths = sorted({length for by_length in by_reason.values() for length in by_length})
    data = [
        {"type": "bar", "name": reason, "x": [f"≤ {n}" for n in lengths], "y": [by_length[n] for n in lengths]}
        | {"marker": {"color": colour}}
        for (reason, by_length), colour in zip(sorted(by_reason.items()), COLOURS, strict=False)
    ]
    layout: dict[str, Any] = {"barmode": "stack", "xaxis": {"type": "category"}, "hovermode": "closest", "showlegend": True}
    return figure(data, "tokens", "rollouts", **layout) if data else None


def expert_load(h: History) -> list[list[float]] | None:
    """[layer][expert]: tokens of the last steps over the mean of the layer's experts."""
    records = [r["expert_counts"] for _, r in sorted(h.steps["trainer"].items()) if r.get("expert_counts")][-LAST:]
    if not records:
        return None
    totals = [[sum(step[layer][e] for step in records) for e in range(len(row))] for layer, row in enumerate(records[-1])]
    return [[n * len(row) / max(sum(row), 1) for n in row] for row in totals]


def experts(h: History) -> Figure | None:
    load = expert_load(h)
    if load is None:
        return None
    heat = {
        "type": "heatmap",
        "z": load,
        "y": [f"MoE layer {i}" for i in range(len(load))],
        "x": list(range(len(load[0]))),
        "zmin": 0,
        "zmid": 1,
        "zmax": max(2.0, *(max(row) for row in load)),
        "colorscale": [[0, "#f4f6fa"], [0.5, "#9dbcf2"], [1, "#143d8d"]],
        "colorbar": {"title": {"text": "times the mean", "side": "right"}, "thickness": 12},
        "hovertemplate": "%{y}, expert %{x}: %{z:.2f} × the mean<extra></extra>",
    }
    yaxis = {"autorange": "reversed", "title": {}}
    return figure([heat], "expert", "", height=max(220, 110 + 34 * len(load)), hovermode="closest", yaxis=yaxis)


def timeline(h: History) -> Figure | None:
    """What each role did when, from the spans of the RL phase; blank is work that has no span of its own."""
    steps = sorted(r["t"] for r in h.steps["trainer"].values())
    if not steps or not h.spans:
        return None
    t0 = begins(h, "rl") or steps[0]
    spans = [s for s in h.spans if s["t1"] >= t0 and s["t0"] <= steps[-1]]
    spans = spans[max(0, (len(spans) - TIMELINE_SPANS) // 2) :][:TIMELINE_SPANS]
    roles = sorted({s["role"] for s in spans}, reverse=True)
    names = list(dict.fromkeys([*SPAN_COLOURS, *sorted({str(s["name"]) for s in spans})]))
    data = []
    for i, name in enumerate(names):
        own = [s for s in spans if s["name"] == name]
        if not own:
            continue
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "base": [s["t0"] - t0 for s in own],
                "x": [s["t1"] - s["t0"] for s in own],
                "y": [s["role"] for s in own],
                "marker": {"color": SPAN_COLOURS.get(name) or MORE_COLOURS[i % len(MORE_COLOURS)]},
                "text": [f"{s.get('what') or name}" + (f", step {s['step']}" if "step" in s else "") for s in own],
                "textposition": "none",
                "hovertemplate": "%{y}: %{text}<br>%{x:.2f} s<extra></extra>",
                "width": 0.7,
            }
        )
    middle = len(steps) // 2
    shown_steps = steps[max(0, middle - TIMELINE_STEPS // 2) : middle + TIMELINE_STEPS // 2 + 1]
    return figure(
        data,
        "seconds since RL began",
        "",
        height=110 + 44 * len(roles),
        barmode="overlay",
        hovermode="closest",
        dragmode="pan",
        xaxis={"range": [shown_steps[0] - t0, shown_steps[-1] - t0] if len(shown_steps) > 1 else None},
        yaxis={"categoryorder": "array", "categoryarray": roles, "title": {}, "fixedrange": True},
    )


def waits(h: History) -> Figure | None:
    """Seconds that each role waited, by what for."""
    roles = sorted(h.waited, reverse=True)
    reasons = [what for what, _ in sum(h.waited.values(), Counter()).most_common(8)]
    if not reasons:
        return None
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": what,
            "y": roles,
            "x": [h.waited[role][what] for role in roles],
            "marker": {"color": colour},
            "hovertemplate": "%{y} waited %{x:.1f} s<extra>" + what + "</extra>",
        }
        for what, colour in zip(reasons, COLOURS, strict=False)
    ]
    return figure(data, "seconds", "", height=130 + 40 * len(roles), barmode="stack", hovermode="closest", yaxis={"title": {}})


def speed(h: History) -> Figure | None:
    xs, ys = h.series("trainer", "tokens_per_s")
    return figure([line(xs, ys, "trainer", BLUE)], "step", "tokens/s", yaxis={"rangemode": "tozero"}) if xs else None


def supervised(h: History) -> Figure | None:
    """The loss of the warm start and of the control, and of conversations that are held out."""
    data = [
        line(*h.series(stage, "loss"), name, colour)
        for stage, name, colour in (("sft", "warm start", TEAL), ("control", "control", ORANGE))
    ]
    held_out = sorted(h.validation.items())
    data.append(line([step for step, _ in held_out], [e.get("loss") for _, e in held_out], "validation", BLUE))
    data = [d for d in data if d["x"]]
    return figure(data, "step", "loss", yaxis={"rangemode": "tozero"}) if data else None


@dataclass(frozen=True)
class Card:
    name: str
    title: str
    make: Callable[[History], Figure | None]
    note: str = ""
    wide: bool = False


CARDS = (
    Card(
        "learning",
        "What it learned",
        learning,
        "Reward of each training batch and solve rate on held-out tasks. The control is more SFT with the same worked answers.",
        wide=True,
    ),
    Card(
        "mismatch",
        "Mismatch KL",
        mismatch,
        "Mean over trained tokens of exp(d) − 1 − d, d = trainer − engine logprob. Tokens of older versions differ since the "
        "weights do, and so do newer ones behind them, which saw keys of the older weights. What is left where the trained "
        "version sampled all of a document can be rounding, and experts or selections that were not replayed; dashed: the "
        "end of the band that was measured for the types of this run (docs/fidelity.md).",
    ),
    Card("quantiles", "Mismatch of a token", mismatch_quantiles, "Quantiles over the tokens of a step, all versions."),
    Card(
        "staleness", "Staleness", staleness, "Steps between the weights of a rollout's oldest token and those that it trained."
    ),
    Card("dropped", "Dropped rollouts", dropped, "Generated, but not trained, by length and by reason."),
    Card("experts", "Expert load", experts, f"Tokens per expert in the last {LAST} steps, padding excluded.", wide=True),
    Card(
        "timeline",
        "Who did what when",
        timeline,
        f"{TIMELINE_STEPS} steps from the middle of the RL phase: drag to move, scroll to zoom, double-click for all. Blank is "
        "work without a span of its own, such as generation.",
        wide=True,
    ),
    Card("waits", "Who waited for whom", waits, "The whole run.", wide=True),
    Card("speed", "Speed", speed, "Tokens through the trainer while a step ran."),
    Card("supervised", "Supervised loss", supervised, "Of the warm start and of the control."),
)


def side_by_side(h: History) -> tuple[int, int, list[tuple[Record | None, Record | None]]]:
    """The rollouts kept of the first and of the last step, in pairs."""
    if not h.samples:
        return 0, 0, []
    first, last = min(h.samples), max(h.samples)
    after = h.samples[last] if last != first else []
    return first, last, list(zip_longest(h.samples[first], after))


def tiles(s: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Name, value, note of the numbers at the top."""
    gain = s["held_out_final"] - s["held_out_sft"] if None not in (s["held_out_final"], s["held_out_sft"]) else None
    return [
        ("held out after SFT", shown(s["held_out_sft"]), f"greedy {shown(s['held_out_sft_greedy'])}"),
        ("held out after RL", shown(s["held_out_final"]), f"{shown(gain, '+.3f')}; greedy {shown(s['held_out_final_greedy'])}"),
        ("control", shown(s["held_out_control"]), f"more SFT, {s['control_steps']} steps" if s["control_steps"] else "not run"),
        ("mismatch KL", shown(s["mismatch_kl"], ".1e"), f"last {LAST} steps; own version {shown(s['mismatch_kl_own'], '.1e')}"),
        ("drift alarms", str(s["drift_alarms"]), s["drift"]),
        ("staleness", shown(s["staleness_max"], "d"), f"at most; mean {shown(s['staleness_mean'], '.2f')}"),
        ("rollouts trained", f"{s['rollouts_trained']:,}", dropped_text(s)),
        ("without own route", shown(s["unrouted_fraction"], ".2%"), f"recaptured {shown(s['recaptured_fraction'], '.2%')}"),
        ("wall time", duration(s["wall_s"]), f"RL {duration(s['rl_wall_s'])}, {shown(s['rl_steps_per_s'], '.2f')} steps/s"),
    ]


def verdict(s: dict[str, Any], time_fraction: float = 1.0) -> tuple[bool, str] | None:
    """(whether RL ended above the control, the sentence with both rates); None where one of them is not there.

    `time_fraction`: of RL's time, what the control had.
    """
    rl, control = s["held_out_final"], s["held_out_control"]
    if rl is None or control is None:
        return None
    where = "above" if rl > control else "below" if rl < control else "level with"
    rates = f"{shown(rl)} against {shown(control)} on held-out tasks ({shown(rl - control, '+.3f')})"
    time = "" if time_fraction == 1 else f" The control had {time_fraction:.0%} of RL's time."
    return rl > control, f"RL ended {where} the control: {rates}.{time}"


def read_measurements(path: Path) -> dict[str, Any]:
    """What `python -m prl.bench … --json` wrote. Raises ValueError naming the file."""
    try:
        found = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as e:
        raise ValueError(f"{path}: not the result of a bench: {e}") from None
    rows = found.get("rows") if isinstance(found, dict) else None
    if not isinstance(rows, list) or not all(isinstance(r, dict) and {"name", "value"} <= r.keys() for r in rows):
        raise ValueError(f"{path}: not the result of a bench: expected an object with rows of name and value")
    return found


def measured(result: dict[str, Any]) -> list[tuple[str, str, str, str, bool | None]]:
    """Name, value, ratio, goal, and whether it was met (None: no goal, or not judged) of each row."""
    out = []
    for row in result["rows"]:
        value = f"{shown(row['value'], '.4g')} {row.get('unit') or ''}".strip()
        ratio = "" if row.get("ratio") is None else f"{row['ratio']:.2f} × {row.get('against') or ''}".strip(" ×")
        goal = f"{row['goal']}: {row.get('verdict') or 'not judged'}" if row.get("goal") else ""
        out.append((row["name"], value, ratio, goal, row.get("met")))
    return out


def numbers(s: dict[str, Any]) -> Iterable[tuple[str, str]]:
    """All of the summary, flat."""
    for key, value in s.items():
        if isinstance(value, dict):
            yield key, ", ".join(f"{k} {v:g}" for k, v in value.items()) or "none"
        else:
            yield key, f"{value:.6g}" if isinstance(value, float) else str(value)


def render(config: RunConfig, history: History, summary: dict[str, Any], measurements: dict[str, Any] | None = None) -> str:
    cards = []
    for card in CARDS:
        made = card.make(history)
        if made is not None:
            html = plotly.io.to_html(
                made,
                include_plotlyjs=False,
                full_html=False,
                validate=False,
                div_id=f"figure-{card.name}",
                default_height=made["layout"]["height"],
                config={
                    "displaylogo": False,
                    "displayModeBar": False,
                    "scrollZoom": card.name == "timeline",
                    "responsive": True,
                },
            )
            cards.append((card, html))
    first, last, pairs = side_by_side(history)
    template = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    ).get_template("report_template.html")
    return template.render(
        config=config,
        model=(config.model.architecture or {}).get("model_type") or config.model.path,
        config_yaml=dump(config),
        cards=cards,
        plotly_js=get_plotlyjs() if cards else "",
        tiles=tiles(summary),
        verdict=verdict(summary, config.control.time_fraction if config.control else 1.0),
        measurements=measurements,
        measured=measured(measurements) if measurements else [],
        numbers=list(numbers(summary)),
        first=first,
        last=last,
        pairs=pairs,
        events=[(duration(e["t"] - (history.first_t or e["t"])), e) for e in history.events][-50:],
    )


def write_report(run: RunFolder, measurements: Path | None = None) -> Path:
    """Write report.html; returns its path. `measurements`: the JSON of a bench, shown as a table (ValueError if it is none)."""
    bench = read_measurements(measurements) if measurements else None
    config, history = load_resolved(run.root / "config.yaml"), load_history(run)
    path = run.root / "report.html"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(render(config, history, summarise(run, config, history), bench), encoding="utf-8")
    temporary.replace(path)
    return path
