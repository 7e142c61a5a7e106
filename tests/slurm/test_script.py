"""The text that is submitted and the words of a step, pinned. `PRL_WRITE_GOLDEN=1 pytest …` writes the files anew."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from prl.config.load import load
from prl.config.schema import Component, Slurm
from prl.launch.__main__ import main
from prl.launch.slurm import script
from prl.launch.slurm.environment import of_the_job, scrubbed
from prl.launch.slurm.script import Part, Submission, run_job, srun, submission

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


def lead() -> None: ...


def run_of(slurm: Slurm, run: str, chdir: str) -> Submission:
    return replace(run_job("first", Path(run), slurm, Path(chdir), lead), python="/home/me/my env/bin/python")


@pytest.mark.parametrize("heterogeneous", [True, False])
def test_submission_of_a_run(heterogeneous: bool) -> None:
    slurm = CLUSTER.model_copy(update={"heterogeneous": heterogeneous})
    job = run_of(slurm, "/shared/my run's/100%/first", "/home/me/prl")
    check("heterogeneous.sh" if heterogeneous else "homogeneous.sh", submission(job))


def test_submission_of_the_smallest_site() -> None:
    slurm = load("configs/slurm_tiny.yaml", site="configs/site/lab.yaml").launch.slurm
    assert slurm is not None
    check("lab.sh", submission(run_of(slurm, "/runs/first", "/prl")))


@pytest.mark.parametrize("heterogeneous", [True, False])
def test_submission_of_functions(heterogeneous: bool) -> None:
    """Each component's tasks are a step of their own, with every option stated; a component without a function has none."""
    parts = (
        script.Component("train", lead, nodes=2, tasks_per_node=8, cpus_per_task=12, gpus_per_node=8, partition="h200"),
        script.Component("hold", nodes=3, partition="l40"),
        script.Component("serve", lead, nodes=4, gpus_per_node=1, environment={"GREETING": "good day, it's 5%"}, lives=2),
    )
    folder = Path("/shared/it's 100%/jobs")
    job = Submission("two", parts, folder, folder / "batch.log", Path("/"), heterogeneous=heterogeneous, python="python")
    check("functions.sh" if heterogeneous else "functions_homogeneous.sh", submission(job))


def test_one_component_alone_is_no_group() -> None:
    folder = Path("/jobs")
    text = submission(Submission("one", (script.Component("main", lead),), folder, folder / "log", folder))
    assert "hetjob" not in text and "--het-group" not in text


@pytest.mark.parametrize("path", ["/a\\b", "/a\nb"])
def test_paths_that_slurm_reads_otherwise_are_refused(path: str) -> None:
    with pytest.raises(ValueError, match="choose another"):
        submission(run_of(CLUSTER, path, "/"))
    with pytest.raises(ValueError, match="letters, digits"):
        script.Component("a b")


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


@pytest.mark.parametrize(
    ("name", "nodes", "planned", "refused"),
    [
        ("rl_tiny", [2, 2], "inference: 2 engines of 1 GPUs", ()),
        ("rl_glm45_air", [2, 2], "rl_glm45_air on H200", ("model.path: models/GLM-4.5-Air: no such file",)),
        ("rl_glm5", [16, 12], "inference: 6 engines of 16 GPUs", ("inference.replicas: expected a multiple",)),
        ("sft_glm45_air", [4], "", ("sft.data.0.path: data/train.jsonl: no such file",)),
    ],
)
def test_dry_runs_of_the_scripts(
    name: str, nodes: list[int], planned: str, refused: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each prints the text it would submit, the plan, and what is in the way on this machine, where GLM's weights are not."""
    text = Path("slurm", f"{name}.sh").read_text()
    words = shlex.split(text.partition("-m prl.launch ")[2].replace('"$@"', "").replace("\\\n", ""))
    words = ["configs/site/example.yaml" if word.startswith("${PRL_SITE") else word for word in words]
    assert main([*words, f"run.dir={tmp_path}", "--dry-run"]) == (2 if refused else 0)
    out, err = capsys.readouterr()
    assert [int(line.partition("=")[2]) for line in out.splitlines() if line.startswith("#SBATCH --nodes")] == nodes
    assert out.endswith("exit $first\n") and f"folder={tmp_path}/" in out and out.count("#SBATCH hetjob") == len(nodes) - 1
    assert planned in err and all(reason in err for reason in refused) and ("would not be submitted" in err) == bool(refused)
    assert not list(tmp_path.iterdir())
    assert "#SBATCH --no-requeue" in text, "a follower that is run again would submit a second job"
