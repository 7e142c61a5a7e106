"""The doctor on the local cluster: sound as it is, and each planted fault is found with its mend."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from prl.launch.slurm import probe
from tests.slurm.lab import Lab, clean
from tests.slurm.runs import ROOT, SITE

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]
TWO = ("launch.slurm.trainer.nodes=2", "launch.slurm.inference.nodes=2")
# Of one node: a clock that is fast, a rename that first removes, a lock that is not shared.
FAULTY = (
    ("import time\n", "import time as real\nfrom types import SimpleNamespace\n\n"
     "time = SimpleNamespace(time=lambda: real.time() + 3, sleep=real.sleep, monotonic=real.monotonic)\n"),
    ('os.replace(f"{path}.tmp", path)', 'os.unlink(path); time.sleep(0.002); os.rename(f"{path}.tmp", path)'),
    ("fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass"),
)  # fmt: skip


def doctor(lab: Lab, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = clean() | {"PYTHONPATH": str(ROOT)}
    given = ("--site", SITE, f"run.dir={folder}", *words)
    command = (sys.executable, "-m", "prl.launch", "doctor", *given)
    return lab.run(*command, cwd=ROOT, env=env, check=False, timeout_s=200)


def faults(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What would stop a run."""
    return [line.removeprefix("stop").strip() for line in done.stdout.splitlines() if line.startswith("stop")]


def test_a_sound_cluster(lab: Lab, tmp_path: Path) -> None:
    done = doctor(lab, tmp_path, *TWO)
    assert done.returncode == 0 and "a run can live here" in done.stderr, done.stdout + done.stderr
    good = [line for line in done.stdout.splitlines() if line.startswith("ok")]
    for words in ("Slurm 22.05", "backfill", "clocks agree", "every node sees", "replaces by a rename", "a lock on a file"):
        assert any(words in line for line in good), words
    assert any("a sum over 4 nodes by gloo" in line for line in good)
    assert any("(16 connections" in line for line in good)
    assert not list(tmp_path.iterdir()) and not lab.run("squeue", "-h").stdout


def test_faults_of_nodes(lab: Lab, tmp_path: Path) -> None:
    """All at once: infer0 does not share the folder, train1 allows few files and has no room in shared memory; clock, renames,
    locks and the firewall of infer1 are wrong."""
    text = Path(probe.__file__).read_text()
    for old, new in FAULTY:
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / "probe.py").write_text(text)
    folder = tmp_path / "runs"
    folder.mkdir()
    (slurmd,) = lab.processes("train1", "slurmd\0-D")
    before = resource.prlimit(slurmd, resource.RLIMIT_NOFILE)
    undo = [
        ("infer0", ("umount", str(folder))),
        ("infer1", ("umount", probe.__file__)),
        ("train1", ("umount", "/dev/shm")),
        ("infer1", ("ip", "rule", "del", "priority", "10")),
    ]
    try:
        lab.run("mount", "-t", "tmpfs", "tmpfs", str(folder), node="infer0")
        resource.prlimit(slurmd, resource.RLIMIT_NOFILE, (200, before[1]))
        lab.run("mount", "--bind", str(tmp_path / "probe.py"), probe.__file__, node="infer1")
        lab.run("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm", node="train1")
        ports = ("ipproto", "tcp", "dport", "20000-29999")
        lab.run("ip", "rule", "add", "priority", "10", *ports, "unreachable", node="infer1")
        done = doctor(lab, folder, *TWO)
    finally:
        resource.prlimit(slurmd, resource.RLIMIT_NOFILE, before)
        for node, words in undo:
            lab.run(*words, node=node, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    found = faults(done)
    for words in (
        "infer0 does not see",
        "train1: 200 open files are allowed",
        "train1: 0.00098 GiB are free in /dev/shm",
        "train0, as infer1 renames a file over an old one",
        "a lock of train0 and infer1 on one file: both have it",
        "infer1 does not reach train0",
    ):
        assert any(line.startswith(words) for line in found), (words, found)
    assert "warn  infer1's clock is 3.0 s ahead" in done.stdout
    assert done.stdout.count("→") >= len(found), "a mend for each"
    assert not lab.run("squeue", "-h").stdout


def test_faults_of_the_cluster(lab: Lab, tmp_path: Path) -> None:
    """Found before a job is submitted, or by a job that does not begin."""
    lab.run("scontrol", "update", "PartitionName=infer", "State=DOWN")
    try:
        down = doctor(lab, tmp_path)
    finally:
        lab.run("scontrol", "update", "PartitionName=infer", "State=UP")
    assert faults(down) == ["partition infer is DOWN"] and down.returncode == 1
    lab.run("scontrol", "update", "NodeName=infer[0-1]", "State=DRAIN", "Reason=test")
    try:
        drained = doctor(lab, tmp_path, "--wait-s", "4")
    finally:
        lab.run("scontrol", "update", "NodeName=infer[0-1]", "State=RESUME")
    assert len(faults(drained)) == 1 and "has not begun within 4 s" in faults(drained)[0]
    refused = doctor(lab, tmp_path, "launch.slurm.trainer.memory=9000000M")
    assert len(faults(refused)) == 1 and "the job is refused: sbatch" in faults(refused)[0]
    nowhere = doctor(lab, tmp_path, "launch.slurm.inference.partition=gpu")
    assert faults(nowhere) == ["partition gpu is not there"]


def test_a_cluster_without_backfill(lab: Lab, tmp_path: Path) -> None:
    with Lab(tmp_path / "lab", nodes=("train0", "infer0"), conf=["SchedulerType=sched/builtin"]) as other:
        done = doctor(other, tmp_path / "runs")
    assert done.returncode == 1
    assert len(faults(done)) == 1 and "heterogeneous jobs, which backfill alone starts" in faults(done)[0], done.stdout
