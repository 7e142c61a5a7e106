"""What is submitted to Slurm and what is run in the job, as text: pure functions, pinned by golden files (tests/slurm/golden).

Every option is stated for every component and on every srun. What is not stated is taken from variables, and in a heterogeneous
job those of component 0 stand in every component's environment.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prl.config.schema import Slurm

COMPONENTS = ("trainer", "inference")
"""Of a run's job, in their order: the batch host is the first one's first node."""
TASK = "prl.launch.slurm.component"
"""The module that every task of a component is."""


@dataclass(frozen=True)
class Component:
    """What one component of a job asks for, and the function that each of its tasks calls.

    Without a function its nodes are held for steps that others start. On `batch_host` the function is called once, by no step,
    on the first component's first node. A component that was killed has the job run again up to `lives` times.
    """

    name: str
    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: int | None = None
    gpus_per_node: int = 0
    memory: str = "0"
    """Of each node, as --mem takes it. Where one component has it, all need it."""
    partition: str | None = None
    time_min: int = 60
    """Slurm enforces the first component's on all."""
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    constraint: str | None = None
    exclusive: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    """For its tasks, beside what the submission has."""
    batch_host: bool = False
    lives: int = 0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", self.name):
            raise ValueError(f"component {self.name!r}: a name of letters, digits, - and _ is expected, its folder has it too")

    @property
    def tasks(self) -> int:
        return 1 if self.batch_host else self.nodes * self.tasks_per_node


@dataclass(frozen=True)
class Submission:
    """One job. Each component's function, results and logs lie in its own folder below `folder`; `log` is what the batch host
    writes, over all starts of the job; `setup` are lines of shell that it runs first.
    """

    name: str
    components: tuple[Component, ...]
    folder: Path
    log: Path
    chdir: Path
    heterogeneous: bool = True
    """False: one job with the nodes of all, in their order."""
    warn_s: int = 120
    """How long before its time limit every component is sent SIGUSR2."""
    setup: tuple[str, ...] = ()
    python: str = sys.executable

    @property
    def groups(self) -> bool:
        """Whether Slurm numbers its components: one alone is an ordinary job."""
        return self.heterogeneous and len(self.components) > 1


def run_job(
    name: str, run: Path, slurm: Slurm, chdir: Path, lead: Callable[[], Any] | None, *, inference: bool = True
) -> Submission:
    """A run's job: the trainer's component calls `lead` on the batch host, inference has nodes for the steps that it starts."""
    parts = []
    for title in COMPONENTS if inference else COMPONENTS[:1]:
        asked = getattr(slurm, title)
        parts.append(
            Component(
                title,
                nodes=asked.nodes,
                cpus_per_task=asked.cpus_per_node,
                gpus_per_node=asked.gpus_per_node,
                memory=asked.memory,
                partition=asked.partition,
                time_min=slurm.time_min,
                account=slurm.account,
                qos=slurm.qos,
                reservation=slurm.reservation,
                constraint=slurm.constraint,
                exclusive=slurm.exclusive,
            )
        )
    parts[0] = replace(parts[0], function=lead, batch_host=True, lives=10)
    return Submission(
        f"prl-{name}",
        tuple(parts),
        folder=run / "slurm",
        log=run / "logs" / "slurm.log",
        chdir=chdir,
        heterogeneous=slurm.heterogeneous,
        warn_s=slurm.warn_s,
        setup=tuple(slurm.setup),
    )


def submission(job: Submission) -> str:
    """The text for sbatch: one heterogeneous job, or one homogeneous with the nodes of all components.

    ValueError where Slurm or the shell would not take a path as it stands.
    """
    for path in (job.folder, job.log, job.chdir):
        if any(character in "\\\n" for character in str(path)):
            raise ValueError(
                f"{str(path)!r}: Slurm reads a backslash or line break in a path as something else; choose another"
            )
    parts = job.components if job.groups else (_joined(job.components),)
    first = [
        f"--job-name={job.name}",
        f"--chdir={job.chdir}",
        f"--output={_literal(job.log)}",
        "--open-mode=append",
        f"--signal=B:USR2@{job.warn_s}",
        "--requeue",
        "--export=ALL",
    ]
    lines, alone = ["#!/bin/bash"], len(parts) == 1 and parts[0].nodes == 1
    for i, part in enumerate(parts):
        lines += ["#SBATCH hetjob"] if i else []
        lines += [f"# component {i}: {part.name}"]
        lines += [f"#SBATCH {_quoted(option)}" for option in [*(first if i == 0 else ()), *_options(part, alone)]]
    return "\n".join([*lines, "", *job.setup, f"folder={shlex.quote(str(job.folder))}", *_BATCH, *_calls(job), *_END]) + "\n"


