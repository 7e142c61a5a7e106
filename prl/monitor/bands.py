"""How far trainer and engine may be apart: the bands that were measured, and the alarm where a run leaves its own.

Pure. bands.yaml is written by `python -m prl.bench fidelity --write`; docs/fidelity.md explains it. d is trainer − engine
logprob of a token of a document that the trained version sampled alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from prl.config.schema import RunConfig

FILE = Path(__file__).with_name("bands.yaml")
MEASURES = ("kl", "p50", "p90", "p99")
"""Mean of exp(d) − 1 − d, and quantiles of |d|."""
MARGIN = {"kl": 10.0, "p50": 2.0, "p90": 2.0, "p99": 2.0}
"""A band goes from the least measured step over this to the greatest times this. The mean hangs on single tokens."""
FLOOR = {
    "float32": {"kl": 1e-11, "p50": 1e-6, "p90": 1e-5, "p99": 1e-4},
    "bfloat16": {"kl": 1e-3, "p50": 5e-4, "p90": 1.5e-2, "p99": 7e-2},
}
"""No band ends below, by the narrower type of the pair: what it rounds off in another order of sums. The second is about what a
float32 trainer and a bfloat16 engine differ by; on one machine two bfloat16 roles run the same kernels, and differ by less."""
MIN_TOKENS = 64
"""Steps with fewer own tokens are not judged."""
RAISE, CLEAR = 3, 5
"""Judged steps in a row above the band that raise the alarm, and within it that clear it."""


@dataclass(frozen=True)
class Pair:
    """What decides how far apart trainer and engine are by nature."""

    trainer_dtype: str = "bfloat16"
    trainer: str = "bf16"
    engine_dtype: str = "bfloat16"
    engine: str = "bf16"
    replay: bool = True

    @classmethod
    def of(cls, c: RunConfig) -> Pair:
        replay = c.trainer.router_replay and c.inference.record_routes
        return cls(c.model.dtype, c.trainer.precision, c.inference.dtype, c.inference.precision, replay)

    @property
    def key(self) -> str:
        roles = (self.trainer_dtype, self.trainer), (self.engine_dtype, self.engine)
        trainer, engine = (dtype + (" with fp8" if precision == "fp8" else "") for dtype, precision in roles)
        return f"{trainer} / {engine}, routes {'replayed' if self.replay else 'not replayed'}"


@dataclass(frozen=True)
class Band:
    """From `low` to `high` of every measure, as steps of `tokens` own tokens had it."""

    low: Mapping[str, float]
    high: Mapping[str, float]
    tokens: int

    def bound(self, measure: str, tokens: int) -> float:
        """Fewer tokens say less: the bound goes up by the root of what is missing."""
        return self.high[measure] * math.sqrt(max(1.0, self.tokens / max(tokens, 1)))


def band_of(key: str, steps: list[Mapping[str, float]]) -> Band:
    """The rule: of steps of the pair with their measures and `tokens`, all models and seeds together."""
    floor = FLOOR["bfloat16" if "bfloat16" in key else "float32"]
    low = {m: min(s[m] for s in steps) / MARGIN[m] for m in MEASURES}
    high = {m: max(max(s[m] for s in steps) * MARGIN[m], floor[m]) for m in MEASURES}
    return Band(low, high, sorted(int(s["tokens"]) for s in steps)[len(steps) // 2])


@functools.cache
def load(path: Path = FILE) -> dict[str, Band]:
    """Bands by `Pair.key`."""
    return {key: Band(**band) for key, band in yaml.safe_load(path.read_text("utf-8"))["bands"].items()}


def lookup(pair: Pair) -> Band | None:
    """None where the pair was not measured (float64)."""
    return load().get(pair.key)


@dataclass(frozen=True)
class Watch:
    """What judging remembers from step to step."""

    above: int = 0
    within: int = 0
    raised: bool = False
    first: float | None = None
    """The excess of the first judged step: faults that grow begin small."""


@dataclass(frozen=True)
class Verdict:
    state: Literal["within", "above", "alarm", "not judged"]
    text: str
    """One line."""
    excess: float = 0.0
    """The measure that is furthest out, over its bound."""
    causes: tuple[str, ...] = ()
    """Names of CAUSES, the likeliest first."""
    raised: bool = False
    """The alarm goes off with this step."""
    bounds: Mapping[str, float] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        causes = [CAUSES[c] for c in self.causes]
        return {"state": self.state, "text": self.text, "excess": self.excess, "causes": causes, "bounds": dict(self.bounds)}


CAUSES = {
    "shift": "logprobs are one position off: a token is compared with its neighbour's",
    "distribution": "the engine's logprobs are not of the distribution it sampled from: raw for tempered ones, or truncated",
    "expert": "experts differ: permuted or overwritten in one of the two",
    "unrouted": "rows without the engine's own route",
    "routes": "replayed routes are of other layers or other tokens",
    "stale": "one of the two computes with older weights: a refit that was missed, or a stale copy",
    "precision": "layers compute in another precision than the pair says",
    "flips": "single tokens take other experts or keep other keys; routes are not replayed",
}


def measures(record: Mapping[str, Any]) -> dict[str, float] | None:
    """Of a trainer's step record; None where no document is of the trained version alone."""
    quantiles = record.get("mismatch_own")
    if not quantiles or record.get("mismatch_kl_own") is None:
        return None
    return {"kl": record["mismatch_kl_own"], **{m: quantiles[m] for m in MEASURES[1:]}, "tokens": record["own_tokens"]}


