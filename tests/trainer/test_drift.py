"""The alarm in the trainer: one line, one event, tokens to score; it ends the run only where that is asked for."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from prl.config.schema import RunConfig
from prl.monitor import bands
from prl.monitor.bands import Verdict, Watch
from prl.trainer import checkpoint
from tests.trainer.helpers import config, rollouts, run_dir
from tests.trainer.test_train import orchestrate, records, start


@pytest.fixture(autouse=True)
def drifting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The alarm goes off with the second step."""

    def judge(record: Any, pair: Any, watch: Watch) -> tuple[Verdict, Watch]:
        second = watch.above == 1
        state = "alarm" if watch.above else "above"
        return Verdict(state, "far out", 9.0, ("shift", "expert"), raised=second), Watch(above=watch.above + 1)

    monkeypatch.setattr(bands, "judge", judge)


def with_drift(what: str) -> RunConfig:
    return RunConfig.model_validate(config().model_dump() | {"monitor": {"drift": what}})


async def test_a_warning_is_said_once_and_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, c = run_dir(tmp_path), with_drift("warn")
    with caplog.at_level(logging.WARNING):
        task = start(run, c)
        await orchestrate(run, c, range(1, 4))
        assert await task == 0
    said = [r.getMessage() for r in caplog.records if "drift apart" in r.getMessage()]
    assert len(said) == 1 and "\n" not in said[0]
    assert said[0].index(bands.CAUSES["shift"]) < said[0].index(bands.CAUSES["expert"]) < said[0].index("prl.score")
    (event,) = [e for e in records(run, "event") if e["name"] == "drift"]
    assert event["step"] == 2 and event["causes"] == ["shift", "expert"] and event["text"] == said[0]
    assert [r["drift"]["state"] for r in records(run, "step")] == ["above", "alarm", "alarm"]
    kept = [json.loads(line)["tokens"] for line in (run / "drift" / "step_2.jsonl").read_text().splitlines()]
    assert sorted(kept) == sorted(s.tokens.tolist() for r in rollouts(2) for s in r.samples)


async def test_the_run_stops_and_is_saved_where_that_is_asked_for(tmp_path: Path) -> None:
    run, c = run_dir(tmp_path), with_drift("stop")
    task = start(run, c)
    offering = asyncio.create_task(orchestrate(run, c, range(1, 4), code=None))
    assert await task == 1
    offering.cancel()
    await asyncio.wait([offering])
    assert [r["step"] for r in records(run, "step")] == [1, 2]
    assert [p.name for _, p in checkpoint.complete(run)] == ["step_2"]
    assert any("drift apart" in e.get("error", "") for e in records(run, "event"))
