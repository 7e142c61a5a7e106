"""Bands and the alarm's judgement, on made-up records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prl.bench.fidelity import pairs
from prl.config.load import load
from prl.monitor import bands
from prl.monitor.bands import CLEAR, RAISE, Band, Pair, Watch, judge

PAIR = Pair("bfloat16", "bf16", "bfloat16", "fp8", True)
BAND = Band(dict.fromkeys(bands.MEASURES, 1e-06), {"kl": 1e-4, "p50": 1e-3, "p90": 1e-2, "p99": 0.1}, 400)


@pytest.fixture(autouse=True)
def one_band(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bands, "lookup", lambda pair: BAND if pair == PAIR else None)


def record(kl: float = 5e-5, tokens: int = 400, **more: Any) -> dict[str, Any]:
    quantiles = {"p50": 5e-4, "p90": 5e-3, "p99": 0.05, "max": 1.0}
    return {"mismatch_kl_own": kl, "own_tokens": tokens, "mismatch_own": quantiles, "unrouted_fraction": 0.0} | more


def states(records: list[dict[str, Any]]) -> list[str]:
    out, watch = [], Watch()
    for r in records:
        verdict, watch = judge(r, PAIR, watch)
        out.append("raised" if verdict.raised else verdict.state)
    return out


def test_one_noisy_step_raises_nothing_and_some_in_a_row_do_once() -> None:
    bad, good = record(kl=1.0), record()
    assert states([good, bad, good, bad, bad, good]) == ["within", "above", "within", "above", "above", "within"]
    assert RAISE == 3 and states([bad] * 6) == ["above", "above", "raised", "alarm", "alarm", "alarm"]


def test_an_alarm_ends_after_steps_within_the_band_and_can_go_off_again() -> None:
    bad, good = record(kl=1.0), record()
    found = states([bad] * RAISE + [good] * CLEAR + [bad] * RAISE)
    assert found[RAISE - 1] == "raised" and found[RAISE + CLEAR - 2 : RAISE + CLEAR] == ["alarm", "within"]
    assert found[-1] == "raised"


def test_fewer_tokens_have_a_wider_band_and_very_few_are_not_judged() -> None:
    assert BAND.bound("kl", 100) == pytest.approx(2e-4) and BAND.bound("kl", 400) == BAND.bound("kl", 10_000) == 1e-4
    assert states([record(kl=1.5e-4, tokens=100), record(kl=1.5e-4), record(kl=1.0, tokens=10)]) == [
        "within",
        "above",
        "not judged",
    ]


def test_stale_documents_neither_raise_the_alarm_nor_end_one() -> None:
    stale = record() | {"mismatch_kl_own": None, "mismatch_own": None, "own_tokens": 0, "mismatch_kl": 5.0}
    assert states([stale] * 5) == ["not judged"] * 5
    verdict, _ = judge(stale, PAIR, Watch())
    assert verdict.text == "no document is of the trained version alone"
    bad = record(kl=1.0)
    assert states([bad, bad, stale, bad]) == ["above", "above", "not judged", "raised"]


def test_a_value_that_is_not_finite_is_outside() -> None:
    assert states([record(kl=float("nan"))]) == ["above"]


def test_a_pair_without_a_band_is_not_judged() -> None:
    verdict, _ = judge(record(), Pair("float64", "bf16", "float64", "bf16"), Watch())
    assert verdict.state == "not judged" and "no band was measured for float64 / float64" in verdict.text


def test_the_band_is_the_range_of_the_steps_times_the_margin() -> None:
    steps = [{"kl": k, "p50": 0.0, "p90": 1e-3, "p99": 0.1, "tokens": n} for k, n in ((1e-5, 10), (4e-5, 30), (2e-5, 20))]
    band = bands.band_of("float32 / float32, routes replayed", steps)
    assert band.high == {"kl": pytest.approx(4e-4), "p50": 1e-6, "p90": 2e-3, "p99": 0.2}
    assert band.low["kl"] == pytest.approx(1e-6) and band.tokens == 20


def test_bands_ship_for_the_demo_and_none_is_of_an_unknown_pair() -> None:
    assert bands.load().keys() <= {p.key for p in pairs()}
    assert Pair.of(load("configs/demo.yaml")).key in bands.load()


def table() -> str:
    """Where the bands of the KL end, in README's words: trainers down, engines across."""
    types = ("bfloat16", "bfloat16 with fp8", "float32", "float32 with fp8")
    lines = [f"| trainer \\ engine | {' | '.join(types)} |", "|---" * 5 + "|"]
    for trainer in types:
        cells = []
        for engine in types:
            found = [bands.load().get(f"{trainer} / {engine}, routes {r}") for r in ("replayed", "not replayed")]
            cells.append(" / ".join(f"{b.high['kl']:.2g}" for b in found if b) or "not measured")
        lines.append(f"| {trainer} | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_readme_has_the_bands_that_ship() -> None:
    assert table() in (Path(__file__).parents[2] / "README.md").read_text("utf-8"), f"README needs:\n{table()}"


@pytest.mark.parametrize(
    "cause, more",
    [
        ("shift", {"drift_hints": {"shifted_kl": 1e-5}}),
        ("distribution", {"drift_hints": {"mean": 0.1, "mean_error": 0.01, "size": 0.2}}),
        ("unrouted", {"unrouted_fraction": 0.2}),
        ("expert", {"drift_hints": {"expert_contrast": 4.0}}),
    ],
)
def test_evidence_names_its_cause_first(cause: str, more: dict[str, Any]) -> None:
    bad = record(kl=1.0, **more)
    watch = Watch()
    for _ in range(RAISE):
        verdict, watch = judge(bad, PAIR, watch)
    assert verdict.causes[0] == cause
    line = bands.alarm_line(verdict, 7, "python -m prl.score …")
    assert "\n" not in line and bands.CAUSES[cause] in line and "python -m prl.score" in line and "step 7" in line
