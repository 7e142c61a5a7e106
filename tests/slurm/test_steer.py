"""Looking at runs on the local cluster, ending them, and adding replicas to them: --status, --attach, --stop, add-replicas.

Most runs here have fake roles, which start at once; everything else about them is real.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prl.transport.run_dir import RunDir
from tests.slurm.lab import Lab, clean, until
from tests.slurm.runs import ROOT, SITE, Run

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]
FAKES = (sys.executable, "-m", "tests.slurm.fakes")
ENV = clean() | {"PYTHONPATH": str(ROOT)}


def launch(lab: Lab, *words: str, node: str = "head") -> subprocess.CompletedProcess[str]:
    """prl.launch with real roles, or on a run that has begun."""
    return lab.run(sys.executable, "-m", "prl.launch", *words, node=node, cwd=ROOT, env=ENV, check=False)


class Faked:
    """A run with fake roles; `roles` says what they do beside serving and working."""

    def __init__(self, lab: Lab, folder: Path, *overrides: str, name: str = "run", **roles: str):
        self.lab, self.dir, self.log = lab, RunDir(folder / name), folder / f"{name}.follower.log"
        self.env = ENV | {f"PRL_FAKE_{role.upper()}": what for role, what in roles.items()}
        given = ("configs/slurm_tiny.yaml", "--site", SITE, f"run.dir={folder}", f"run.name={name}", *overrides)
        with self.log.open("w") as log:
            words = lab.command(*FAKES, "prl.launch.__main__", *given, cwd=ROOT)
            self.follower = subprocess.Popen(words, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        until(f"the job of {self.dir.root} ({self.log})", lambda: (self.dir / "job.json").exists(), 30)
        self.job = str(json.loads((self.dir / "job.json").read_text())["job"])

    def until_running(self) -> None:
        def runs() -> bool:
            assert self.follower.poll() is None, self.log.read_text()
            return (self.dir.read_supervisor() or {}).get("phase") == "running"

        until(f"a running {self.dir.root} ({self.log})", runs, 60)

    def add(self, count: int, *words: str) -> str:
        """Fake replicas of another job; its number."""
        command = (*FAKES, "prl.launch.slurm.guests", str(self.dir.root), "-n", str(count), *words)
        return self.lab.run(*command, cwd=ROOT, env=self.env).stderr.split()[1]

    def guests(self) -> list[tuple[str, str]]:
        """What the supervisor has said of guests."""
        return said(self.dir)

    def code(self, timeout_s: float = 60) -> int:
        return self.follower.wait(timeout_s)

    def assert_nothing_left(self, seconds: float = 30) -> None:
        def idle() -> bool:
            running = [pid for node in self.lab.nodes for pid in self.lab.processes(node, str(self.dir.root))]
            return not running and set(self.lab.states().values()) == {"idle"}

        until(f"idle nodes after {self.dir.root}", idle, seconds)
        assert not (self.dir / "steps").exists() and not list((self.dir.root / "guests").glob("*"))


@contextmanager
def apart(lab: Lab) -> Iterator[None]:
    """Nothing new begins on infer0, where the run's own replica is."""
    lab.run("scontrol", "update", "NodeName=infer0", "State=DRAIN", "Reason=test")
    try:
        yield
    finally:
        lab.run("scontrol", "update", "NodeName=infer0", "State=RESUME")


def said(run: RunDir) -> list[tuple[str, str]]:
    path = run / "metrics.jsonl"
    records = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [(r["name"], r["of"]) for r in records if r.get("name") in ("join", "leave", "give_up")]


