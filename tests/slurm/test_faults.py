"""The fault matrix: a run goes through a fault and still trains every step once, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.slurm.lab import Lab, until
from tests.slurm.runs import Run

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]


def test_kill_9_of_each_process_that_the_run_cannot_do_without(lab: Lab, tmp_path: Path) -> None:
    """Each of them has the job run again, under its id, from the last checkpoint."""
    run = Run(lab, tmp_path, "trainer.steps=16")
    for step, who in ((3, "orchestrator"), (7, "trainer-1"), (11, "lead")):
        run.until_step(step)
        os.kill(run.pid(who), signal.SIGKILL)
        run.until_restart()
    assert run.code() == 0, run.told()
    run.assert_nothing_left()
    run.assert_whole(16)
    assert json.loads((run.dir / "result.json").read_text())["restarts"] == 3
    causes = [failure["cause"] for failure in json.loads((run.dir / "failures.json").read_text())]
    assert [cause.split()[2] for cause in causes] == ["orchestrator", "trainer-1"]
    assert "the supervisor was killed (exit code 137)" in run.told()


def test_a_replica_is_killed_and_then_loses_its_node(lab: Lab, tmp_path: Path) -> None:
    """The run goes on with the other replica: in place the first time, on the other one's node the second.

    The node comes back only after Slurm has noticed its death, which must not end the job.
    """
    run = Run(lab, tmp_path, "trainer.steps=100")
    run.until_step(3)
    os.kill(run.pid("inference-0"), signal.SIGKILL)
    until("the restart of inference-0", lambda: len(run.replica_restarts()) == 1, 15)
    until("inference-0 serving again", lambda: run.serves("inference-0"), 120)
    assert run.node("inference-0") == "infer0"
    before = run.step()
    lab.power_off("infer1")
    until("the restart of inference-1", lambda: len(run.replica_restarts()) == 2, 45)
    until("inference-1 serving again", lambda: run.serves("inference-1"), 120)
    assert run.node("inference-1") == "infer0" and before < run.step()
    until("Slurm to notice", lambda: lab.states()["infer1"].startswith("down"), 60)
    lab.boot("infer1")
    assert run.code() == 0, run.told()
    run.assert_nothing_left(60)
    run.assert_whole(100)
    # The second is lost by its silence, or by its step's end, if Slurm is told of the node first.
    assert [r["of"] for r in run.replica_restarts()] == ["inference-0", "inference-1"]
    assert json.loads((run.dir / "result.json").read_text())["restarts"] == 0


@pytest.mark.parametrize("node", ["train1", "train0"])
def test_a_trainer_node_loses_power(lab: Lab, tmp_path: Path, node: str) -> None:
    """The job waits for a node that it can have instead, or for this one, and goes on from the last checkpoint.

    train0 is the batch host, whose supervisor is gone too: the tasks of the other nodes have the job run again.
    """
    run = Run(lab, tmp_path, "trainer.steps=12", "launch.heartbeat_timeout_s=15")
    run.until_step(4)
    lab.power_off(node)
    run.until_restart()
    lab.boot(node)
    assert run.code() == 0, run.told()
    run.assert_nothing_left(60)
    run.assert_whole(12)


def test_the_warning_of_the_time_limit(lab: Lab, tmp_path: Path) -> None:
    """The run saves and comes back by itself, at the step that it had reached."""
    run = Run(lab, tmp_path, "trainer.steps=12")
    run.until_step(4)
    lab.run("scancel", "--batch", "--signal=USR2", run.job)  # as `--signal=B:USR2@…` has Slurm do
    run.until_restart()
    assert run.code() == 0, run.told()
    run.assert_nothing_left()
    run.assert_whole(12)
    (failure,) = json.loads((run.dir / "failures.json").read_text())
    resume = next(entry for entry in run.entries() if entry["kind"] == "resume")
    assert failure["limit"] and resume["step"] == failure["step"], "no step is lost"
