"""The live view of a run: a thread that follows metrics.jsonl and status/, on a terminal redrawn, elsewhere as plain lines.

It only reads the run's files, at most twice a second, so that it costs next to nothing and no role waits for it.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

from rich.console import Console as Terminal
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from prl.config.schema import RunConfig
from prl.monitor import bands
from prl.monitor.history import History, Record, RunFolder, Tail, stage_of, statuses
from prl.monitor.summary import duration, mean, shown

log = logging.getLogger(__name__)

LIVE_S = 0.5
PLAIN_S = 2.0
"""How often the files are looked at."""
PLAIN_LINE_S = 10.0
"""A plain line of progress at least this often, and at every evaluation and change of stage."""
RECENT = 20
"""Steps that rates are taken over."""
TITLES = {"start": "starting", "sft": "supervised warm start", "rl": "asynchronous RL", "control": "control: more SFT"}
SPARK = "▁▂▃▄▅▆▇█"


class View:
    """What the files say now, in the words of the display. The clock comes in as an argument."""

    def __init__(self, run: RunFolder, config: RunConfig):
        self.run, self.config = run, config
        self.history = History()
        self.roles: dict[str, Record] = {}
        self.stage = "start"
        self._tail = Tail(run.root / "metrics.jsonl")

    def update(self) -> None:
        for record in self._tail.read():
            self.history.add(record)
        self.roles = statuses(self.run)
        if self.roles:
            newest = max(self.roles, key=lambda role: self.roles[role].get("t", 0.0))
            self.stage = stage_of({"role": newest})

    @property
    def _leader(self) -> str:
        return {"rl": "trainer"}.get(self.stage, self.stage)

    def progress(self) -> tuple[int, int]:
        """Steps done and planned of the stage."""
        c, done = self.config, max(self.history.steps[self._leader], default=0)
        if self.stage == "rl":
            return done, c.trainer.steps
        if self.stage == "sft" and c.sft is not None:
            return done, c.sft.steps
        return done, 0

    def step_s(self) -> float | None:
        """Seconds per step, lately."""
        records = sorted(self.history.steps[self._leader].items())[-RECENT - 1 :]
        if len(records) < 2:
            return None
        (first, a), (last, b) = records[0], records[-1]
        return (b["t"] - a["t"]) / (last - first)

    def left_s(self, now: float) -> float | None:
        """Time left, the control's share included; a stage that has not begun and tells nothing is not guessed."""
        c, step_s, (done, planned) = self.config, self.step_s(), self.progress()
        began = self.history.began.get(self.stage, now)
        share = c.control.time_fraction if c.control is not None else 0.0
        if self.stage == "control":
            return max(0.0, share * self.run.stages().get("rl", {}).get("wall_s", 0.0) - (now - began))
        if self.stage == "rl" and step_s is not None:
            left = step_s * (planned - done)
            return left + share * (now - began + left)
        return None

    def waits(self, now: float) -> list[tuple[str, str, str, float, float]]:
        """Role, phase, what it waits for now, share of the last minute it waited, and seconds since its last sign."""
        waited: dict[str, float] = {}
        for span in reversed(self.history.spans):
            if span["t1"] < now - 120:
                break
            if span.get("name") == "wait":
                seconds = max(0.0, span["t1"] - max(span["t0"], now - 60))
                waited[span["role"]] = waited.get(span["role"], 0.0) + seconds
        out = []
        for role, s in self.roles.items():
            age = now - s.get("t", now)
            out.append((role, str(s.get("phase", "")), str(s.get("waits_for", "")), min(waited.get(role, 0) / 60, 1.0), age))
        return out

    def facts(self) -> list[tuple[str, str]]:
        """Names and values of what matters in this stage."""
        h, leader = self.history, self.history.last(self._leader)
        if self.stage in ("sft", "control"):
            dev = h.evals[self.stage][-1] if h.evals[self.stage] else {}
            rate = dev.get("greedy") if dev.get("sampled") is None else dev["sampled"]
            held_out = h.validation if self.stage == "sft" else {}
            validation = [("validation loss", shown(held_out[max(held_out)].get("loss")))] if held_out else []
            facts = [("loss", shown(leader.get("loss"))), *validation, ("solve rate", shown(rate))]
            return [*facts, ("tokens/s", self._tokens_per_s())]
        if self.stage != "rl":
            return []
        orchestrator, rates = h.last("orchestrator"), [e["sampled"] for e in h.evals["rl"] if e.get("sampled") is not None]
        stale = {int(k): n for k, n in (orchestrator.get("staleness") or {}).items()}
        reward = orchestrator.get("reward", orchestrator.get("reward_mean"))
        average = sum(k * n for k, n in stale.items()) / max(sum(stale.values()), 1)
        quantiles = leader.get("mismatch") or {}
        drift = (
            shown(leader.get("mismatch_kl"), ".1e"),
            bands.shown(leader, bands.Pair.of(self.config)),
            f"p99 of |Δ| {shown(quantiles.get('p99'), '.1e')}",
        )
        return [
            ("reward", f"{shown(reward)} {spark(h.series('orchestrator', 'reward')[1])}"),
            ("held out", f"{shown(rates[-1] if rates else None)} {spark(rates)}"),
            ("mismatch KL", ", ".join(part for part in drift if part)),
            *self._precision(),
            ("staleness", f"mean {average:.2f}, max {max(stale, default=0)}" if stale else "–"),
            ("tokens/s", self._tokens_per_s()),
        ]

    def _precision(self) -> list[tuple[str, str]]:
        """Layers in FP8, where there are any."""
        told = next((e for e in reversed(self.history.events) if e["name"] == "precision"), None)
        if told is None or not (told["trainer"] or told["engine"]):
            return []
        return [("FP8 layers", f"trainer {told['trainer']}, engine {told['engine']}")]

    def _tokens_per_s(self) -> str:
        trained = mean(
            [r["tokens_per_s"] for _, r in sorted(self.history.steps[self._leader].items())[-RECENT:] if "tokens_per_s" in r]
        )
        made = [e["generated_per_s"] for e in self.history.engines.values() if "generated_per_s" in e]
        parts = [f"trained {trained:,.0f}"] if trained is not None else []
        if made and self.stage == "rl":
            parts.append(f"generated {sum(made):,.0f}")
        return ", ".join(parts) or "–"

    def title(self) -> str:
        title = TITLES[self.stage]
        said = [str(s.get(key, "")) for s in self.roles.values() for key in ("phase", "waits_for")]
        return f"{title}, evaluating" if any("evaluat" in text for text in said) else title

    def line(self, now: float) -> str:
        """All in one plain line."""
        done, planned = self.progress()
        step = f"step {done}/{planned}" if planned else f"step {done}"
        facts = " | ".join(f"{name} {value.rstrip(SPARK + ' ')}" for name, value in self.facts())
        waiting = "; ".join(f"{role} waits for {what}" for role, _, what, _, _ in self.waits(now) if what)
        left = self.left_s(now)
        parts = [self.title(), step, facts, waiting, f"{duration(left)} left" if left is not None else ""]
        return f"[{duration(self.history.elapsed(now) or 0.0)}] " + " | ".join(p for p in parts if p)

    def panel(self, now: float) -> Group:
        """The redrawn display."""
        done, planned = self.progress()
        left = self.left_s(now)
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(f"{self.config.run.name}: {self.title()}", style="bold"),
            ProgressBar(total=planned or None, completed=done, width=28, pulse=not planned),
            f"step {done}/{planned}" if planned else f"step {done}",
            f"{duration(self.history.elapsed(now) or 0.0)} gone",
            Text(f"{duration(left)} left" if left is not None else "", style="cyan"),
        )
        facts = Table.grid(padding=(0, 2))
        for name, value in self.facts():
            facts.add_row(Text(name, style="dim"), Text(value))
        roles = Table(box=None, padding=(0, 2), header_style="dim")
        for column in ("role", "does", "waits for", "waited in the last minute"):
            roles.add_column(column, justify="right" if column.startswith("waited") else "left")
        for role, phase, what, share, age in self.waits(now):
            stale = age > 5 and phase not in ("done", "saved")
            does = Text(f"no sign for {age:.0f} s", style="red") if stale else Text(phase)
            roles.add_row(role, does, Text(what), f"{share:.0%}")
        return Group(head, facts, roles)


