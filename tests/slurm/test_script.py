"""The text that is submitted and the words of a step, pinned. `PRL_WRITE_GOLDEN=1 pytest …` writes the files anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prl.config.load import load
from prl.config.schema import Component, Slurm
from prl.launch.slurm.environment import of_the_job, scrubbed
from prl.launch.slurm.script import Part, Submission, batch, srun, submission

GOLDEN = Path(__file__).with_name("golden")
CLUSTER = Slurm(
    trainer=Component(nodes=2, partition="train", gpus_per_node=8, cpus_per_node=96),
    inference=Component(nodes=4, partition="infer", gpus_per_node=4, cpus_per_node=48),
    account="project",
    qos="high",
    reservation="week 7",
    constraint="h200&ib",
    time_min=1440,
    warn_s=600,
    setup=["module load cuda"],
)


def check(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("PRL_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("heterogeneous", [True, False])
def test_submission(heterogeneous: bool) -> None:
    slurm = CLUSTER.model_copy(update={"heterogeneous": heterogeneous})
    job = Submission(
        "prl-first", Path("/shared/my runs/100%/first"), Path("/home/me/prl"), slurm, batch(["python", "-m", "lead", "a run"])
    )
    check("heterogeneous.sh" if heterogeneous else "homogeneous.sh", submission(job))


def test_submission_of_the_smallest_site() -> None:
    slurm = load("configs/slurm_tiny.yaml", site="configs/site/lab.yaml").launch.slurm
    assert slurm is not None
    check("lab.sh", submission(Submission("prl-slurm-tiny", Path("/runs/slurm-tiny"), Path("/prl"), slurm, ("lead",))))


def test_steps() -> None:
    trainer, engines = Part(0, ("gpu01", "gpu02"), 8), Part(1, ("gpu07",), 4)
    task = ("python", "task.py", "/shared/my runs/steps/0.json")
    steps = [
        srun(trainer, name="trainer", nodes=trainer.nodes, tasks_per_node=8, cpus_per_task=12, command=task),
        srun(engines, name="inference-0", nodes=engines.nodes, tasks_per_node=1, cpus_per_task=12, command=task),
        srun(Part(None, ("n1",)), name="orchestrator", nodes=("n1",), tasks_per_node=1, cpus_per_task=2, command=task),
    ]
    check("steps.txt", "\n\n".join("\n".join(words) for words in steps) + "\n")


def test_nothing_of_an_enclosing_job_is_handed_on() -> None:
    hostile = {
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_ID_HET_GROUP_1": "8",
        "SLURM_HET_SIZE": "2",
        "SLURM_CPUS_PER_TASK": "3",
        "SLURM_MEM_PER_CPU": "100",
        "SLURM_GPUS_PER_TASK": "1",
        "SBATCH_PARTITION": "debug",
        "SRUN_CPUS_PER_TASK": "9",
        "PMIX_RANK": "3",
        "OMPI_COMM_WORLD_RANK": "1",
        "PATH": "/bin",
    }
    assert scrubbed(hostile) == {"SLURM_CONF": "/etc/slurm.conf", "PATH": "/bin"}
    assert of_the_job(hostile).keys() == {"SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOB_ID_HET_GROUP_1", "SLURM_HET_SIZE"}
