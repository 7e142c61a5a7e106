"""sbatch, with what to do where it does not take a job."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping

from prl.launch.slurm.environment import TIMEOUT_S
from prl.launch.slurm.versions import unknown, version

_MENDS = {
    r"invalid account": "set launch.slurm.account (sacctmgr show associations user=$USER lists yours)",
    r"partition": "set launch.slurm.trainer.partition and inference.partition (sinfo lists them)",
    r"qos": "set launch.slurm.qos (sacctmgr show qos)",
    r"reservation": "set launch.slurm.reservation (scontrol show reservation)",
    r"feature": "set launch.slurm.constraint (sinfo --format=%n,%f)",
    r"time limit": "lower launch.slurm.time_min (sinfo --format=%P,%l shows each partition's limit)",
    r"generic resource|gres": "set gpus_per_node of launch.slurm.trainer and inference (sinfo --format=%n,%G)",
    r"node configuration|node count|more processors|memory spec": "ask for nodes, cpus_per_node, memory and gpus_per_node that "
    "the partition has (sinfo --format=%P,%D,%c,%m,%G)",
    r"hetjob|heterogeneous|not supported": "set launch.slurm.heterogeneous to false",
    r"unable to contact|connection refused|socket timed out|zero bytes|slurm_load|resolve": "slurmctld does not answer "
    "(scontrol ping): try again when it does; see with squeue --me first whether the job is there all the same",
    r"limit": "the site's limits refuse it: ask for less, or use another qos",
    r"authentication|munge|credential": "munge does not serve on this machine (munge -n | unmunge): ask the administrator",
}
"""What sbatch says, the first that matches, to what helps."""


def mend(words: str) -> str:
    """What helps against an error of sbatch's; empty where that is not known."""
    return next((help for said, help in _MENDS.items() if re.search(said, words, re.IGNORECASE)), "")


def sbatch(text: str, environment: Mapping[str, str]) -> str:
    """The id of the submitted job. OSError with sbatch's words and the mend where it is not taken or nobody says so in time."""
    path = environment.get("PATH")
    if shutil.which("sbatch", path=path) is None:
        raise OSError("there is no sbatch on this machine: submit from a login node of the cluster, or put Slurm's bin in PATH")
    if missing := unknown(found := version(environment)):
        raise OSError(
            f"Slurm {'.'.join(map(str, found))} does not know {', '.join(missing)}: ask the administrator for a newer one"
        )
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"], input=text, env=dict(environment), capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        name = re.search(r"--job-name=(\S+)", text)
        raise OSError(
            f"sbatch: no answer within {TIMEOUT_S:g} s; the job may have been submitted all the same: look for it with "
            f"squeue --me --name={name[1] if name else ''} before you try again"
        ) from None
    if done.returncode:
        words = " ".join(done.stderr.replace("sbatch: error: ", "").split()) or f"exit code {done.returncode}"
        raise OSError(f"sbatch: {words}" + (f"; {help}" if (help := mend(words)) else ""))
    return done.stdout.strip().partition(";")[0]  # a federation adds the cluster's name
