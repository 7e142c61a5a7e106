"""Replicas of other jobs: whatever becomes of them, the run's other replicas serve on and nothing waits for them."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from prl.config.load import dump, load
from prl.config.schema import Component
from prl.inference.client import run_replicas
from prl.launch.guests import Guests
from prl.launch.local import RoleSpec
from prl.launch.slurm import guests
from prl.launch.slurm.guests import Host, job_for, reserve
from prl.launch.slurm.script import submission
from prl.transport.run_dir import RunDir
from tests.slurm.test_script import check

CONFIG = load("configs/slurm_tiny.yaml", site="configs/site/lab.yaml")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run").create()


def announce(run: RunDir, name: str, t: float = 1.0, port: int = 1) -> None:
    run.announce(name, host="127.0.0.1", port=port)
    (run / "status" / f"{name}.json").write_bytes(orjson.dumps({"t": t, "host": "n7", "phase": "serving"}))


def test_the_job_of_replicas_is_pinned() -> None:
    slurm = CONFIG.launch.slurm
    assert slurm is not None
    scavenge = slurm.model_copy(update={"inference": Component(nodes=2, partition="scavenge", gpus_per_node=4)})
    job = job_for(RunDir("/runs/first"), CONFIG, scavenge, 3)
    assert job.log == Path("/runs/first/logs/slurm-guests.log")
    text = submission(job).replace(str(Path.cwd()), "/prl")
    directives = [line for line in text.splitlines() if line.startswith("#")]
    check("guests.sh", "\n".join(directives) + "\n")
    assert "--no-kill" not in submission(job_for(RunDir("/runs/first"), CONFIG, scavenge, 1)), "Slurm has it run again"
    assert "hetjob" not in text and job.components[0].batch_host


def test_numbers_are_one_jobs_own(run: RunDir) -> None:
    assert reserve(run, 2, 2, "70") == [2, 3]
    assert reserve(run, 2, 1, "71") == [4]
    assert reserve(run, 2, 2, "70") == [2, 3], "a job that is run again has its own"


def test_guests_come_and_go_before_the_runs_own(run: RunDir) -> None:
    replicas = run_replicas(run, 2, period_s=0.0)
    for name in ("inference-1", "inference-0", "inference-3"):
        announce(run, name)
    names = [r.name for r in replicas()]
    assert names == ["inference-3", "inference-0", "inference-1"], "the long work of the last one is not a guest's"
    run.forget_roles(["inference-3"])
    assert [r.name for r in replicas()] == ["inference-0", "inference-1"]


@pytest.fixture
def port() -> Iterator[int]:
    """Where connections are taken."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


def test_a_silent_guest_is_given_up_and_the_runs_own_is_not(run: RunDir, port: int) -> None:
    said: list[str] = []
    watch = Guests(run, 15.0, said.append)
    own = ["inference-0", "trainer"]
    announce(run, "inference-0", port=port)
    announce(run, "inference-2", port=port)
    announce(run, "inference-3", port=port)

    def look(*times: float) -> None:
        for now in times:
            watch.look(own, now)
            time.sleep(0.01)

    look(100.0)
    announce(run, "inference-2", t=2.0, port=port)
    look(110.0, 110.5)
    run.forget_roles(["inference-3"])
    look(118.0, 118.5, 124.0)
    assert said == ["inference-2 on n7 has joined", "inference-3 on n7 has joined", "inference-3 has left"]
    assert run.address("inference-2") is not None
    look(126.0)
    assert run.address("inference-2") is None and "shows no sign of life for 15 s" in said[-1]
    assert run.address("inference-0") is not None
    look(127.0)
    announce(run, "inference-2", t=3.0, port=port)
    look(128.0)
    assert said[-1] == "inference-2 on n7 has joined"
    watch.close()


def test_a_guest_that_takes_no_connection_is_given_up_though_its_file_is_renewed(run: RunDir, port: int) -> None:
    said: list[str] = []
    watch = Guests(run, 15.0, said.append)
    for second in range(0, 20):
        announce(run, "inference-2", t=float(second), port=port)
        announce(run, "inference-3", t=float(second), port=1)
        watch.look([], float(second))
        time.sleep(0.005)
        if run.address("inference-3") is None:
            break
    assert second == 16 and said[2:] == ["inference-3 takes no connection for 15 s: the run goes on without it"]
    assert run.address("inference-2") is not None
    watch.close()


class Roles:
    """An executor whose roles announce themselves at once."""

    def __init__(self, run: RunDir):
        self.run, self.log, self.ends = run, list[str](), dict[str, int]()
        self.alive: set[str] = set()

    def start(self, specs: Sequence[RoleSpec]) -> None:
        for spec in specs:
            self.log.append(f"start {spec.name}")
            self.alive.add(spec.name)
            announce(self.run, spec.name)

    def poll(self) -> dict[str, int]:
        ended, self.ends = self.ends, {}
        self.alive -= ended.keys()
        return ended

    def end(self, names: Sequence[str]) -> None:
        self.log += [f"end {name}" for name in names]
        self.alive -= set(names)

    def signal(self, names: Sequence[str], number: int) -> None:
        self.log += [f"signal {name}" for name in names]
        self.ends = dict.fromkeys(names, 0)

    def close(self) -> None:
        self.alive.clear()


