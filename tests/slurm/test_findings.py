"""What the doctor makes of what it measures: each fault is found and has a mend, and a sound cluster has none."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from prl.config.load import ConfigError, load_site
from prl.config.schema import Component, Slurm
from prl.launch.slurm import findings, probe
from prl.launch.slurm.findings import Finding
from prl.launch.slurm.script import Part

SITE = Slurm(
    trainer=Component(nodes=2, partition="train", gpus_per_node=8), inference=Component(nodes=4, partition="infer"), time_min=60
)
CONFIG = """Configuration data as of 2026-12-01T05:00:00
KillWait                = 30 sec
SchedulerType           = sched/backfill
SlurmdTimeout           = 300 sec
SLURM_VERSION           = 22.05.8
"""
PARTITIONS = """PartitionName=train AllowGroups=ALL Default=YES MaxNodes=UNLIMITED MaxTime=1-00:00:00 State=UP TotalNodes=16
PartitionName=infer AllowGroups=ALL Default=NO MaxNodes=8 MaxTime=UNLIMITED State=UP TotalNodes=8
"""
PARTS = {"trainer": Part(0, ("t0",), 2), "inference": Part(1, ("i0",), 0)}
NODE: dict[str, Any] = {
    "python": "3.11.7",
    "user": 1000,
    "cpus": 8,
    "limits": {"nofile": [65536, 65536], "memlock": [-1, -1], "nproc": [-1, -1]},
    "free": {"run": 1 << 40, "tmp": 1 << 36, "shm": 1 << 36},
    "gpus": [["H200", "550.1"], ["H200", "550.1"]],
    "containers": ["apptainer"],
}


def cluster(config: str = CONFIG, there: str = PARTITIONS, slurm: Slurm = SITE) -> list[Finding]:
    return list(findings.of_cluster(slurm, findings.settings(config), findings.partitions(there)))


def bad(found: list[Finding]) -> list[tuple[str, str]]:
    assert all(bool(f.mend) == (f.level != "ok") for f in found), "a mend for each fault"
    return [(f.level, f.what) for f in found if f.level != "ok"]


def test_a_sound_cluster_has_no_fault() -> None:
    found = cluster()
    assert not bad(found) and not findings.worst(found) and len(found) == 4
    assert not bad(list(findings.of_nodes(PARTS, {"t0": NODE, "i0": NODE})))


@pytest.mark.parametrize(
    ("old", "new", "level", "what"),
    [
        ("sched/backfill", "sched/builtin", "stop", "scheduler sched/builtin"),
        ("22.05.8", "21.08.1", "warn", "Slurm 21.08.1"),
        ("300 sec", "0 sec", "warn", "SlurmdTimeout is 0"),
        ("30 sec", "5 sec", "warn", "KillWait is 5 s"),
        ("PartitionName=infer", "PartitionName=other", "stop", "partition infer is not there"),
        ("State=UP TotalNodes=8", "State=DOWN TotalNodes=8", "stop", "partition infer is DOWN"),
        ("TotalNodes=8", "TotalNodes=3", "stop", "partition infer: TotalNodes is 3, 4 asked for"),
        ("MaxNodes=8", "MaxNodes=2", "stop", "partition infer: MaxNodes is 2, 4 asked for"),
        ("1-00:00:00", "00:30:00", "stop", "partition train: MaxTime is 30 min, 60 min asked for"),
    ],
)
def test_a_fault_of_the_cluster(old: str, new: str, level: str, what: str) -> None:
    text = CONFIG + "\f" + PARTITIONS
    assert old in text
    config, _, there = text.replace(old, new).partition("\f")
    ((found_level, found),) = bad(cluster(config, there))
    assert found_level == level and found.startswith(what)


def test_without_heterogeneous_jobs_any_scheduler_will_do() -> None:
    one = SITE.model_copy(update={"heterogeneous": False, "inference": Component(nodes=4, partition="train")})
    assert not bad(cluster(CONFIG.replace("backfill", "builtin"), slurm=one))
    few = one.model_copy(update={"trainer": Component(nodes=14, partition="train")})
    assert bad(cluster(slurm=few)) == [("stop", "partition train: TotalNodes is 16, 18 asked for")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("30:00", 30), ("1:30:00", 90), ("2-01:00:00", 2940), ("5", 5), ("UNLIMITED", None), ("1-0", 1440)],
)
def test_time_limits(text: str, expected: int | None) -> None:
    assert findings.minutes(text) == expected


@pytest.mark.parametrize(
    ("path", "value", "level", "what"),
    [
        ("limits.nofile", [128, 4096], "stop", "t0: 128 open files"),
        ("limits.nofile", [1024, 4096], "warn", "t0: 1024 open files"),
        ("limits.memlock", [65536, 65536], "warn", "t0: locked memory"),
        ("free.run", 1 << 20, "stop", "t0: 0.00098 GiB are free in the run's folder"),
        ("free.shm", 1 << 28, "warn", "t0: 0.25 GiB are free in /dev/shm"),
        ("gpus", [["H200", "550.1"]], "stop", "t0: 1 GPUs, 2 expected"),
        ("gpus", [["H200", "550.1"], ["H200", "535.9"]], "warn", "nodes have several GPU drivers"),
        ("python", "3.12.1", "stop", "nodes differ in python: 3.11.7, 3.12.1"),
    ],
)
def test_a_fault_of_a_node(path: str, value: object, level: str, what: str) -> None:
    node = copy.deepcopy(NODE)
    *at, key = path.split(".")
    (node[at[0]] if at else node)[key] = value
    found = bad(list(findings.of_nodes(PARTS, {"t0": node, "i0": NODE})))
    assert found[0][0] == level and found[0][1].startswith(what) and len(found) == 1


def test_a_node_that_says_nothing_is_a_fault() -> None:
    found = list(findings.of_nodes(PARTS, {"t0": {"error": "t0 did not answer"}, "i0": NODE}))
    assert bad(found) == [("stop", "t0: t0 did not answer")] and findings.worst(found)


def test_software_and_clocks() -> None:
    good = {"torch": "2.9", "cuda": "12.8", "gpus": 2}
    assert not bad(list(findings.of_software(PARTS, {"t0": good, "i0": good})))
    other = list(findings.of_software(PARTS, {"t0": good | {"gpus": 0}, "i0": {"error": "no module prl"}}))
    assert [what.split(":")[0] for _, what in bad(other)] == ["t0", "i0"]
    assert bad(list(findings.of_software(PARTS, {"t0": good, "i0": good | {"torch": "2.8"}})))[0][0] == "stop"
    assert not bad(list(findings.of_clocks({"t0": 0.0, "i0": -0.4})))
    assert bad(list(findings.of_clocks({"t0": 0.0, "i0": -2.0}))) == [("warn", "i0's clock is 2.0 s behind")]
    assert findings.worst(list(findings.of_clocks({"t0": 90.0})))


def test_a_site_file_is_read_without_a_run(tmp_path: Path) -> None:
    slurm = load_site("configs/site/lab.yaml", ["launch.slurm.trainer.nodes=2"]).launch.slurm
    assert slurm is not None and slurm.trainer == Component(nodes=2, partition="train", cpus_per_node=2, memory="1500")
    (tmp_path / "site.yaml").write_text("launch: {slurm: {acount: x, time_min: -1}}")
    with pytest.raises(ConfigError) as e:
        load_site(tmp_path / "site.yaml")
    assert {p.path for p in e.value.problems} == {"launch.slurm.acount", "launch.slurm.time_min"}
    with pytest.raises(ConfigError, match="no such file"):
        load_site(tmp_path / "none.yaml")


def test_the_probe_answers_with_the_standard_library_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "f")
    questions = [
        {"do": "facts", "folder": str(tmp_path)},
        {"do": "write", "path": path, "text": "x"},
        {"do": "see", "path": path, "text": "x", "within_s": 1},
        {"do": "see", "path": path, "text": "y", "within_s": 0.1},
        {"do": "create", "path": path},
        {"do": "lock", "path": path},
        {"do": "lock", "path": path},
        {"do": "unlock", "path": path},
        {"do": "connect", "host": "127.0.0.1", "port": 1},
    ]
    text = "".join(json.dumps(q) + "\n" for q in questions)
    words = [sys.executable, "-I", "-S", probe.__file__]
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=30, check=True)
    facts, wrote, seen, unseen, made, got, second, freed, refused = map(json.loads, done.stdout.splitlines())
    assert facts["free"]["run"] > 0 and facts["limits"].keys() == {"nofile", "memlock", "nproc"}
    assert (wrote, unseen, made, got, second, freed) == ({}, {"s": None}, {"made": False}, {"got": True}, {"got": False}, {})
    assert seen["s"] < 1 and "refused" in refused["error"]


def test_gpus_are_those_that_nvidia_smi_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 550.54.15'\necho 'NVIDIA H200, 550.54.15'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert probe.gpus() == [["NVIDIA H200", "550.54.15"]] * 2
    tool.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n")
    with pytest.raises(OSError, match="exit code 18: Failed to initialize NVML"):
        probe.gpus()
    tool.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert probe.gpus() == []


def test_torn_and_missing_files_are_counted(tmp_path: Path) -> None:
    path = str(tmp_path / "f")
    probe.replace(path, 0.01)
    writer = threading.Thread(target=probe.replace, args=(path, 0.4))
    writer.start()
    seen = probe.reread(path, 0.3)
    writer.join()
    assert seen["n"] > 3 and not seen["missing"] and not seen["torn"]
    Path(path).write_text("half")
    assert probe.reread(path, 0.02)["torn"] > 0
    Path(path).unlink()
    assert probe.reread(path, 0.02)["missing"] > 0