def test_a_run_is_looked_at_followed_and_stopped(lab: Lab, tmp_path: Path) -> None:
    """Stopped by a first request: it saves and ends with 75, and is not run again."""
    run = Faked(lab, tmp_path)
    run.until_running()
    shown = launch(lab, "--status", str(run.dir.root), node="infer1").stdout
    assert f"{run.job}+0 running, {run.job}+1 running" in shown
    assert "phase  rl running for" in shown and "supervisor on train0: alive" in shown and "step   none of 10 yet" in shown
    rows = [line.split() for line in shown.partition("\nrole ")[2].splitlines()[1:]]
    assert {row[0]: row[1] for row in rows} == {
        "trainer": "train0",
        "trainer-1": "train1",
        "orchestrator": "train0",
        "inference-0": "infer0",
        "inference-1": "infer1",
    }
    (follower,) = lab.processes("head", "tests.slurm.fakes\0prl.launch")
    os.kill(follower, signal.SIGINT)
    assert run.code() == 0 and f"job {run.job} goes on" in run.log.read_text()
    words = lab.command(sys.executable, "-m", "prl.launch", "--attach", str(run.dir.root), cwd=ROOT)
    attached = subprocess.Popen(words, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    asked = launch(lab, "--stop", str(run.dir.root))
    assert asked.returncode == 0 and "ask again to end it at once" in asked.stderr
    told, _ = attached.communicate(timeout=60)
    assert attached.returncode == 75, told
    assert "saved before the run was done" in told and "a stop was asked for" in told
    run.assert_nothing_left()
    assert "Restarts=0" in lab.run("scontrol", "show", "job", run.job).stdout
    assert (run.dir / "saved-trainer").exists() and (run.dir / "saved-trainer-1").exists()
    shown = launch(lab, "--status", str(run.dir.root)).stdout
    assert "ended  exit code 75" in shown and "ended" in next(x for x in shown.splitlines() if x.startswith("trainer "))
    again = launch(lab, "--stop", str(run.dir.root))
    assert again.returncode == 1 and "has ended already" in again.stderr


def test_a_second_stop_ends_a_run_at_once(lab: Lab, tmp_path: Path) -> None:
    run = Faked(lab, tmp_path, "launch.save_timeout_s=100", trainer="deaf")
    run.until_running()
    assert launch(lab, "--stop", str(run.dir.root)).returncode == 0
    until("saving", lambda: (run.dir.read_supervisor() or {})["phase"] == "saving", 20)
    shown = launch(lab, "--status", str(run.dir.root)).stdout
    assert "stop   asked for" in shown and "trainer to save and end (at most 100 s)" in shown
    assert launch(lab, "--stop", str(run.dir.root)).returncode == 0
    assert run.code(20) == 75, run.log.read_text()
    run.assert_nothing_left()


def test_a_job_that_waits_or_is_between_two_lives_is_stopped(lab: Lab, tmp_path: Path) -> None:
    lab.run("scontrol", "update", "NodeName=infer[0-1]", "State=DRAIN", "Reason=test")
    try:
        run = Faked(lab, tmp_path)
        until("a pending job", lambda: "pending" in run.log.read_text(), 20)
        assert "phase  not begun" in launch(lab, "--status", str(run.dir.root)).stdout
        assert launch(lab, "--stop", str(run.dir.root)).returncode == 0
    finally:
        lab.run("scontrol", "update", "NodeName=infer[0-1]", "State=RESUME")
    assert run.code() == 75, run.log.read_text()
    run.assert_nothing_left()


def test_scancel_saves_too_and_nothing_comes_back(lab: Lab, tmp_path: Path) -> None:
    run = Faked(lab, tmp_path)
    run.until_running()
    lab.run("scancel", run.job)
    assert run.code() in (1, 75), run.log.read_text()
    assert (run.dir / "saved-trainer").exists()
    run.assert_nothing_left()
    assert "Restarts=0" in lab.run("scontrol", "show", "job", run.job).stdout


def test_the_last_lines_of_what_failed_are_shown(lab: Lab, tmp_path: Path) -> None:
    run = Faked(lab, tmp_path, "launch.slurm.tries=1", orchestrator="crash")
    assert run.code() == 1, run.log.read_text()
    shown = launch(lab, "--status", str(run.dir.root)).stdout
    assert "ended  exit code 1: stage rl: orchestrator ended with exit code 3" in shown
    assert "life 1 ended after step 0" in shown
    at = shown.index("lost   orchestrator")
    assert "the reason of the crash" in shown[at:]


def test_guests_come_and_go_and_are_lost(lab: Lab, tmp_path: Path) -> None:
    """Cancelled, preempted, cut off and without power; the run goes on with its own replica."""
    only = ("inference.replicas=1", "launch.slurm.inference.nodes=1", "launch.replica_heartbeat_s=4")
    run = Faked(lab, tmp_path, *only)
    run.until_running()
    job = run.add(2, "--partition", "scavenge")
    until("two guests", lambda: len(run.guests()) == 2, 60)
    assert set(run.guests()) == {("join", "inference-1"), ("join", "inference-2")}
    shown = launch(lab, "--status", str(run.dir.root)).stdout
    assert len([line for line in shown.splitlines() if line.startswith("inference-") and "running" in line]) == 3
    lab.run("scancel", job)
    until("their leave", lambda: len(run.guests()) == 4, 30)
    assert {what for what, _ in run.guests()[2:]} == {"leave"}

    job = run.add(1, "--partition", "scavenge")
    until("a guest", lambda: run.guests()[4:] == [("join", "inference-1")], 60)
    node = lab.run("squeue", "-h", "-j", job, "-o", "%N").stdout.strip()
    cpus = str(lab.cpus if node == "infer1" else lab.cpus - 2)  # beside the run's own roles
    other = lab.run("sbatch", "--parsable", "-p", "all", "-w", node, "-c", cpus, "-o", "/dev/null", "--wrap", "sleep 5")
    until("its preemption", lambda: run.guests()[5:] == [("leave", "inference-1")], 30)
    until("its return", lambda: run.guests()[6:] == [("join", "inference-1")], 90)
    assert other.stdout.strip() not in lab.run("squeue", "-h", "-o", "%A").stdout

    lab.run("scancel", job)
    until("its leave", lambda: run.guests()[7:] == [("leave", "inference-1")], 30)

    with apart(lab):
        run.add(1, "--partition", "infer")
        until("a guest", lambda: run.guests()[8:] == [("join", "inference-1")], 60)
        lab.cut("infer1")
        until("its silence", lambda: run.guests()[9:10] == [("give_up", "inference-1")], 30)
        lab.power_off("infer1")
        lab.boot("infer1")
        until("its return", lambda: ("join", "inference-1") in run.guests()[10:], 120)
    assert run.follower.poll() is None and (run.dir.read_supervisor() or {})["phase"] == "running"
    launch(lab, "--stop", str(run.dir.root))
    assert run.code() == 75, run.log.read_text()
    run.assert_nothing_left(60)
    assert launch(lab, "add-replicas", str(run.dir.root), "-n", "1").returncode == 1


def test_a_guest_serves_a_real_run(lab: Lab, tmp_path: Path) -> None:
    """It takes requests at the weights of the run, its node loses power, and every step is trained once."""
    run = Run(lab, tmp_path, "trainer.steps=100", "inference.replicas=1", "launch.slurm.inference.nodes=1")
    run.until_step(2)
    ports = [json.loads(path.read_text())["port"] for path in (run.dir / "rendezvous").iterdir()]
    assert len(ports) == 3 and all(20_000 <= port < 30_000 for port in ports)
    with apart(lab):
        added = launch(lab, "add-replicas", str(run.dir.root), "-n", "1", "--partition", "infer")
        assert added.returncode == 0, added.stderr
        until("a guest", lambda: run.serves("inference-1"), 120)
    assert run.node("inference-1") == "infer1"

    def engines() -> dict[str, int]:
        records = map(json.loads, (run.dir / "metrics.jsonl").read_text().splitlines())
        return {r["role"]: r["generated"] for r in records if r["kind"] == "engine"}

    until("its work", lambda: engines().get("inference-1", 0) > 0, 60)
    lab.power_off("infer1")
    until("its end noticed", lambda: ("give_up", "inference-1") in said(run.dir), 45)
    before = run.step()
    run.until_step(before + 2)
    lab.mend()
    assert run.code() == 0, run.told()
    run.assert_whole(100)
    assert run.restarts() == 0 and not run.replica_restarts()
    run.assert_nothing_left(60)