def causes(record: Mapping[str, Any], pair: Pair, excess: float, first: float) -> tuple[str, ...]:
    """Names of CAUSES by what speaks for each, most first; those that nothing speaks for are left out.

    A score above 1 is evidence of its own; below, what remains where there is none.
    """
    live, hints = measures(record), record.get("drift_hints") or {}
    band = lookup(pair)
    if live is None or band is None:
        return ()
    n, score = int(live["tokens"]), dict.fromkeys(CAUSES, 0.0)
    out = {m for m in MEASURES if not live[m] <= band.bound(m, n)}
    # Two neighbours agree better than a token with itself.
    if (shifted := hints.get("shifted_kl")) is not None and live["kl"] > 0:
        score["shift"] = 6.0 if shifted < 0.3 * live["kl"] else 0.0
    # A sampled token is likelier under its own distribution than under another: mean d is at most 0 but for noise.
    if (mean := hints.get("mean")) is not None and mean > 2 * hints["mean_error"] and mean > 0.1 * hints["size"]:
        score["distribution"] = 5.0
    # At temperature 1 raw and tempered are the same.
    if (at_one := hints.get("kl_at_1")) is not None and 0.05 * hints["kl_tempered"] > at_one:
        score["distribution"] = 5.5
    unrouted = record.get("unrouted_fraction") or 0.0
    if pair.replay and unrouted > 0.02:
        score["unrouted"] = 4.0
    if (contrast := hints.get("expert_contrast")) is not None and contrast > 2:
        score["expert"] = 1 + min(math.log2(contrast), 2.9)
    if excess > 4 * max(first, 0.25):
        score["stale"] = 3.0
    if pair.replay:
        score["routes"] = 0.9 if "p50" in out and live["p50"] > 8 * band.high["p50"] else 0.3
        score["expert"] = max(score["expert"], 0.6)
    else:
        score["flips"], score["expert"] = 0.5 if "p50" in out else 0.95, max(score["expert"], 0.9)
    both = pair.trainer == pair.engine == "fp8"
    score["precision"] = (2.5 if both else 0.8) if live["kl"] < 1e-3 and live["p99"] < 0.2 else 0.2
    score["stale"] = max(score["stale"], 0.5)
    return tuple(sorted((c for c in score if score[c] > 0), key=lambda c: -score[c]))


def judge(record: Mapping[str, Any], pair: Pair, watch: Watch) -> tuple[Verdict, Watch]:
    """A trainer's step record against the pair's band."""
    band, live = lookup(pair), measures(record)
    if band is None:
        return Verdict("not judged", f"no band was measured for {pair.key}"), watch
    if live is None:
        return Verdict("not judged", "no document is of the trained version alone"), watch
    n = int(live["tokens"])
    if n < MIN_TOKENS:
        return Verdict("not judged", f"{n} tokens of the trained version alone, fewer than {MIN_TOKENS}"), watch
    # Not finite counts as outside.
    bounds = {m: band.bound(m, n) for m in MEASURES}
    excesses = {m: live[m] / bounds[m] if math.isfinite(live[m]) else math.inf for m in MEASURES}
    worst = max(excesses, key=excesses.__getitem__)
    excess, outside = excesses[worst], excesses[worst] > 1
    first = excess if watch.first is None else watch.first
    above, within = (watch.above + 1, 0) if outside else (0, watch.within + 1)
    alarm = watch.raised and within < CLEAR or above >= RAISE
    after = replace(watch, above=above, within=within, raised=alarm, first=first)
    name = "mismatch KL" if worst == "kl" else f"{worst} of |Δ logprob|"
    text = f"{name} {live[worst]:.1e}, band up to {bounds[worst]:.1e} ({n} own tokens, {pair.key})"
    found = causes(record, pair, excess, first) if alarm else ()
    state: Literal["within", "above", "alarm"] = "alarm" if alarm else "above" if outside else "within"
    return Verdict(state, text, excess, found, raised=alarm and not watch.raised, bounds=bounds), after


def alarm_line(verdict: Verdict, step: int, command: str) -> str:
    """All that a user needs, in one line."""
    why = "; ".join(f"{i}. {CAUSES[c]}" for i, c in enumerate(verdict.causes[:3], 1))
    return f"step {step}: trainer and engine drift apart: {verdict.text}. Likely causes: {why}. Next: {command}"


def shown(record: Mapping[str, Any], pair: Pair) -> str:
    """The live value beside its band, for the console."""
    kl, band = record.get("mismatch_kl_own"), lookup(pair)
    if kl is None or band is None:
        return ""
    drifts = (record.get("drift") or {}).get("state") == "alarm"
    return f"own {kl:.1e}, band up to {band.bound('kl', record.get('own_tokens') or 0):.1e}{' DRIFTS' if drifts else ''}"