_BATCH = r"""export SUBMITIT_EXECUTOR=hetslurm
component() {  # NAME TASKS LIVES COMMAND…: unless all have results; its end is written down unless the job ends
  local at="$folder/$1/$SLURM_JOB_ID" told= pid code
  (($2 && $(ls "$at"_*_result.pkl 2>/dev/null | wc -l) == $2)) && exit 0
  rm -f "$at"_ended "$at"_again "$at"_*.save_tmp
  trap 'kill -USR2 $pid 2>/dev/null' USR2; trap told=1 TERM
  "${@:4}" & pid=$!
  while wait $pid; code=$?; kill -0 $pid 2>/dev/null; do :; done
  wait $pid; code=$?
  ((code == 143)) && sleep 1  # SIGTERM may be for the whole job, and come here a moment later
  [[ $told ]] && exit $code
  if ((code > 128 && (code != 143 || $2) && ${SLURM_RESTART_COUNT:-0} < $3)); then
    echo "component $1 was killed (exit code $code): job $SLURM_JOB_ID is run again" >&2
    : >"$at"_again
  fi
  echo $code >"$at"_ended
  exit $code
}
parts=() told= first=0
trap 'kill -USR2 "${parts[@]}" 2>/dev/null' USR2; trap told=1 TERM""".splitlines()
_END = r"""for part in "${parts[@]}"; do
  while wait $part; code=$?; kill -0 $part 2>/dev/null; do :; done
  wait $part; code=$?
  ((first)) || first=$code
done
if [[ ! $told ]] && ls "$folder"/*/"$SLURM_JOB_ID"_again >/dev/null 2>&1; then
  scontrol requeue $SLURM_JOB_ID && sleep 60
fi
exit $first""".splitlines()


def _calls(job: Submission) -> list[str]:
    """The components that have something to run, side by side."""
    lines, before = [], 0
    if not job.groups and any(part.function and not part.batch_host for part in job.components):
        lines.append('nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))')
    for i, part in enumerate(job.components):
        here = f'"$folder"/{part.name}'
        words = [f"component {part.name} {0 if part.batch_host else part.tasks} {part.lives}"]
        if not part.batch_host:
            group, among = (i, None) if job.groups else (None, f'"$(IFS=,; echo "${{nodes[*]:{before}:{part.nodes}}}")"')
            cpus = part.cpus_per_task or 1
            words += ["srun", *_shape(group, part.name, part.nodes, among, part.tasks_per_node, cpus, part.gpus_per_node)]
            # Its ranks are one program: the death of one, or of its node, is the end of all.
            logs = f"{shlex.quote(_literal(job.folder / part.name))}/${{SLURM_JOB_ID}}_%t_log"
            words += [
                "--kill-on-bad-exit=1",
                "--input=none",
                f"--output={logs}.out",
                f"--error={logs}.err",
                "--open-mode=append",
            ]
        if part.environment:
            words += ["env", *(shlex.quote(f"{k}={v}") for k, v in part.environment.items())]
        if part.function is not None:
            lines.append(" ".join([*words, shlex.quote(job.python), "-u", "-m", TASK, here, "& parts+=($!)"]))
        before += part.nodes
    return lines


def _joined(parts: Sequence[Component]) -> Component:
    """One component with everything that each of them needs."""
    cpus = [part.cpus_per_task for part in parts if part.cpus_per_task is not None]
    return replace(
        parts[0],
        name="-and-".join(part.name for part in parts),
        nodes=sum(part.nodes for part in parts),
        tasks_per_node=max(part.tasks_per_node for part in parts),
        gpus_per_node=max(part.gpus_per_node for part in parts),
        cpus_per_task=max(cpus, default=None),
    )


def _options(part: Component, alone: bool) -> list[str]:
    given = {
        "partition": part.partition,
        "account": part.account,
        "qos": part.qos,
        "reservation": part.reservation,
        "constraint": part.constraint,
        "nodes": part.nodes,
        "ntasks-per-node": part.tasks_per_node,
        "cpus-per-task": part.cpus_per_task,
        "gres": f"gpu:{part.gpus_per_node}" if part.gpus_per_node else None,
        "mem": part.memory,
        "time": part.time_min,
    }
    # A dead node ends no component: the supervisor decides what its loss means, and the steps' tasks if it was the batch host.
    # Where there is one node alone nobody is left to notice, but Slurm.
    flags = [*(["--exclusive"] if part.exclusive else []), *([] if alone else ["--no-kill"])]
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
        *_shape(part.group, name, len(nodes), ",".join(nodes), tasks_per_node, cpus_per_task, part.gpus_per_node),
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--input=all",
        "--output=all",
        *command,
    )


def _shape(
    group: int | None, name: str, nodes: int, nodelist: str | None, tasks_per_node: int, cpus_per_task: int, gpus_per_node: int
) -> list[str]:
    return [
        *([] if group is None else [f"--het-group={group}"]),
        f"--job-name={name}",
        f"--nodes={nodes}",
        *([] if nodelist is None else [f"--nodelist={nodelist}"]),
        f"--ntasks={nodes * tasks_per_node}",
        f"--ntasks-per-node={tasks_per_node}",
        "--distribution=block",
        f"--cpus-per-task={cpus_per_task}",
        "--cpu-bind=none",
        "--mem=0",
        f"--gres=gpu:{gpus_per_node}" if gpus_per_node else "--gres=none",
        "--overlap",
        "--wait=0",
        "--mpi=none",
        "--unbuffered",
        "--export=ALL",
    ]
