"""What is submitted to Slurm and what is run in the job, as text: pure functions, pinned by golden files (tests/slurm/golden).

Every option is stated for every component and on every srun. What is not stated is taken from variables, and in a heterogeneous
job those of component 0 stand in every component's environment.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prl.config.schema import Component, Slurm

COMPONENTS = ("trainer", "inference")
"""In the order of the job: the batch host is the first one's first node."""


@dataclass(frozen=True)
class Submission:
    """One job. `run` is its folder, `chdir` where it starts, `body` the lines that the batch host runs."""

    name: str
    run: Path
    chdir: Path
    slurm: Slurm
    body: tuple[str, ...]

    @property
    def log(self) -> Path:
        """What the batch host writes, over all starts of the job."""
        return self.run / "logs" / "slurm.log"


def submission(job: Submission) -> str:
    """The text for sbatch: one heterogeneous job, or one with the nodes of all components where the site wants that."""
    slurm = job.slurm
    parts = [getattr(slurm, name) for name in COMPONENTS] if slurm.heterogeneous else [_joined(slurm)]
    titles = COMPONENTS if slurm.heterogeneous else (" and ".join(COMPONENTS),)
    first = [
        f"--job-name={job.name}",
        f"--chdir={job.chdir}",
        f"--output={_literal(job.log)}",
        "--open-mode=append",
        f"--signal=B:USR2@{slurm.warn_s}",
        "--requeue",
        "--export=ALL",
    ]
    lines = ["#!/bin/bash"]
    for i, (title, part) in enumerate(zip(titles, parts, strict=True)):
        lines += ["#SBATCH hetjob"] if i else []
        lines += [f"# component {i}: {title}"]
        lines += [f"#SBATCH {_quoted(option)}" for option in [*(first if i == 0 else ()), *_options(slurm, part)]]
    return "\n".join([*lines, "", *slurm.setup, *job.body]) + "\n"


def batch(command: Sequence[str]) -> tuple[str, ...]:
    """The batch host's lines: run the command, pass on the time limit's warning, and have the job run again if it was killed.

    A command that fails by itself has decided about that itself. SIGTERM is Slurm ending the job, and reaches the command too.
    """
    return (
        "trap 'kill -USR2 $lead' USR2; trap : TERM",
        f"{shlex.join(command)} &",
        "lead=$!",
        "while wait $lead; code=$?; kill -0 $lead 2>/dev/null; do :; done",
        "wait $lead; code=$?",
        "if ((code > 128 && code != 143 && ${SLURM_RESTART_COUNT:-0} < 10)); then",
        '  echo "the supervisor was killed (exit code $code): job $SLURM_JOB_ID is run again" >&2',
        "  scontrol requeue $SLURM_JOB_ID && sleep 60",
        "fi",
        "exit $code",
    )


def _joined(slurm: Slurm) -> Component:
    """One component with everything that each of them needs."""
    parts: list[Component] = [getattr(slurm, name) for name in COMPONENTS]
    cpus = [p.cpus_per_node for p in parts if p.cpus_per_node is not None]
    return Component(
        nodes=sum(p.nodes for p in parts),
        partition=parts[0].partition,
        gpus_per_node=max(p.gpus_per_node for p in parts),
        cpus_per_node=max(cpus, default=None),
        memory=parts[0].memory,
    )


def _options(slurm: Slurm, part: Component) -> list[str]:
    given = {
        "partition": part.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "reservation": slurm.reservation,
        "constraint": slurm.constraint,
        "nodes": part.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": part.cpus_per_node,
        "gres": f"gpu:{part.gpus_per_node}" if part.gpus_per_node else None,
        "mem": part.memory,
        "time": slurm.time_min,
    }
    # A dead node ends no component: the supervisor decides what its loss means, and the steps' tasks if it was the batch host.
    flags = [*(["--exclusive"] if slurm.exclusive else []), "--no-kill"]
    return [*(f"--{name}={value}" for name, value in given.items() if value is not None), *flags]


def _quoted(option: str) -> str:
    """As sbatch reads a directive: like a shell, without variables."""
    return shlex.quote(option) if set(option) & set(" \t'\"\\#") else option


def _literal(path: Path) -> str:
    """A path in which sbatch and srun replace nothing."""
    return str(path).replace("%", "%%")


@dataclass(frozen=True)
class Part:
    """The nodes of one component in a running job; `group` is its number in a heterogeneous one."""

    group: int | None
    nodes: tuple[str, ...]
    gpus_per_node: int = 0


def srun(
    part: Part, *, name: str, nodes: Sequence[str], tasks_per_node: int, cpus_per_task: int, command: Sequence[str]
) -> tuple[str, ...]:
    """A step on some nodes of a component, which shares them with other steps and outlives the death of any of them.

    Its standard input goes to every task, their standard output comes back unbuffered.
    """
    return (
        "srun",
        *(() if part.group is None else (f"--het-group={part.group}",)),
        f"--job-name={name}",
        f"--nodes={len(nodes)}",
        f"--nodelist={','.join(nodes)}",
        f"--ntasks={len(nodes) * tasks_per_node}",
        f"--ntasks-per-node={tasks_per_node}",
        "--distribution=block",
        f"--cpus-per-task={cpus_per_task}",
        "--cpu-bind=none",
        "--mem=0",
        f"--gres=gpu:{part.gpus_per_node}" if part.gpus_per_node else "--gres=none",
        "--overlap",
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--mpi=none",
        "--input=all",
        "--output=all",
        "--unbuffered",
        "--export=ALL",
        *command,
    )
