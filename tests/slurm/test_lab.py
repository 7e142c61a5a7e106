"""The local cluster is one: its nodes are apart, and its faults are those of machines and cables."""

from __future__ import annotations

import pytest

from tests.slurm.lab import NODES, Lab, until

pytestmark = pytest.mark.slurm


def test_nodes_have_names_addresses_processes_and_shared_memory_of_their_own(lab: Lab) -> None:
    script = "hostname; hostname -I; ls /dev/shm; touch /dev/shm/$(hostname); ps -e | wc -l"
    for node in NODES:
        name, address, *shared, processes = lab.run("bash", "-c", script, node=node).stdout.split()
        assert (name, address, shared) == (node, lab.address(node), [])
        assert int(processes) < 12
        lab.run("rm", f"/dev/shm/{node}", node=node)


def test_a_job_outlives_slurmd_and_slurmctld_but_not_its_node(lab: Lab) -> None:
    job = lab.run(
        "sbatch", "--parsable", "-p", "infer", "-w", "infer1", "-o", "/dev/null", "--wrap", "sleep 600"
    ).stdout.strip()

    def state() -> str:
        return lab.run("squeue", "-h", "--states=all", "-j", job, "-o", "%T").stdout.strip()

    until("the job", lambda: lab.processes("infer1", "sleep\x00600"), 20)
    lab.stop_slurmd("infer1")
    lab.stop_slurmctld()
    assert not lab.processes("infer1", "slurmd\0-D") and lab.processes("infer1", "sleep\x00600")
    lab.start_slurmctld()
    lab.start_slurmd("infer1")
    assert state() == "RUNNING"
    lab.power_off("infer1")
    assert not lab.processes("infer1", "")
    until("the node's end noticed", lambda: "down" in lab.states()["infer1"], 60)
    lab.run("scancel", job)
    lab.boot("infer1")
    until("the node", lambda: lab.states()["infer1"] == "idle", 30)


def test_a_cut_cable_leaves_processes_and_heals(lab: Lab) -> None:
    def reached() -> bool:
        slurmd = f"</dev/tcp/{lab.address('infer0')}/6818"
        return lab.run("timeout", "2", "bash", "-c", slurmd, node="train0", check=False).returncode == 0

    assert reached()
    lab.cut("infer0")
    assert not reached()
    assert lab.processes("infer0", "slurmd\0-D")
    lab.heal("infer0")
    assert reached()
