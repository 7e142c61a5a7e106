"""Reading a run once it has settled, and running commands that end, fail, hang."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from prl.bench.runs import BenchError, settled, watch
from prl.monitor.history import History

T0 = 1_700_000_000.0
STARTUP, STEP, LAST_STEP = 10.0, 2.0, 0.5


def records(steps: int, *, ending: int) -> list[dict[str, Any]]:
    """A run whose first step takes 10 s, whose last `ending` steps take 0.5 s, and all others 2 s."""
    out: list[dict[str, Any]] = []
    t = T0
    for step in range(1, steps + 1):
        took = STARTUP if step == 1 else LAST_STEP if step > steps - ending else STEP
        wait = 0.25 * took
        span = {"role": "trainer", "kind": "span"}
        out.append(
            span | {"t": t + wait, "name": "wait", "what": f"batch {step} from the orchestrator", "t0": t, "t1": t + wait}
        )
        out.append(span | {"t": t + took, "name": "train", "t0": t + wait, "t1": t + took, "step": step})
        outcomes = {"finished": 200, "truncated": 56}
        out.append({"role": "orchestrator", "kind": "step", "t": t + took - 0.1, "step": step, "outcomes": outcomes})
        t += took
        out.append({"role": "trainer", "kind": "step", "t": t, "step": step, "mismatch_kl_own": 1e-4})
    out.append({"role": "inference-0", "kind": "span", "t": t, "name": "wait", "what": "requests", "t0": T0, "t1": t})
    return out


def test_warm_up_and_end_are_left_out() -> None:
    s = settled(History(records(12, ending=3)), warmup=2, cooldown=3)
    assert (s.first, s.last, s.steps) == (2, 9, 7)
    assert s.seconds == pytest.approx(7 * STEP)
    assert s.steps_per_s == pytest.approx(1 / STEP)
    assert s.step_s == pytest.approx([STEP] * 7)
    assert [r["step"] for r in s.records] == [3, 4, 5, 6, 7, 8, 9]


def test_rollouts_are_counted_over_the_same_steps() -> None:
    s = settled(History(records(12, ending=3)), warmup=2, cooldown=3)
    assert s.generated_per_s == pytest.approx(256 / STEP)


def test_waits_are_cut_at_the_window_and_summed_by_what_was_waited_for() -> None:
    s = settled(History(records(12, ending=3)), warmup=2, cooldown=3)
    assert s.waited["trainer"] == pytest.approx({"batch n from the orchestrator": 7 * 0.25 * STEP})
    assert s.waited["inference-0"] == pytest.approx({"requests": 7 * STEP})
    assert s.trainer_s == pytest.approx({"train": 7 * 0.75 * STEP})


@pytest.mark.parametrize("warmup, cooldown", [(5, 3), (9, 0), (3, 5)])
def test_a_run_too_short_to_measure_is_an_error(warmup: int, cooldown: int) -> None:
    with pytest.raises(BenchError, match="records of 8 steps"):
        settled(History(records(8, ending=0)), warmup=warmup, cooldown=cooldown)


def test_a_step_without_its_record_is_an_error_that_names_it() -> None:
    there = [r for r in records(8, ending=0) if not (r["kind"] == "step" and r["step"] == 5)]
    with pytest.raises(BenchError, match="step 5 is missing"):
        settled(History(there), warmup=2, cooldown=1)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_command_that_ends_gives_its_output_and_is_polled() -> None:
    polls: list[float] = []
    done = watch(
        "it", python("import time; time.sleep(0.5); print('said')"), timeout_s=20, poll=lambda: polls.append(time.time())
    )
    assert done.stdout == "said\n" and done.wall_s >= 0.5
    assert len(polls) >= 2


def test_a_command_that_fails_is_named_with_its_last_words() -> None:
    with pytest.raises(BenchError, match=r"run 3: .* exit code 5\nthe reason"):
        watch("run 3", python("import sys; print('the reason', file=sys.stderr); sys.exit(5)"), timeout_s=20)


def test_a_command_that_hangs_is_ended(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    with pytest.raises(BenchError, match="not done within 1.5 s"):
        watch("it", python(code), timeout_s=1.5)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_command_does_not_outlive_a_fault_of_the_bench(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"

    def poll() -> None:
        if pid.exists() and pid.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watch("it", python(code), timeout_s=20, poll=poll)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
