"""Whether other work uses the machine: from made-up clocks, and with a process that does use it."""

import subprocess
import sys
import time

import pytest

from prl.bench.machine import MAX_OTHERS, MAX_SPREAD, CpuTimes, Load, facts, reasons, share_of_others, spread

QUIET = Load(others=0.01, spread=0.05)


def test_a_quiet_machine_gives_no_reason() -> None:
    assert reasons(QUIET, [("run 1", 0.02), ("run 2", 0.0)]) == []
    assert reasons(Load(MAX_OTHERS, MAX_SPREAD), [("run 1", MAX_OTHERS)]) == []


def test_each_kind_of_load_is_a_reason_that_names_it() -> None:
    (before,) = reasons(Load(0.4, 0.05))
    assert "before the runs others used 40%" in before
    (uneven,) = reasons(Load(0.01, 0.9))
    assert "varies by 90%" in uneven
    (during,) = reasons(QUIET, [("run 1", 0.3), ("run 2", 0.0), ("run 3", 0.5)])
    assert "during 2 of 3 runs" in during and "most in run 3: 50%" in during


def test_what_could_not_be_told_counts_as_loaded() -> None:
    nan = float("nan")
    assert len(reasons(Load(nan, nan), [("run 1", nan)])) == 3


def test_the_share_of_others_leaves_out_ours_and_idle_time() -> None:
    before = CpuTimes(total=100, busy=50, own=10)
    assert share_of_others(before, CpuTimes(total=120, busy=65, own=20)) == pytest.approx(0.25)
    assert share_of_others(before, CpuTimes(total=120, busy=60, own=20)) == 0
    assert share_of_others(before, CpuTimes(total=120, busy=50, own=10)) == 0
    clocks_that_stand_still = share_of_others(before, before)
    assert clocks_that_stand_still != clocks_that_stand_still


def test_the_spread_is_of_the_bulk_not_of_one_outlier() -> None:
    assert spread([1.0] * 50) == 0
    assert spread([1.0] * 99 + [50.0]) < MAX_SPREAD
    assert spread([1.0] * 30 + [1.5] * 20) > MAX_SPREAD


def test_work_of_a_child_that_was_waited_for_is_ours() -> None:
    before = CpuTimes.now()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.6: pass"], check=True)
    after = CpuTimes.now()
    assert after.own - before.own >= 0.55


def test_work_of_a_process_that_still_runs_is_not() -> None:
    other = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        other.stdout.readline()
        before = CpuTimes.now()
        time.sleep(1.0)
        after = CpuTimes.now()
    finally:
        other.kill()
        other.wait()
    # One core's worth, less what the machine gave to others than these two.
    assert (after.busy - before.busy) - (after.own - before.own) > 0.2


def test_facts_name_what_a_figure_depends_on() -> None:
    found = facts()
    assert found["cores"] >= 1 and found["memory_gb"] > 0
    assert found["cpu"] and found["python"]
    assert set(found["versions"]) >= {"torch", "transformers"}
    assert found["commit"] is None or len(found["commit"].rstrip("+")) == 40
