"""Whole runs on the local cluster, by `sbatch slurm/rl_tiny.sh`: two trainer nodes, two inference nodes, two replicas."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.slurm.lab import Lab, clean
from tests.slurm.runs import ROOT, SITE, Run

HOSTILE = "ALL,SBATCH_PARTITION=nonsense,SBATCH_EXCLUSIVE=1,SLURM_CPUS_PER_TASK=7,SLURM_MEM_PER_CPU=9,PMIX_RANK=3"

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]


def test_ten_steps_over_two_nodes_and_two_replicas(lab: Lab, tmp_path: Path) -> None:
    """A second run at the same time, on the same nodes, is one homogeneous job; both are submitted from inside a job, the first
    with variables that would be options.
    """
    run = Run(lab, tmp_path, name="my run", export=HOSTILE)
    everywhere = "launch.slurm.trainer.partition=all"
    odd = tmp_path / "100% it's"
    other = Run(lab, odd, "launch.slurm.heterogeneous=false", everywhere, name="homogeneous", log=tmp_path)
    assert run.code() == 0, run.told()
    assert other.code() == 0, other.told()
    other.assert_whole(10)
    assert f"job {other.job}: trainer on infer0 infer1, inference on train0 train1" in other.told()
    assert "HetJobId" not in lab.run("scontrol", "show", "job", other.job).stdout
    run.assert_nothing_left()
    run.assert_whole(10)
    result = json.loads((run.dir / "result.json").read_text())
    assert result == {"job": run.job, "restarts": 0, "code": 0, "cause": ""}
    told = run.told()
    assert f"job {run.job}: trainer on train0 train1, inference on infer0 infer1" in told
    assert "10 of 10 steps" in told and (run.dir / "report.html").exists()
    records = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    assert {r["role"] for r in records if r["kind"] == "engine" and r["generated"] > 0} == {"inference-0", "inference-1"}
    hosts = {path.stem: json.loads(path.read_text())["host"] for path in (run.dir / "rendezvous").iterdir()}
    assert hosts == {
        "trainer-store": lab.address("train0"),
        "orchestrator": lab.address("train0"),
        "inference-0": lab.address("infer0"),
        "inference-1": lab.address("infer1"),
    }, "roles listen on the job's interface"


def test_a_warm_start_alone_has_trainer_nodes_alone(lab: Lab, tmp_path: Path) -> None:
    given = (f"run.dir={tmp_path}", "run.name=warm", "sft.steps=3", "sft.batch_size=8", "sft.examples=64")
    words = ("-m", "prl.launch", "configs/slurm_tiny.yaml", "--site", SITE, "--sft", *given)
    env = clean() | {"PYTHONPATH": str(ROOT)}
    done = lab.run(sys.executable, *words, cwd=ROOT, env=env, check=False, timeout_s=240)
    assert done.returncode == 0, done.stderr
    model = tmp_path / "warm" / "sft" / "model"
    assert (model / "config.json").is_file() and f"{model}\n" in done.stdout
    assert ": trainer on train0 train1\n" in done.stdout
