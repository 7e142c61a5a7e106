"""What depends on Slurm's version of all that prl submits, reads and asks for: since when it is there, and how it was before.

Everything was run on 22.05. What is said of other versions is taken from Slurm's release notes and manuals, and was not run.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from prl.launch.slurm.environment import TIMEOUT_S

RUN_ON = (22, 5)
"""The version that all of prl's tests on a cluster run on."""


@dataclass(frozen=True)
class Option:
    """`since`: the first version that has it in this spelling; `note`: what others do."""

    where: str
    name: str
    since: tuple[int, int]
    note: str


OPTIONS = (
    Option("sbatch", "#SBATCH hetjob", (20, 2), "before: #SBATCH packjob"),
    Option("srun", "--het-group", (20, 2), "before: --pack-group"),
    Option("batch host", "SLURM_JOB_NODELIST_HET_GROUP_n", (20, 2), "before: SLURM_JOB_NODELIST_PACK_GROUP_n"),
    Option("srun", "--overlap", (20, 11), "before: steps share their job's resources without being asked"),
    Option("srun", "--cpus-per-task", (2, 0), "stated: SLURM_CPUS_PER_TASK counts for others, not for 22.05 and 23.02"),
)
"""Whatever else stands in script.py is older than all of these, and the same in all."""


def parse(words: str) -> tuple[int, int]:
    """The version in `slurm 22.05.8`. OSError where there is none."""
    found = re.search(r"(\d+)\.(\d+)", words)
    if found is None:
        raise OSError(f"sbatch --version says {words.strip()!r}: expected a version, as in slurm 22.05.8")
    return int(found[1]), int(found[2])


def version(environment: Mapping[str, str]) -> tuple[int, int]:
    """Of the Slurm whose commands are in PATH. OSError where it does not say."""
    words = ["sbatch", "--version"]
    try:
        done = subprocess.run(words, env=dict(environment), capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise OSError(f"{' '.join(words)}: no answer within {TIMEOUT_S:g} s") from None
    if done.returncode:
        raise OSError(f"{' '.join(words)}: exit code {done.returncode}: {done.stderr.strip()}")
    return parse(done.stdout)


def unknown(found: tuple[int, int]) -> tuple[str, ...]:
    """What prl needs and this version does not have."""
    return tuple(f"{option.where} {option.name}" for option in OPTIONS if found < option.since)
