"""Which stages a configuration has, and which processes a stage is."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

from prl.config.schema import RunConfig
from prl.launch.local import RoleSpec
from prl.launch.supervisor import Limits, Stage
from prl.transport.run_dir import RunDir


def _ranked(role: str, n: int) -> list[str]:
    """Names of the ranks of a role: the first has no number."""
    return [role, *(f"{role}-{i}" for i in range(1, n))]


def stages_of(config: RunConfig, finished: Collection[str] = ()) -> tuple[Stage, ...]:
    """What is left to do, in order: sft, rl, then the control and its evaluation."""
    ranks = config.trainer.ranks
    stages = [
        Stage("rl", frozenset([*_ranked("trainer", ranks), "orchestrator"]), frozenset(_replicas(config))),
    ]
    if config.sft is not None:
        stages.insert(0, Stage("sft", frozenset(_ranked("sft", ranks))))
    if config.control is not None:
        stages += [Stage("control", frozenset(_ranked("control", ranks))), Stage("evaluate", frozenset(["evaluate"]))]
    return tuple(s for s in stages if s.name not in finished)


def _replicas(config: RunConfig) -> list[str]:
    return [f"inference-{i}" for i in range(config.inference.replicas)]


def limits_of(config: RunConfig) -> Limits:
    launch = config.launch
    return Limits(
        launch.start_timeout_s,
        launch.wait_timeout_s,
        launch.stop_timeout_s,
        launch.save_s,
        launch.heartbeat_timeout_s,
        min(launch.replica_heartbeat_s, launch.heartbeat_timeout_s),
        # In lock-step every replica has its share of each round: without one, the run begins the step anew.
        restarts=0 if config.run.deterministic else launch.replica_restarts,
    )


def role_specs(run: RunDir, config: RunConfig, stage: Stage, cores: int) -> Sequence[RoleSpec]:
    """The stage's processes. Threads: `launch.threads`, else the cores divided by the processes, at least one."""
    specs = []
    for name in sorted(stage.roles):
        role, _, index = name.partition("-")
        kind = role if role in ("orchestrator", "inference") else "trainer"
        threads = config.launch.threads.get(kind, max(1, cores // len(stage.roles)))  # type: ignore[call-overload]
        command = (sys.executable, "-m", "prl.launch.role", role, "--run", str(run.root.resolve()), "--index", index or "0")
        specs.append(RoleSpec(name, command, threads))
    return specs