class Played:
    """A `Host` whose time passes by its own sleeps, with a script: time to what happens then."""

    def __init__(self, run: RunDir, monkeypatch: pytest.MonkeyPatch, script: dict[float, Any], *, there: bool = True):
        self.now, self.script, self.roles, self.stops = 0.0, script, Roles(run), 0
        self.supervised = ("rl", "running")
        self.run = run
        monkeypatch.setattr(guests.time, "sleep", self.sleep)
        self.sleep(0.0)
        host = Host(run, CONFIG, self.roles, [2, 3], stops=lambda: self.stops, there=lambda: there, clock=lambda: self.now)  # type: ignore[arg-type]
        self.code = host.serve()

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for at in [at for at in self.script if at <= self.now]:
            self.script.pop(at)(self)
        if self.supervised:
            stage, phase = self.supervised
            self.run.record_supervisor(t=self.now, stage=stage, phase=phase, lost=[])
        assert self.now < 300, "it goes on for ever"


def stop(play: Played) -> None:
    play.stops = 1


def done(play: Played) -> None:
    (play.run / "result.json").write_text("{}")


def test_they_serve_until_they_are_asked_to_end(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    play = Played(run, monkeypatch, {4.0: lambda p: seen.append(run.address("inference-2") is not None), 5.0: stop})
    assert play.code == 0 and seen == [True]
    assert play.roles.log == ["start inference-2", "start inference-3", "signal inference-2", "signal inference-3"]
    assert run.address("inference-2") is None and run.address("inference-3") is None


def test_they_end_with_the_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Played(run, monkeypatch, {5.0: done}).code == 0
    assert run.address("inference-2") is None


def test_they_wait_between_two_lives_of_the_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(play: Played) -> None:
        play.supervised = None

    def lives(play: Played) -> None:
        play.supervised = ("rl", "starting")

    play = Played(run, monkeypatch, {5.0: dies, 60.0: lives, 70.0: done})
    assert play.code == 0
    assert [line for line in play.roles.log if "inference-2" in line] == [
        "start inference-2",
        "end inference-2",
        "start inference-2",
        "signal inference-2",
    ]


def test_they_end_when_the_runs_job_is_gone(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(play: Played) -> None:
        play.supervised = None

    assert Played(run, monkeypatch, {5.0: dies}, there=False).code == 0


def test_one_that_was_given_up_begins_anew(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    play = Played(run, monkeypatch, {5.0: lambda p: run.forget_roles(["inference-3"]), 9.0: stop})
    assert play.roles.log[2:4] == ["end inference-3", "start inference-3"]


def test_one_that_ends_is_started_again_but_not_for_ever(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(play: Played) -> None:
        play.roles.ends = dict.fromkeys(play.roles.alive, 1)
        play.script[play.now + 1.0] = fails

    play = Played(run, monkeypatch, {2.0: fails})
    assert play.code == 1
    assert play.roles.log.count("start inference-2") == guests.TRIES
    assert play.now > guests.BACK_OFF_S * 10, "with a back-off"


def test_a_run_without_rl_needs_none(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def warm_start(play: Played) -> None:
        play.supervised = ("sft", "running")

    play = Played(run, monkeypatch, {0.0: warm_start, 9.0: stop})
    assert play.roles.log == []
    run.record_stage("rl", 1.0, done=True)
    play = Played(run, monkeypatch, {})
    assert play.code == 0


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("RUNNING|45:10", True),
        ("RUNNING|1-00:00:00", True),
        ("RUNNING|UNLIMITED", True),
        ("RUNNING|0:25", False),
        ("COMPLETING|45:10", False),
        ("", False),
    ],
)
def test_what_was_not_cancelled_and_has_time_left_was_preempted(
    told: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guests, "ask", lambda *words: told + "\n")
    assert guests.preempted("7") is expected


LOCK_STEP = ("run.deterministic=true", "orchestrator.synchronous=true", "inference.prefix_cache=false")


@pytest.mark.parametrize(
    ("overrides", "words"), [(LOCK_STEP, "deterministic mode"), ((), "has ended; continue it with --resume")]
)
def test_what_cannot_take_replicas_is_told(
    run: RunDir, overrides: Sequence[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run.config_path.write_text(dump(load("configs/slurm_tiny.yaml", overrides, site="configs/site/lab.yaml")))
    (run / "job.json").write_text('{"job": "7"}')
    (run / "result.json").write_text('{"code": 0}')
    assert guests.main([str(run.root), "-n", "1"]) == 1
    assert words in capsys.readouterr().err