def spark(values: list[Any], width: int = 24) -> str:
    """The last values as a row of bars between 0 and at least 1."""
    top = max([1.0, *values[-width:]])
    return "".join(SPARK[min(7, max(0, int(v / top * 8)))] for v in values[-width:])


class Console:
    """Shows a run while it is open: `with Console(run, config): …`. It never fails the run: a fault of its own is logged."""

    def __init__(
        self, run: RunFolder, config: RunConfig, *, terminal: Terminal | None = None, clock: Callable[[], float] = time.time
    ):
        self.view, self._clock = View(run, config), clock
        self._terminal = terminal or Terminal(file=sys.stderr, highlight=False)
        mode = config.monitor.console
        self._mode = mode if mode != "auto" else "live" if self._terminal.is_terminal else "plain"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="console", daemon=True)
        self._said: deque[Any] = deque(maxlen=1)
        self._line_t = 0.0

    def __enter__(self) -> Console:
        if self._mode != "off":
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def _follow(self) -> None:
        try:
            if self._mode == "live":
                with Live(console=self._terminal, auto_refresh=False, transient=False) as live:
                    while True:
                        ending = self._stop.wait(LIVE_S)
                        self.view.update()
                        live.update(self.view.panel(self._clock()), refresh=True)
                        if ending:
                            return
            while True:
                ending = self._stop.wait(PLAIN_S)
                self.view.update()
                self._plain(ending)
                if ending:
                    return
        except Exception:
            log.exception("the console stopped; the run goes on")

    def _plain(self, ending: bool) -> None:
        view, now = self.view, self._clock()
        news = (view.stage, {stage: len(evals) for stage, evals in view.history.evals.items()})
        if ending or news not in self._said or now - self._line_t >= PLAIN_LINE_S:
            self._said.append(news)
            self._line_t = now
            self._terminal.print(view.line(now), soft_wrap=True, markup=False)
