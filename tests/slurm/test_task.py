"""The process that starts a role on a node, without Slurm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from prl.launch.slurm import task
from prl.launch.slurm.steps import SILENT_S


def start(folder: Path, *names: str, rank: int = 0) -> subprocess.Popen[bytes]:
    """A task whose role says its folder for temporary files in NAME.log, and stays."""
    command = [sys.executable, "-c", "import os, time; print(os.environ['TMPDIR'], flush=True); time.sleep(600)"]
    roles = [{"name": name, "command": command, "log": str(folder / f"{name}.log"), "env": {}} for name in names]
    alive = folder / "alive"
    alive.touch()
    step = {
        "mark": folder.name,
        "addresses": {"here": "127.0.0.1"},
        "alive": str(alive),
        "lost_s": 600,
        "job": "1",
        "tasks": roles,
    }
    file = folder / f"{names[rank]}.json"
    file.write_text(json.dumps(step))
    environment = os.environ | {"SLURM_PROCID": str(rank), "SLURMD_NODENAME": "here", "TMPDIR": str(folder)}
    words = [sys.executable, "-I", "-S", task.__file__, str(file)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def scratch(folder: Path, name: str) -> Path:
    deadline = time.monotonic() + 20
    while not (said := (folder / f"{name}.log").read_text() if (folder / f"{name}.log").exists() else "").endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return Path(said.strip())


def test_a_tasks_scratch_is_its_own(tmp_path: Path) -> None:
    """Private, not removed by the task of a rank whose name begins like its own, and by the next one of its own."""
    other = start(tmp_path, "trainer", "trainer-1", rank=1)
    theirs = scratch(tmp_path, "trainer-1")
    assert theirs.stat().st_mode & 0o777 == 0o700
    left = tmp_path / f"prl-{tmp_path.name}-trainer.left"
    left.mkdir()
    first = start(tmp_path, "trainer", "trainer-1")
    mine = scratch(tmp_path, "trainer")
    assert mine.is_dir() and theirs.is_dir() and not left.exists()
    for process in (first, other):
        assert process.stdin is not None
        process.stdin.close()  # as when the supervisor ends
        assert process.wait(20) == 128 + signal.SIGKILL
    assert not mine.exists() and not theirs.exists()


def test_a_task_says_that_it_can_be_heard(tmp_path: Path) -> None:
    process = start(tmp_path, "trainer")
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == b"began trainer\n"
    began = time.monotonic()
    assert process.stdout.readline() == b"alive trainer\n"
    assert time.monotonic() - began < 2 * task.ALIVE_S < SILENT_S
    process.stdin.close()
    assert process.stdout.read().endswith(b"ended trainer -9\n")
    process.wait(20)
