"""Submission and states where Slurm's commands are played by scripts: what they say, refuse, or do not say in time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from submitit.core import plugins

from prl.launch.__main__ import main
from prl.launch.slurm import component, state, submit, versions
from prl.launch.slurm.executor import ComponentJob, HetJob, HetSlurmExecutor
from prl.launch.slurm.script import Component
from tests.slurm import functions

VERSION = 'test "$1" = --version && echo slurm 22.05.8 && exit\n'
TINY = ["configs/slurm_tiny.yaml", "--site", "configs/site/lab.yaml"]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes commands: `slurm(squeue="exit 1")`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/local/bin:/bin:/usr/bin")

    def write(**scripts: str) -> None:
        for name, script in scripts.items():
            (folder / name).write_text(f"#!/bin/sh\n{script}\n")
            (folder / name).chmod(0o755)

    write(srun="exit 1", scontrol="exit 1", sacct="exit 1")
    return write


def hold(name: str, **options: Any) -> Component:
    return Component(name, functions.who, **options)


def test_the_executor_is_a_plugin_of_submitit() -> None:
    assert plugins.get_executors()["hetslurm"] is HetSlurmExecutor and "hetslurm" in plugins.get_job_environments()


def test_a_job_is_submitted_and_found_again(slurm: Any, tmp_path: Path) -> None:
    slurm(sbatch=f'{VERSION}cat >{tmp_path}/text; env >{tmp_path}/env; echo "71;cluster"')
    environment = {"PATH": f"{tmp_path}/bin:/bin:/usr/bin", "SBATCH_PARTITION": "x", "SLURM_JOB_ID": "3", "GIVEN": "1"}
    job = HetSlurmExecutor(tmp_path / "jobs", environment=environment).submit_het(hold("a", nodes=2), Component("b"), hold("c"))
    assert (tmp_path / "text").read_text() == (tmp_path / "jobs" / "71_submission.sh").read_text()
    inherited = (tmp_path / "env").read_text()
    assert "GIVEN=1" in inherited and "SBATCH" not in inherited and "SLURM" not in inherited
    again = HetJob.load(tmp_path / "jobs", "71")
    for found in (job, again):
        assert [(part.key, part.num_tasks) for part in found.components.values()] == [("71+0", 2), ("71+1", 1), ("71+2", 1)]
        assert found["c"].submission().function is functions.who
    assert not (tmp_path / "jobs" / "b").exists()


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (
            "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1",
            "invalid partition.*set launch.slurm.trainer.part",
        ),
        ("echo 'sbatch: error: Batch job submission failed: Invalid qos specification' >&2; exit 1", "set launch.slurm.qos"),
        ("echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1", "scontrol ping.*squeue --me"),
        ("echo whatever >&2; exit 3", "^sbatch: whatever$"),
        ("exit 3", "^sbatch: exit code 3$"),
        ("sleep 5", "no answer within 0.2 s; the job may have been submitted.*squeue --me --name=submitit "),
    ],
)
def test_what_sbatch_refuses_is_a_message_with_a_mend(
    slurm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, told: str
) -> None:
    slurm(sbatch=f"{VERSION}{script}")
    monkeypatch.setattr(submit, "TIMEOUT_S", 0.2)
    with pytest.raises(OSError, match=told):
        HetSlurmExecutor(tmp_path / "jobs").submit_het(hold("a"))
    assert not list(tmp_path.rglob("*.pkl"))


def test_slurm_that_is_missing_or_old(slurm: Any, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no sbatch on this machine"):
        HetSlurmExecutor(tmp_path, environment={"PATH": "/nowhere"}).submit_het(hold("a"))
    slurm(sbatch="echo no configuration >&2; exit 1")
    with pytest.raises(OSError, match="sbatch --version: exit code 1: no configuration"):
        HetSlurmExecutor(tmp_path).submit_het(hold("a"))
    slurm(sbatch="echo slurm 19.05.2")
    with pytest.raises(OSError, match="Slurm 19.5 does not know sbatch #SBATCH hetjob, .*srun --overlap"):
        HetSlurmExecutor(tmp_path).submit_het(hold("a"))
    assert versions.unknown(versions.RUN_ON) == versions.unknown((26, 5)) == ()
    assert versions.unknown((20, 2)) == ("srun --overlap",)


def test_the_command_says_so_without_a_traceback(slurm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slurm(sbatch=f"{VERSION}echo 'sbatch: error: Invalid account or account/partition combination specified' >&2; exit 1")
    assert main([*TINY, f"run.dir={tmp_path}"]) == 1
    told = capsys.readouterr().err
    assert "set launch.slurm.account" in told and "submit it again with" in told and "Traceback" not in told
    assert main([*TINY, f"run.dir={tmp_path}/a\\b", "--dry-run"]) == 2
    assert "choose another" in capsys.readouterr().err


def test_states_come_from_squeue_and_then_from_the_accounting(slurm: Any) -> None:
    slurm(squeue="echo '7+0|RUNNING|None'; echo '7+1|NODE_FAIL|NodeDown'")
    watcher = state.Watcher()
    for key in ("7+0", "7+1", "8", "9+1"):
        watcher.register_job(key)
    slurm(sacct="echo '8|CANCELLED by 0'; echo '9+0|COMPLETED'; echo '9+1|RESIZING'; echo '9+1|FAILED'")
    assert [watcher.get_state(key, "force") for key in ("7+0", "7+1", "8", "9+1")] == [
        "RUNNING",
        "NODE_FAIL",
        "CANCELLED",
        "FAILED",
    ]
    assert [watcher.is_done(key) for key in ("7+0", "7+1", "8")] == [False, True, True]
    calls = watcher.num_calls
    watcher.get_state("7+0")
    assert watcher.num_calls == calls, "asked at most every few seconds"


def test_a_job_that_nobody_remembers_has_ended_and_a_silent_slurmctld_says_nothing(slurm: Any) -> None:
    slurm(squeue="echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    watcher = state.Watcher()
    assert watcher.get_state("5+1") == state.UNKNOWN and not watcher.is_done("5+1")
    slurm(squeue="echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    watcher.update()
    assert watcher.get_state("5+1", "cache") == state.FORGOTTEN and watcher.is_done("5+1")


def test_an_end_without_a_result_is_seen_while_the_job_runs(
    slurm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm(squeue="echo '7+0|RUNNING|None'; echo '7+1|RUNNING|None'")
    monkeypatch.setattr(ComponentJob, "watcher", state.Watcher())
    job = ComponentJob[Any](tmp_path, "7", key="7+1")
    assert not job.done() and job.state == "RUNNING"
    (tmp_path / "7_ended").write_text("137\n")
    assert job.done() and job.state == "FAILED"
    (tmp_path / "7_again").touch()
    assert not job.done(), "it is about to be run again"


def test_a_folder_that_others_can_write_is_not_unpickled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "trainer"
    folder.mkdir(mode=0o755)
    (folder / "1_submitted.pkl").touch()
    for path in (tmp_path, folder, folder / "1_submitted.pkl"):
        before = path.stat().st_mode & 0o777
        path.chmod(0o770)
        assert component.main(str(folder)) == 1
        assert f"{path}: owner" in (said := capsys.readouterr().err) and "mode 770; expected" in said
        path.chmod(before)
