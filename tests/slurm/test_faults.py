"""The fault matrix: a run goes through a fault and still trains every step once, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm.lab import Lab, until
from tests.slurm.runs import ROOT, Run, measured

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]


def test_kill_9_of_each_process_that_the_run_cannot_do_without(lab: Lab, tmp_path: Path) -> None:
    """Each of them has the job run again, under its id, from the last checkpoint."""
    run = Run(lab, tmp_path, "trainer.steps=16")
    for step, who in ((3, "orchestrator"), (7, "trainer-1"), (11, "lead")):
        run.until_step(step)
        run.ends_in_a_resume(f"kill -9 of {who}", lambda who=who: os.kill(run.pid(who), signal.SIGKILL))  # type: ignore[misc]
    assert run.code() == 0, run.told()
    run.assert_nothing_left()
    run.assert_whole(16)
    assert json.loads((run.dir / "result.json").read_text())["restarts"] == 3
    causes = [failure["cause"] for failure in json.loads((run.dir / "failures.json").read_text())]
    assert [cause.split()[2] for cause in causes] == ["orchestrator", "trainer-1"]
    assert "component trainer was killed (exit code 137)" in run.told()


FAKES = """import sys
if any("prl.launch.slurm.component" in word for word in sys.orig_argv):
    import prl.rl
    from tests.launch import fakes
    prl.rl.role_specs = fakes.specs
"""


def test_what_slurm_ends_or_warns_of_comes_back_by_itself(lab: Lab, tmp_path: Path) -> None:
    """Preemption by a higher partition, the time limit, requeue, scancel of the inference component; and a cut cable.

    Supervisor, steps and signals are the real ones, the roles have no model (tests/launch/fakes.py).
    """
    (tmp_path / "sitecustomize.py").write_text(FAKES)
    scavenge = [f"launch.slurm.{part}.partition=scavenge" for part in ("trainer", "inference")]
    run = Run(lab, tmp_path, *scavenge, "launch.slurm.warn_s=55", env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    roles = ("trainer", "trainer-1", "orchestrator", "inference-0", "inference-1")

    def fault(name: str, act: Callable[[], object]) -> None:
        run.until_ready(*roles)
        lives, restarts, began = run.lives(), run.restarts(), time.time()
        act()
        run.until_restart(restarts, 150)
        ended = time.time() - began
        until("the next life", lambda: run.lives() > lives, 60)
        again = time.time() - began
        run.until_ready(*roles)
        measured(f"{name} (roles without a model)", ended_s=ended, again_s=again, ready_s=time.time() - began)

    seven = ("sbatch", "--partition=all", "--nodelist=train1", "--cpus-per-task=7", "--mem=100", "--output=/dev/null")
    fault("preemption", lambda: lab.run(*seven, "--wrap=sleep 3"))
    fault("time limit, from its being set", run.reach_the_time_limit)
    fault("requeue by an administrator", lambda: lab.run("scontrol", "requeue", run.job))
    fault("scancel of the inference component", lambda: lab.run("scancel", f"{run.job}+1"))
    told = len(run.replica_restarts())
    node = run.told().rpartition(", inference on ")[2].split()[1]
    began = time.time()
    lab.cut(node)
    until("the restart of inference-1", lambda: len(run.replica_restarts()) > told, 30)
    lab.heal(node)
    restart = run.replica_restarts()[-1]
    assert restart["of"] == "inference-1" and restart["t"] - began < 15, restart
    run.until_ready(*roles)
    measured(
        "cable of a replica's node cut (roles without a model)", noticed_s=restart["t"] - began, serves_s=time.time() - began
    )

    lab.run("scancel", run.job)
    run.code()
    run.assert_nothing_left()
    result = json.loads((run.dir / "result.json").read_text())
    assert (result["code"], result["cause"], result["restarts"]) == (75, "stop requested", 4)
    failures = json.loads((run.dir / "failures.json").read_text())
    assert [f["cause"].partition(" at ")[0] for f in failures][:2] == ["preempted", "its time was up"]
    assert len(failures) == 3, "a requeue is nobody's failure"


def test_replicas_and_daemons_come_and_go(lab: Lab, tmp_path: Path) -> None:
    """The run goes on with the other replica: in place the first time, on the other one's node the second.

    The node comes back only after Slurm has noticed its death, which must not end the job. Without any replica it is run again.
    """
    run = Run(lab, tmp_path, "trainer.steps=200")
    run.until_step(3)
    run.ends_in_a_restart("kill -9 of inference-0", "inference-0", lambda: os.kill(run.pid("inference-0"), signal.SIGKILL))
    assert run.node("inference-0") == "infer0"
    before = run.step()
    run.ends_in_a_restart("power-off of inference-1's node", "inference-1", lambda: lab.power_off("infer1"))
    assert run.node("inference-1") == "infer0" and before < run.step()
    until("Slurm to notice", lambda: lab.states()["infer1"].startswith("down"), 60)
    lab.boot("infer1")

    lab.stop_slurmd("infer0")
    lab.stop_slurmd("train1")
    lab.stop_slurmctld()
    lab.start_slurmctld()
    lab.start_slurmd("train1")
    lab.start_slurmd("infer0")
    run.until_step(run.step() + 3)
    assert run.restarts() == 0 and len(run.replica_restarts()) == 2

    run.ends_in_a_resume("scancel of the inference component", lambda: lab.run("scancel", f"{run.job}+1"))
    until("both replicas", lambda: run.serves("inference-0") and run.serves("inference-1"), 60)
    told = len(run.replica_restarts())
    run.ends_in_a_restart("cable of inference-1's node cut", "inference-1", lambda: lab.cut("infer1"))
    assert run.node("inference-1") == "infer0"
    lab.heal("infer1")

    assert run.code() == 0, run.told()
    run.assert_nothing_left(60)
    run.assert_whole(200)
    assert len(run.replica_restarts()) == told + 1
    assert json.loads((run.dir / "result.json").read_text())["restarts"] == 1


def test_a_full_disk(lab: Lab, tmp_path: Path) -> None:
    """The job waits for space and is run again."""
    run = Run(lab, lab.root / "small", "trainer.steps=12", log=tmp_path)
    run.until_step(4)
    filler = lab.seen(lab.root / "small") / "filler"

    def fill() -> bool:
        """Also what the run's end frees."""
        with filler.open("ab", 0) as f, pytest.raises(OSError, match="No space"):
            while True:
                f.write(bytes(1 << 12))
        return not lab.processes("train1", str(run.root))

    until("the end of the roles", fill, 120)
    time.sleep(3)
    assert fill() and run.restarts() == 0 and run.pid("lead")
    run.ends_in_a_resume("full disk (from its end)", filler.unlink)
    assert run.code() == 0, run.told()
    run.assert_nothing_left()
    run.assert_whole(12)


