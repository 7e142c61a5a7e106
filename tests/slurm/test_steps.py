"""The executor's side of a step, with processes of this machine in place of srun."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from prl.launch.local import GONE, RoleSpec
from prl.launch.slurm import steps
from prl.launch.slurm.environment import Allocation
from prl.launch.slurm.script import Part
from prl.transport.run_dir import RunDir

BEGINS = "import time; print('began {name}', flush=True)"
SAYS = {
    "inference-0": f"{BEGINS}; time.sleep(60)",
    "inference-1": f"{BEGINS}\nwhile True: time.sleep(0.1); print('alive {{name}}', flush=True)",
    "inference-2": "import time; time.sleep(60)",  # its step has not begun: that may take longer
}


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> steps.SlurmExecutor:
    def srun(part: Part, *, name: str, **_: object) -> tuple[str, ...]:
        return sys.executable, "-c", SAYS[name].format(name=name)

    monkeypatch.setattr(steps, "srun", srun)
    monkeypatch.setattr(steps, "SILENT_S", 1.0)
    monkeypatch.setattr(steps, "GENTLE_S", 0.1)
    run = RunDir(tmp_path / "run")
    run.create()
    parts = {"inference": Part(1, ("infer0", "infer1", "infer2"))}
    return steps.SlurmExecutor(run, Allocation("1", 0, parts, {}), lost_s=600)


def until_ended(executor: steps.SlurmExecutor, seconds: float) -> Mapping[str, int]:
    deadline, ended = time.monotonic() + seconds, dict[str, int]()
    while not ended and time.monotonic() < deadline:
        time.sleep(0.02)
        ended = executor.poll()
    return ended


def test_a_task_that_is_not_heard_any_more_is_gone(executor: steps.SlurmExecutor) -> None:
    try:
        executor.start([RoleSpec(name, ("role",)) for name in SAYS])
        assert until_ended(executor, 10) == {"inference-0": GONE}
        assert executor.nodes_of(["inference-0"]) != ("infer0",), "it is started elsewhere"
        assert not until_ended(executor, 1.5)
        (pid,) = (step.process.pid for step in executor._steps if "inference-1" in step.roles)
        os.kill(pid, signal.SIGSTOP)  # the whole job is suspended, this side too
        time.sleep(1.5)
        assert executor.poll() == {}
        os.kill(pid, signal.SIGCONT)
        assert not until_ended(executor, 1.5)
    finally:
        executor.close()
