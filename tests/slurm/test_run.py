"""Whole runs on the local cluster, by `sbatch slurm/rl_tiny.sh`: two trainer nodes, two inference nodes, two replicas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.slurm.lab import Lab
from tests.slurm.runs import Run

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]


def test_ten_steps_over_two_nodes_and_two_replicas(lab: Lab, tmp_path: Path) -> None:
    run = Run(lab, tmp_path, name="my run")
    assert run.code() == 0, run.told()
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
