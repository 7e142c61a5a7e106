"""What the doctor makes of what it has measured: pure functions, each finding with its mend."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from prl.config.schema import Slurm
from prl.launch.slurm.script import COMPONENTS, Part

TESTED = (22, 5)
"""The version of Slurm that prl is tested on."""
SKEW_WARN_S, SKEW_STOP_S = 0.5, 60.0
"""Times of several nodes are compared where a first cause is told from what followed; Slurm itself refuses minutes."""
SEEN_WARN_S = 2.0
"""How late a node may see another one's file: heartbeats and addresses are files."""
GIB = 1 << 30
ROOM = {"run": (1 * GIB, 20 * GIB), "tmp": (GIB // 8, 1 * GIB), "shm": (GIB // 16, GIB // 2)}
"""Free space that stops a run, and that is little."""
OPEN_FILES = (256, 4096)

Node = Mapping[str, Any]
"""What probe.facts says."""


class Finding(msgspec.Struct, frozen=True):
    """`stop`: a run would not begin or not survive; `warn`: it would, with less. Both have a mend."""

    level: Literal["ok", "warn", "stop"]
    what: str
    mend: str = ""


def settings(text: str) -> dict[str, str]:
    """`Name = value` lines, as `scontrol show config` prints them."""
    return {k: v.strip() for k, v in re.findall(r"^(\S+)\s*=[ \t]*(.*)$", text, re.M)}


def partitions(text: str) -> dict[str, dict[str, str]]:
    """Partitions by name, from `scontrol --oneliner show partition`."""
    lines = [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in text.splitlines()]
    return {line["PartitionName"]: line for line in lines if "PartitionName" in line}


def of_cluster(slurm: Slurm, config: Mapping[str, str], there: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    """Slurm's own settings, before anything is submitted."""
    version = config.get("SLURM_VERSION", "")
    number = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if number < TESTED:
        yield Finding("warn", f"Slurm {version or 'of unknown version'}", "prl is tested on 22.05: ask for that or a later one")
    else:
        later = "" if number == TESTED else "; prl is tested on 22.05"
        yield Finding("ok", f"Slurm {version}{later}")
    scheduler = config.get("SchedulerType", "")
    if scheduler == "sched/backfill":
        yield Finding("ok", f"scheduler {scheduler}, which starts heterogeneous jobs")
    elif slurm.heterogeneous:
        mend = "ask for SchedulerType=sched/backfill, or set launch.slurm.heterogeneous: false in the site file"
        yield Finding(
            "stop", f"scheduler {scheduler}: heterogeneous jobs, which backfill alone starts, would wait for ever", mend
        )
    if config.get("SlurmdTimeout", "").split(" ")[0] == "0":
        yield Finding("warn", "SlurmdTimeout is 0: Slurm never takes a dead node for dead", "ask for SlurmdTimeout=300")
    kill = re.match(r"\d+", config.get("KillWait", ""))
    if kill and int(kill[0]) < 10:
        mend = "ask for KillWait=30: a cancelled or preempted run saves in that time"
        yield Finding("warn", f"KillWait is {kill[0]} s", mend)
    named = {getattr(slurm, name).partition for name in COMPONENTS}
    default = next((name for name, p in there.items() if p.get("Default") == "YES"), None)
    for title in COMPONENTS if slurm.heterogeneous else COMPONENTS[:1]:
        yield from _of_partition(slurm, title, getattr(slurm, title).partition or default, there)
    if not slurm.heterogeneous and len(named) > 1:
        mend = "without heterogeneous jobs all nodes are of launch.slurm.trainer.partition: name one with enough of them"
        yield Finding("warn", "one homogeneous job, two partitions in the site file", mend)


def _of_partition(slurm: Slurm, title: str, name: str | None, there: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    key = f"launch.slurm.{title}.partition"
    if name is None:
        yield Finding("stop", f"{key} is not set, and the cluster has no default", f"set it: {', '.join(sorted(there))}")
        return
    if (partition := there.get(name)) is None:
        yield Finding("stop", f"partition {name} is not there", f"set {key} to one of {', '.join(sorted(there))}")
        return
    nodes = sum(getattr(slurm, c).nodes for c in COMPONENTS) if not slurm.heterogeneous else getattr(slurm, title).nodes
    sound = True
    if partition.get("State") != "UP":
        sound = False
        yield Finding("stop", f"partition {name} is {partition.get('State')}", f"wait until it is up, or set {key}")
    for limit in ("TotalNodes", "MaxNodes"):
        if (most := partition.get(limit, "UNLIMITED")).isdecimal() and int(most) < nodes:
            sound = False
            yield Finding(
                "stop", f"partition {name}: {limit} is {most}, {nodes} asked for", f"ask for fewer nodes, or set {key}"
            )
    longest = minutes(partition.get("MaxTime", "UNLIMITED"))
    if longest is not None and longest < slurm.time_min:
        sound = False
        mend = "set launch.slurm.time_min to no more; a run goes on after its time limit"
        yield Finding("stop", f"partition {name}: MaxTime is {longest} min, {slurm.time_min} min asked for", mend)
    if sound:
        yield Finding("ok", f"partition {name}: {nodes} of {partition.get('TotalNodes')} nodes asked for")


def minutes(text: str) -> int | None:
    """Slurm's `days-hours[:minutes[:seconds]]`, `hours:minutes:seconds` or `minutes[:seconds]`; None without a limit."""
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", text):
        return None
    days, dash, rest = text.rpartition("-")
    numbers = [int(n) for n in rest.split(":")]
    if not dash and len(numbers) < 3:
        return numbers[0]
    return int(days or 0) * 1440 + numbers[0] * 60 + (numbers[1] if len(numbers) > 1 else 0)


def of_nodes(parts: Mapping[str, Part], nodes: Mapping[str, Node]) -> Iterator[Finding]:
    """Limits, space and GPUs of the nodes that answered; `nodes` holds probe.facts, or {"error": …}."""
    before, found = 0, 0
    sound = True
    for part in parts.values():
        for name in part.nodes:
            for finding in _of_node(name, part, nodes[name]):
                sound = False
                yield finding
            gpus = nodes[name].get("gpus", [])
            before, found = before + part.gpus_per_node, found + len(gpus)
    for key in ("python", "user"):
        if len(values := {str(node[key]) for node in nodes.values() if key in node}) > 1:
            yield Finding("stop", f"nodes differ in {key}: {', '.join(sorted(values))}", "use one installation on all of them")
    drivers = {gpu[1] for node in nodes.values() for gpu in node.get("gpus", []) if len(gpu) > 1}
    if len(drivers) > 1:
        yield Finding("warn", f"nodes have several GPU drivers: {', '.join(sorted(drivers))}", "ask for one driver on all")
    if sound:
        yield Finding("ok", f"limits and free space of {len(nodes)} nodes")
        if before:
            yield Finding("ok", f"{found} GPUs, driver {', '.join(drivers)}")
        runtimes = set.intersection(*(set(node["containers"]) for node in nodes.values()))
        yield Finding("ok", f"container runtimes on every node: {', '.join(sorted(runtimes)) or 'none'} (prl runs without one)")


def _of_node(name: str, part: Part, node: Node) -> Iterator[Finding]:
    if "error" in node:
        yield Finding(
            "stop", f"{name}: {node['error']}", "mend what it says, or leave the node out with launch.slurm.constraint"
        )
        return
    soft, hard = node["limits"]["nofile"]
    if 0 <= soft < OPEN_FILES[1]:
        mend = f"ask for LimitNOFILE={OPEN_FILES[1]} of slurmd (the hard limit is {hard})"
        yield Finding("stop" if soft < OPEN_FILES[0] else "warn", f"{name}: {soft} open files are allowed", mend)
    if part.gpus_per_node and node["limits"]["memlock"][0] != -1:
        mend = "ask for LimitMEMLOCK=infinity of slurmd: NCCL pins memory for InfiniBand"
        yield Finding("warn", f"{name}: locked memory is limited to {node['limits']['memlock'][0]} bytes", mend)
    for place, (least, little) in ROOM.items():
        if (free := node["free"].get(place)) is None or free >= little:
            continue
        what = {"run": "the run's folder", "tmp": "the folder of temporary files", "shm": "/dev/shm"}[place]
        mend = f"free some; {little / GIB:.3g} GiB are enough to begin with"
        yield Finding("stop" if free < least else "warn", f"{name}: {free / GIB:.2g} GiB are free in {what}", mend)
    if len(node["gpus"]) < part.gpus_per_node:
        mend = "set gpus_per_node to what the nodes have, or ask why nvidia-smi does not show them"
        yield Finding("stop", f"{name}: {len(node['gpus'])} GPUs, {part.gpus_per_node} expected", mend)


def of_software(parts: Mapping[str, Part], nodes: Mapping[str, Node]) -> Iterator[Finding]:
    """`nodes` holds probe.software, or {"error": …}."""
    sound = True
    for part in parts.values():
        for name in part.nodes:
            node = nodes[name]
            if "error" in node:
                sound = False
                mend = "install prl where all nodes see it, and let launch.slurm.setup load what it needs"
                yield Finding("stop", f"{name}: prl cannot be imported: {node['error']}", mend)
            elif node["gpus"] < part.gpus_per_node:
                sound = False
                mend = f"a driver that can CUDA {node['cuda']}, or a torch built for the driver there is"
                yield Finding("stop", f"{name}: torch sees {node['gpus']} GPUs, {part.gpus_per_node} expected", mend)
    versions = {f"{node['torch']} (CUDA {node['cuda']})" for node in nodes.values() if "torch" in node}
    if len(versions) > 1:
        yield Finding("stop", f"nodes have several torch: {', '.join(sorted(versions))}", "use one installation on all of them")
    elif sound:
        yield Finding("ok", f"prl with torch {', '.join(versions)} on every node")


def of_clocks(skews: Mapping[str, float]) -> Iterator[Finding]:
    """Seconds by which each node's clock is ahead of the batch host's."""
    for name, skew in skews.items():
        if abs(skew) > SKEW_WARN_S:
            words = f"{name}'s clock is {abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'}"
            yield Finding(
                "stop" if abs(skew) > SKEW_STOP_S else "warn", words, f"have {name} synchronise its clock (NTP, chrony)"
            )
    if skews and all(abs(skew) <= SKEW_WARN_S for skew in skews.values()):
        yield Finding("ok", f"clocks agree within {max(map(abs, skews.values())):.2g} s")


def worst(findings: list[Finding]) -> int:
    """The exit code."""
    return int(any(finding.level == "stop" for finding in findings))
