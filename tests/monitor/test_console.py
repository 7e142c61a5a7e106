"""The live view: what it says of each stage, plain lines where there is no terminal, and that it never fails the run."""

import io
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
from rich.console import Console as Terminal

from prl.config.load import load_resolved
from prl.monitor.console import Console, View
from prl.transport.run_dir import RunDir
from tests.monitor.synthetic import T0, records, write_run


def status(run: RunDir, role: str, t: float, phase: str = "training", waits_for: str = "") -> None:
    path = run.root / "status" / f"{role}.json"
    path.write_bytes(orjson.dumps({"role": role, "t": t, "phase": phase, "waits_for": waits_for}))


def view_of(run: RunDir) -> View:
    view = View(run, load_resolved(run.root / "config.yaml"))
    view.update()
    return view


def in_rl(tmp_path: Path, steps: int = 50) -> tuple[RunDir, float, list[dict[str, Any]]]:
    """A run in its RL phase after `steps` of 120 steps, and the time then."""
    made = records(120)
    last = next(i for i, r in enumerate(made) if r["role"] == "trainer" and r["kind"] == "step" and r["step"] == steps)
    run = write_run(tmp_path / "run", made[: last + 1])
    now = made[last]["t"]
    status(run, "sft", T0, "done")
    status(run, "trainer", now, waits_for="batch 51 from the orchestrator")
    status(run, "orchestrator", now, "evaluating")
    return run, now, made


def test_the_rl_phase(tmp_path: Path) -> None:
    run, now, made = in_rl(tmp_path)
    view = view_of(run)
    line = view.line(now)
    for part in ("asynchronous RL, evaluating", "step 50/120", "max 2", "trained 14,000", "trainer waits for batch 51"):
        assert part in line
    reward = next(r["reward"] for r in made if r["role"] == "orchestrator" and r.get("step") == 49 and "reward" in r)
    assert f"reward {reward:.3f}" in line
    # 70 steps of 1.5 s to go, then a control as long as the RL phase, of which 50 steps and evaluations are over.
    began = next(r["t"] for r in made if r["role"] == "orchestrator")
    assert view.left_s(now) == pytest.approx(70 * 1.5 + (now - began) + 70 * 1.5)
    terminal = Terminal(width=120, file=io.StringIO())
    terminal.print(view.panel(now))
    text = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert "batch 51 from the orchestrator" in text and "held out" in text and "step 50/120" in text


def test_the_share_of_waiting_is_of_the_last_minute(tmp_path: Path) -> None:
    run, now, made = in_rl(tmp_path)
    waited = sum(
        min(r["t1"], now) - max(r["t0"], now - 60)
        for r in made
        if r["kind"] == "span" and r["name"] == "wait" and r["role"] == "trainer" and now - 60 < r["t1"] <= now
    )
    (share,) = [share for role, _, _, share, _ in view_of(run).waits(now) if role == "trainer"]
    assert share == pytest.approx(waited / 60) and 0.1 < share < 0.5


def test_a_role_without_a_sign_is_shown(tmp_path: Path) -> None:
    run, now, _ = in_rl(tmp_path)
    status(run, "inference-0", now - 40, "serving")
    terminal = Terminal(width=120, file=io.StringIO())
    terminal.print(view_of(run).panel(now))
    assert "no sign for 40 s" in terminal.file.getvalue()  # type: ignore[attr-defined]


def test_the_other_stages(tmp_path: Path) -> None:
    assert "starting" in view_of(write_run(tmp_path / "new", [])).line(T0)
    sft = write_run(tmp_path / "sft", [r for r in records(5) if r["role"] == "sft"])
    status(sft, "sft", T0 + 24)
    assert "supervised warm start | step 60/600 | loss 0.406 | solve rate 0.300" in view_of(sft).line(T0 + 24)
    loss = {"t": T0 + 24, "role": "sft", "kind": "eval", "split": "validation", "step": 60, "loss": 0.75}
    sft = write_run(tmp_path / "chats", [*(r for r in records(5) if r["role"] == "sft"), loss])
    status(sft, "sft", T0 + 24)
    assert "loss 0.406 | validation loss 0.750 | solve rate 0.300" in view_of(sft).line(T0 + 24)
    control = write_run(tmp_path / "control", records(40))
    status(control, "trainer", T0, "done")
    status(control, "control", T0 + 99)
    assert "control: more SFT | step 80 | loss 0.300" in view_of(control).line(T0 + 99)
    began = view_of(control).history.began["control"]
    assert view_of(control).left_s(began + 30) == pytest.approx(70 - 30)


def test_plain_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    run, now, _ = in_rl(tmp_path)
    terminal = Terminal(file=io.StringIO(), width=80)
    with Console(run, load_resolved(run.root / "config.yaml"), terminal=terminal, clock=lambda: now):
        pass
    (line,) = terminal.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "step 50/120" in line and "\x1b" not in line


def test_the_live_view_redraws_and_leaves_the_last_state(tmp_path: Path) -> None:
    run, now, _ = in_rl(tmp_path)
    terminal = Terminal(file=io.StringIO(), force_terminal=True, width=100)
    with Console(run, load_resolved(run.root / "config.yaml"), terminal=terminal, clock=lambda: now):
        time.sleep(0.1)
    assert "step 50/120" in terminal.file.getvalue()  # type: ignore[attr-defined]


def test_off_shows_nothing_and_a_fault_does_not_reach_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, now, _ = in_rl(tmp_path)
    config = load_resolved(run.root / "config.yaml")
    terminal = Terminal(file=io.StringIO())
    off = config.model_copy(update={"monitor": config.monitor.model_copy(update={"console": "off"})})
    with Console(run, off, terminal=terminal):
        pass
    assert terminal.file.getvalue() == ""  # type: ignore[attr-defined]

    def broken() -> float:
        raise RuntimeError("no clock")

    with Console(run, config, terminal=terminal, clock=broken):
        pass
    assert "the console stopped; the run goes on" in caplog.text
