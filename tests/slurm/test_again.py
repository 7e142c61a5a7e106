"""A run that failed is tried again, ever later, not for ever, and not where it fails the same way each time."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from prl.launch.slurm import lead
from prl.launch.slurm.again import FIRST_S, LONGEST_S, WAITS, Failure, again, avoided, remembered
from prl.rl import FULL
from prl.transport.run_dir import RunDir


def test_later_each_time_and_not_for_ever() -> None:
    failures = [Failure(step, "trainer was killed by SIGKILL") for step in range(20)]
    waits = [again(failures[: n + 1], 20) for n in range(20)]
    assert waits[:3] == [FIRST_S] * 3, "it gets further each time"
    assert waits[19] == "failed 20 times (launch.slurm.tries)"
    here = [Failure(3, f"in way {n}") for n in range(20)]
    waits = [again(here[: n + 1], 20) for n in range(19)]
    assert waits[:3] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S] and waits[18] == LONGEST_S


def test_the_same_failure_at_the_same_step_is_the_last() -> None:
    oom, lost = Failure(3, "trainer ended with exit code 1"), Failure(3, "trainer-1 was killed by SIGKILL")
    assert again([oom, oom], 5) == "ended twice at step 3 in the same way"
    assert again([oom, lost, oom], 5) == 4 * FIRST_S, "another cause between them"
    assert again([oom, Failure(4, oom.cause)], 5) == FIRST_S, "it has got further"


def test_a_node_that_is_gone_is_no_failure_of_the_run() -> None:
    gone, missing = Failure(3, "trainer-1 hangs", lost=("train1",)), Failure(3, "does not answer", missing=("train1",))
    oom = Failure(3, "trainer ended with exit code 1")
    assert again([gone, *[missing] * 20], 2) == LONGEST_S
    assert again([oom, missing, missing], 2) == 4 * FIRST_S
    assert again([oom, missing, missing, oom], 2) == "failed 2 times (launch.slurm.tries)"
    assert again([missing] * WAITS, 2) == f"failed {WAITS} times at step 3, for want of nodes that answer"
    assert again([*[missing] * WAITS, Failure(4, "", lost=("train0",))], 2) == FIRST_S, "it has got further"


def test_a_time_limit_is_no_failure_as_long_as_the_run_gets_further() -> None:
    ends = [Failure(step, "its time was up", limit=True) for step in range(20)]
    assert [again(ends[: n + 1], 2) for n in range(20)] == [0.0] * 20
    assert again([*ends, ends[-1]], 2) == "ended twice at step 19 in the same way"


def test_a_node_that_is_lost_in_two_lives_is_avoided() -> None:
    gone, missing = Failure(3, "trainer-1 hangs", lost=("train1", "train0")), Failure(3, "", missing=("train1",))
    assert avoided([gone, *[missing] * 20]) == frozenset()
    assert avoided([gone, missing, Failure(5, "", lost=("train1",))]) == {"train1"}


def test_preemption_is_none_wherever_it_comes() -> None:
    ends = [Failure(3, f"preempted at 2026-12-01T04:39:{n}", limit=True) for n in range(20)]
    assert [again(ends[: n + 1], 2) for n in range(20)] == [0.0] * 20


def test_a_full_disk_is_waited_for_until_it_has_room_for_a_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_2").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_2" / "weights").write_bytes(bytes(1000))
    free = iter([0, FULL + 999, FULL + 1000, 0])
    monkeypatch.setattr(lead.shutil, "disk_usage", lambda path: SimpleNamespace(free=next(free)))
    monkeypatch.setattr(lead.time, "sleep", lambda seconds: None)
    assert lead.room(RunDir(tmp_path)) and next(free) == 0
    monkeypatch.setattr(lead.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    monkeypatch.setattr(lead, "ROOM_S", 0.1)
    assert not lead.room(RunDir(tmp_path)), "not for ever"


def test_failures_are_remembered(tmp_path: Path) -> None:
    path = tmp_path / "failures.json"
    assert remembered(path) == []
    path.write_bytes(msgspec.json.encode([Failure(3, "why")]))
    assert remembered(path) == [Failure(3, "why")]
