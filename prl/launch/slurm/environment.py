"""What Slurm's variables say, what must not be handed on of them, and where nodes are reached."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from prl.config.schema import Slurm
from prl.launch.slurm.script import COMPONENTS, Part

_INHERITED = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "PMIX_", "PMI_", "PMI2_", "OMPI_", "PRTE_")
_JOB = re.compile(r"SLURM_CONF|SLURM_CLUSTER_NAME|SLURM_RESTART_COUNT|SLURM_HET_SIZE|SLURM_JOB_?ID(_HET_GROUP_\d+)?")
TIMEOUT_S = 30.0
"""For an answer of Slurm's own commands."""
REQUEUED_S = 60.0
"""How long Slurm may take to end the processes of a job that it was told to requeue."""
ANSWER_S = 5.0
"""For a connection to a node."""


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what an enclosing job, step or MPI launcher has set: sbatch and srun would take it for options."""
    return {k: v for k, v in environment.items() if k == "SLURM_CONF" or not k.startswith(_INHERITED)}


def of_the_job(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that tell srun which job it is in, and no others of Slurm's."""
    return {k: v for k, v in environment.items() if _JOB.fullmatch(k)}


def ask(*words: str) -> str:
    """The answer of a command of Slurm's. OSError with its own words where it fails or says nothing in time."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise OSError(f"{' '.join(words)}: no answer within {TIMEOUT_S:g} s") from None
    if done.returncode:
        raise OSError(f"{' '.join(words)}: exit code {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def hostnames(nodelist: str) -> tuple[str, ...]:
    """The nodes of Slurm's compressed list (`gpu[01-04,07]`)."""
    return tuple(ask("scontrol", "show", "hostnames", nodelist).split())


def addresses(nodes: Sequence[str]) -> dict[str, str]:
    """Node to its IP address on the interface that Slurm reaches it by, resolved here."""
    told = ask("scontrol", "--oneliner", "show", "node", ",".join(nodes))
    found = dict(re.findall(r"^NodeName=(\S+) .*?\bNodeAddr=(\S+)", told, re.M))
    if missing := [node for node in nodes if node not in found]:
        raise OSError(f"scontrol show node names no address of {', '.join(missing)}")
    return {node: socket.gethostbyname(found[node]) for node in nodes}


def silent(of: Mapping[str, str]) -> tuple[str, ...]:
    """Of nodes and their addresses those whose slurmd takes no connection; Slurm itself may notice minutes later."""
    settings = ask("scontrol", "show", "config")
    port = re.search(r"^SlurmdPort\s*=\s*(\d+)", settings, re.M)
    if port is None:
        raise OSError("scontrol show config names no SlurmdPort")

    def answers(address: str) -> bool:
        try:
            socket.create_connection((address, int(port[1])), ANSWER_S).close()
        except OSError:
            return False
        return True

    with ThreadPoolExecutor(max_workers=32) as pool:
        return tuple(node for node, good in zip(of, pool.map(answers, of.values()), strict=True) if not good)


@dataclass(frozen=True)
class Allocation:
    """What this job was given: its id, each component's nodes, and every node's address."""

    job: str
    restarts: int
    parts: Mapping[str, Part]
    addresses: Mapping[str, str]


def allocation(slurm: Slurm, environment: Mapping[str, str] = os.environ, *, inference: bool = True) -> Allocation:
    """Read it on the batch host; without `inference` all nodes are the trainer's. OSError where this is no job, or not the one
    that `slurm` describes.
    """
    job = environment.get("SLURM_JOB_ID")
    if job is None:
        raise OSError("not in a Slurm job: SLURM_JOB_ID is not set; submit the run with python -m prl.launch")
    if grouped := slurm.heterogeneous and inference:
        lists = [environment.get(f"SLURM_JOB_NODELIST_HET_GROUP_{i}") for i in range(len(COMPONENTS))]
        if None in lists:
            raise OSError(f"job {job} is not heterogeneous, which launch.slurm.heterogeneous says; submit it again")
        nodes = [hostnames(names) for names in lists if names]
    elif not inference:
        nodes = [hostnames(environment["SLURM_JOB_NODELIST"]), ()]
    else:
        every, nodes = hostnames(environment["SLURM_JOB_NODELIST"]), []
        for name in COMPONENTS:
            count = getattr(slurm, name).nodes
            nodes.append(every[:count])
            every = every[count:]
    parts = {
        name: Part(i if grouped else None, part, getattr(slurm, name).gpus_per_node)
        for i, (name, part) in enumerate(zip(COMPONENTS, nodes, strict=True))
    }
    everywhere = addresses([node for part in parts.values() for node in part.nodes])
    return Allocation(job, int(environment.get("SLURM_RESTART_COUNT", "0")), parts, everywhere)
