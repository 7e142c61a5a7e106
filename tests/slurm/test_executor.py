"""Jobs of several components by submitit, on the local cluster: without an accounting, and with one and odd names of nodes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from submitit import AutoExecutor
from submitit.core.utils import FailedJobError, UncompletedJobError

from prl.launch.slurm import state
from prl.launch.slurm.environment import ask
from prl.launch.slurm.executor import ComponentJob, HetSlurmExecutor
from prl.launch.slurm.script import Component
from tests.slurm import functions
from tests.slurm.accounting import AccountedLab
from tests.slurm.lab import NAMESPACES, Lab, clean, until, why_not

ROOT = Path(__file__).parents[2]
ODD = ("train-a01", "train-b-2x", "infer007", "infer-9-c")
COMMANDS = ("sbatch", "squeue", "sacct", "scancel", "scontrol", "sinfo", "srun")
HOSTILE = {
    "SLURM_JOB_ID": "1",
    "SLURM_NTASKS": "7",
    "SLURM_CPUS_PER_TASK": "5",
    "SLURM_MEM_PER_CPU": "77",
    "SLURM_JOB_NODELIST": "nowhere",
    "SLURM_EXPORT_ENV": "NONE",
    "SBATCH_PARTITION": "nonsense",
    "SBATCH_EXCLUSIVE": "1",
    "SBATCH_ARRAY_INX": "0-3",
    "SBATCH_HINT": "nomultithread",
    "SRUN_CPUS_PER_TASK": "6",
    "PMIX_RANK": "3",
}

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def accounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if reason := why_not():
        pytest.skip(reason)
    with AccountedLab(tmp_path_factory.mktemp("accounted"), nodes=ODD) as lab:
        yield lab


@pytest.fixture(params=["squeue alone", "accounting"])
def either(request: pytest.FixtureRequest) -> Lab:
    return request.getfixturevalue("lab" if request.param == "squeue alone" else "accounted")


def login(lab: Lab, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process be on the cluster's login node, as far as Slurm's commands go."""
    folder.mkdir()
    inside = " ".join(["nsenter", "-t", str(lab._pids["head"]), *NAMESPACES, "--"])
    for name in COMMANDS:
        (folder / name).write_text(f'#!/bin/sh\nPATH={clean()["PATH"]} exec {inside} {name} "$@"\n')
        (folder / name).chmod(0o755)
    for name in os.environ:
        if name.startswith(("SLURM", "SBATCH")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{folder}:{clean()['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    monkeypatch.setattr(ComponentJob, "_results_timeout_s", 1)
    monkeypatch.setattr(ComponentJob, "watcher", state.Watcher())


def small(name: str, partition: str, *call: object, **options: object) -> Component:
    function, *args = call
    given = {"nodes": 1, "memory": "300", "time_min": 5} | options
    return Component(name, function, tuple(args), partition=partition, **given)  # type: ignore[arg-type]


def test_components_are_jobs_of_submitit(either: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Own nodes, tasks, partition, environment, results and logs, ranks from 0; by a hostile environment, in an odd folder."""
    login(either, tmp_path / "bin", monkeypatch)
    for name, value in HOSTILE.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "it's 100% my\tfolder"
    job = HetSlurmExecutor(folder).submit_het(
        small("train", "train", functions.who, nodes=2, tasks_per_node=2, environment={"GREETING": "good day, it's 5%"}),
        small("serve", "infer", functions.who, nodes=2, cpus_per_task=3),
        name="two parts",
    )
    nodes = {name: sorted(n for n in either.nodes if n.startswith(name)) for name in ("train", "infer")}
    train, serve = job["train"].results(), job["serve"].results()
    assert [(t["rank"], t["of"], t["GREETING"]) for t in train] == [(i, 4, "good day, it's 5%") for i in range(4)]
    assert [(t["rank"], t["of"], t["GREETING"]) for t in serve] == [(i, 2, None) for i in range(2)]
    assert {t["SLURM_JOB_PARTITION"] for t in train} == {"train"} and {t["SLURM_JOB_PARTITION"] for t in serve} == {"infer"}
    assert {t["SLURM_CPUS_PER_TASK"] for t in train} == {"1"} and {t["SLURM_CPUS_PER_TASK"] for t in serve} == {"3"}
    assert all(t[name] is None for t in train + serve for name in ("PMIX_RANK", "SLURM_MEM_PER_CPU", "SBATCH_PARTITION"))
    assert sorted(train[0]["hosts"]) == nodes["train"] and sorted(serve[0]["hosts"]) == nodes["infer"]
    assert [t["host"] for t in serve] == serve[0]["hosts"]
    assert [job["train"].task(i).stdout() for i in range(4)] == [f"rank {i}\n" for i in range(4)]
    until("the end of the job", lambda: job["train"].watcher.get_state(f"{job.job_id}+0", "force") == "COMPLETED", 20)


def test_one_dies_hard_one_is_cancelled_one_raises(either: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is seen within seconds, while the other components go on."""
    login(either, tmp_path / "bin", monkeypatch)
    executor = HetSlurmExecutor(tmp_path / "jobs")
    lives, dies = small("lives", "train", functions.rest, 600), small("dies", "infer", functions.die, tasks_per_node=2)
    stays, leaves = small("stays", "train", functions.fail), small("leaves", "infer", functions.rest, 600)
    first, second = executor.submit_het(lives, dies), executor.submit_het(stays, leaves)
    logs = [first["dies"].task(1).paths.stdout, second["leaves"].paths.stdout]
    until("running steps", lambda: all(path.exists() for path in logs), 60)
    began = time.monotonic()
    second["leaves"].cancel()
    second["leaves"].wait()
    cancelled = time.monotonic() - began
    first["dies"].wait()
    died = time.time() - logs[0].stat().st_mtime
    print(f"seen after {cancelled:.1f} s (cancelled), at most {died:.1f} s (killed)")
    assert cancelled < 10 and died < 15
    assert first["dies"].state == "FAILED" and first["lives"].state == "RUNNING" and not first["lives"].done()
    with pytest.raises(UncompletedJobError, match="has not produced any output"):
        first["dies"].results()
    with pytest.raises(FailedJobError, match="no luck"):
        second["stays"].result()
    assert second["leaves"].watcher.get_state(f"{second.job_id}+1", "force") == "CANCELLED"
    first.cancel()
    first["lives"].wait()
    assert first["lives"].watcher.get_state(f"{first.job_id}+0", "force") == "CANCELLED"
    if isinstance(either, AccountedLab):  # asked alone, as when slurmctld has forgotten the job
        ends = {f"{first.job_id}+0", f"{first.job_id}+1", f"{second.job_id}+0", f"{second.job_id}+1"}
        until("the accounting's own word", lambda: state.recorded(first.job_id, second.job_id).keys() == ends, 30)
        with monkeypatch.context() as patch:
            patch.setattr(state, "states", lambda *jobs: {})
            assert state.Watcher().get_state(f"{second.job_id}+1") == "CANCELLED"
    else:
        assert state.recorded(first.job_id) == {}


def test_all_save_and_then_one_requeue(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow one's save is waited for; a component that has its result is not run again."""
    login(lab, tmp_path / "bin", monkeypatch)
    notes = {name: tmp_path / f"{name}.txt" for name in ("quick", "slow")}
    job = HetSlurmExecutor(tmp_path / "jobs").submit_het(
        small("quick", "train", functions.Saves(0), str(notes["quick"]), time_min=60),
        small("slow", "infer", functions.Saves(4), str(notes["slow"]), time_min=60),
        small("done", "train", functions.who, time_min=60),
    )
    until("both to begin", lambda: all(path.exists() for path in notes.values()), 60)
    first = job["done"].result()
    ask("scancel", "--batch", "--signal=USR2", job.job_id)
    assert [job[name].result().partition(" by ")[0] for name in notes] == ["saved", "saved"]
    told = {name: [line.split()[:2] for line in path.read_text().splitlines()] for name, path in notes.items()}
    assert told == dict.fromkeys(notes, [["0", "began"], ["0", "saved"], ["1", "began"]])
    times = {name: [float(line.split()[2]) for line in path.read_text().splitlines()] for name, path in notes.items()}
    assert times["quick"][2] > times["slow"][1] > times["quick"][1] + 3, "no requeue before the slow one has saved"
    assert job["done"].result() == first
    assert "Restarts=1" in ask("scontrol", "show", "job", job.job_id)


def test_homogeneous_and_by_submitits_own_interface(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    login(lab, tmp_path / "bin", monkeypatch)
    train, serve = small("train", "all", functions.who, nodes=2), small("serve", "all", functions.who, nodes=2)
    job = HetSlurmExecutor(tmp_path / "jobs").submit_het(train, serve, heterogeneous=False)
    split = [[t["host"] for t in job[name].results()] for name in ("train", "serve")]
    assert split[0] + split[1] == sorted(lab.nodes) and all(t["of"] == 2 for t in job["serve"].results())
    with pytest.raises(OSError, match="its components end together"):
        job["serve"].cancel()
    executor = AutoExecutor(tmp_path / "own", cluster="hetslurm")
    executor.update_parameters(timeout_min=5, nodes=1, tasks_per_node=2, mem_gb=0.3, hetslurm_partition="infer", name="own")
    alone = executor.submit(functions.rest, 0)
    assert alone.results() == ["rested", "rested"]
    alone.get_info(mode="force")  # what it knew may be of before the start
    assert alone.state in ("RUNNING", "COMPLETING", "COMPLETED")
    with pytest.raises(OSError, match="invalid partition.*trainer.partition"):
        HetSlurmExecutor(tmp_path / "bad").submit_het(small("train", "nowhere", functions.who))
    assert not list((tmp_path / "bad").rglob("*.pkl"))


def test_a_leader_on_the_batch_host(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed, it has the job run again; the job's exit code is its own; the other component has nodes and no task."""
    login(lab, tmp_path / "bin", monkeypatch)
    notes = tmp_path / "notes"
    lead = small("lead", "train", functions.Leads(), str(notes), nodes=2, batch_host=True, lives=1)
    job = HetSlurmExecutor(tmp_path / "jobs").submit_het(lead, Component("held", partition="infer", memory="300", time_min=5))
    until("its second life", lambda: notes.exists() and notes.read_text() == "1", 60)
    ask("scancel", "--batch", "--signal=USR2", job.job_id)
    with pytest.raises(FailedJobError, match="saved for later"):
        job["lead"].result()
    until("the end of both", lambda: all(part.done(force_check=True) for part in job.components.values()), 20)
    shown = ask("scontrol", "show", "job", f"{job.job_id}+0")
    assert "ExitCode=75:0" in shown and "Restarts=1" in shown and job["held"].state in ("COMPLETED", "FAILED")
    told = job["lead"].stdout() or ""
    assert f"component lead was killed (exit code 137): job {job.job_id} is run again" in told and "saved for later" not in told


def test_a_nodes_death_ends_its_component_alone(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its step ends, with 0 by srun: that it has no result is what counts. The other component goes on."""
    login(lab, tmp_path / "bin", monkeypatch)
    train, serve = (small(*where, functions.rest, 600, nodes=2) for where in (("train", "train"), ("serve", "infer")))
    job = HetSlurmExecutor(tmp_path / "jobs").submit_het(train, serve)
    until("running steps", lambda: all(job[name].task(0).paths.stdout.exists() for name in ("train", "serve")), 60)
    lab.power_off("infer1")
    began = time.monotonic()
    with pytest.raises(UncompletedJobError):
        job["serve"].results()
    print(f"seen after {time.monotonic() - began:.1f} s, with SlurmdTimeout=10")
    assert job["train"].state == "RUNNING" and not job["train"].done()
    job.cancel()
    job["train"].wait()