@pytest.mark.parametrize("node", ["train1", "train0"])
def test_a_trainer_node_loses_power(lab: Lab, tmp_path: Path, node: str) -> None:
    """The job waits for a node that it can have instead, or for this one, and goes on from the last checkpoint.

    train0 is the batch host, whose supervisor is gone too: the tasks of the other nodes have the job run again.
    """
    run = Run(lab, tmp_path, "trainer.steps=12", "launch.heartbeat_timeout_s=15")
    run.until_step(4)

    def off() -> None:
        lab.power_off(node)
        run.until_restart(0)
        lab.boot(node)

    run.ends_in_a_resume(f"power-off of {'the batch host' if node == 'train0' else 'a trainer node'}", off)
    assert run.code() == 0, run.told()
    run.assert_nothing_left(60)
    run.assert_whole(12)


def test_the_warning_of_the_time_limit(lab: Lab, tmp_path: Path) -> None:
    """The run saves and comes back by itself, at the step that it had reached."""
    run = Run(lab, tmp_path, "trainer.steps=12")
    run.until_step(4)
    # As `--signal=B:USR2@…` has Slurm do.
    run.ends_in_a_resume("warning", lambda: lab.run("scancel", "--batch", "--signal=USR2", run.job))
    assert run.code() == 0, run.told()
    run.assert_nothing_left()
    run.assert_whole(12)
    (failure,) = json.loads((run.dir / "failures.json").read_text())
    resume = next(entry for entry in run.entries() if entry["kind"] == "resume")
    assert failure["limit"] and resume["step"] == failure["step"], "no step is lost"
