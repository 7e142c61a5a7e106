"""The plan of a run: what each role needs, how long its step takes, what else would do. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prl.config.schema import RunConfig
from prl.models.spec import ModelSpec
from prl.plan import work
from prl.plan.balance import Rollouts, rollouts
from prl.plan.hardware import Hardware
from prl.plan.memory import Memory, inference_memory
from prl.plan.search import Choice, as_asked, best, choices, nearest
from prl.plan.transfer import Transfer, transfer
from prl.plan.work import Batch, Times

DEFAULT_SAMPLED = 0.5
"""Share of a rollout's tokens that the model wrote where nobody says: assumed, of agents that read as much as they write."""


class PlanError(Exception):
    """Nodes that cannot be shared out as asked."""


@dataclass(frozen=True)
class Plan:
    spec: ModelSpec
    config: RunConfig
    hardware: Hardware
    batch: Batch
    sampled: float
    asked: Choice
    found: Sequence[Choice]
    """Every choice that the rules allow, fastest first."""
    gpus: int
    """Of one engine."""
    engine: Memory
    rollouts: Rollouts
    transfer: Transfer

    @property
    def fine_tuning(self) -> bool:
        """Nothing is sampled: conversations alone are trained on, and no engine is there."""
        return not self.config.envs

    @property
    def peak(self) -> Times:
        return work.times(self.asked.work, self.hardware, work.PEAK)

    @property
    def step_s(self) -> float:
        """The slower role bounds an asynchronous run; a synchronous one waits for both and for the weights."""
        trainer = self.asked.times.serial
        if self.fine_tuning:
            return trainer
        if self.config.orchestrator.synchronous:
            return trainer + self.rollouts.seconds + self.transfer.seconds
        return max(trainer, self.rollouts.seconds)

    @property
    def all_gpus(self) -> int:
        return self.config.trainer.ranks + (0 if self.fine_tuning else self.gpus * self.config.inference.replicas)

    @property
    def mfu(self) -> float:
        """Useful FLOPs over what the trainer's GPUs could do in bf16, at `serial`."""
        return self.asked.work.useful / (self.asked.times.serial * self.hardware.flops.bf16)

    @property
    def problems(self) -> list[str]:
        out = [f"trainer: {self.asked.problem}"] if self.asked.problem else []
        need = self.engine.total
        if need > self.hardware.usable and not self.fine_tuning:
            why = f"inference: a GPU of an engine of {self.gpus} needs {need / 1e9:.1f} GB of {self.hardware.usable / 1e9:.1f}"
            out.append(f"{why} that {self.hardware.name} has to give; {self._engine_mend()}")
        return out

    def _engine_mend(self) -> str:
        gpus = self.gpus
        while gpus < 1024:
            gpus *= 2
            if inference_memory(self.spec, self.config, gpus, self.hardware).total <= self.hardware.usable:
                all_gpus = self.config.trainer.ranks + gpus * self.config.inference.replicas
                nodes, rest = divmod(all_gpus, self.hardware.gpus_per_node)
                said = "other --nodes" if rest else f"--nodes {nodes}"
                return f"nearest that fits: engines of {gpus} GPUs ({said}, or fewer inference.replicas)"
        return "no engine of up to 1024 GPUs fits: lower inference.kv_tokens"

    def record(self) -> dict[str, Any]:
        c, t = self.asked, self.asked.times

        def memory(m: Memory) -> dict[str, Any]:
            return {"device": dict(m.device), "host": dict(m.host), "parts": dict(m.parts), "at": m.phase, "total": m.total}

        def seconds(x: Times) -> dict[str, Any]:
            parts = {"compute": x.compute, "memory": x.memory, "network": x.network, "host_update": x.update}
            return parts | {"floor": x.floor, "serial": x.serial, "bound": x.bound}

        top, w = best(self.found), c.work
        fits = [x for x in self.found[:24] if x.fits]
        return {
            "run": self.config.run.name,
            "hardware": self.hardware.model_dump(),
            "batch": {"rollouts": self.batch.rollouts, "length": self.batch.length, "sampled": self.sampled},
            "trainer": {
                "ranks": self.config.trainer.ranks,
                "mesh": {k: getattr(c.shape, k) for k in ("replicate", "shard", "context", "expert")},
                "memory": memory(c.memory),
                "work": {"flops": w.flops, "useful_flops": w.useful, "memory": w.memory, "link": w.link, "network": w.network}
                | {"pcie": w.pcie, "host": w.host, "micro_batches": w.micro_batches},
                "seconds": seconds(t),
                "seconds_at_peak": seconds(self.peak),
                "mfu": self.mfu,
            },
            "inference": None
            if self.fine_tuning
            else {
                "replicas": self.config.inference.replicas,
                "gpus_of_one": self.gpus,
                "memory": memory(self.engine),
                "sequences": self.rollouts.sequences,
                "seconds_per_token": self.rollouts.step_s,
                "seconds": self.rollouts.seconds,
                "bound": self.rollouts.bound,
            },
            "transfer": None
            if self.fine_tuning
            else {"stored": self.transfer.stored, "read": self.transfer.read, "seconds": self.transfer.seconds},
            "step": {"seconds": self.step_s, "gpu_hours": self.step_s * self.all_gpus / 3600, "gpus": self.all_gpus},
            "problems": self.problems,
            "best": None if top is None else {"changes": top.changes, "seconds": seconds(top.times), "bytes": top.memory.total},
            "fitting": [{"changes": x.changes, "serial": x.times.serial, "bytes": x.memory.total} for x in fits],
        }

    def nearest(self) -> Choice | None:
        return nearest(self.found)


def make(
    spec: ModelSpec,
    config: RunConfig,
    hardware: Hardware,
    *,
    nodes: int | None = None,
    length: int | None = None,
    sampled: float | None = None,
    search: bool = True,
) -> Plan:
    """`nodes`: of the whole run, those that do not train generate; default: a node for each vLLM engine, a GPU for each
    embedded one. `length`: mean tokens of a rollout, default the longest allowed. `search`: look at other choices too.
    Of a configuration without environments it is fine-tuning's plan, on trainer.ranks alone. MeshError, PlanError."""
    per, replicas = hardware.gpus_per_node, config.inference.replicas
    gpus = 1 if config.inference.engine == "embedded" else per
    sft = None if config.envs else config.sft
    if nodes is not None and sft is None:
        left = nodes * per - config.trainer.ranks
        if left < replicas or left % replicas:
            raise PlanError(
                f"--nodes {nodes}: of {nodes * per} GPUs trainer.ranks = {config.trainer.ranks} leave {max(left, 0)}, which "
                f"inference.replicas = {replicas} do not share evenly: change one of the three"
            )
        gpus = left // replicas
    rows, longest = config.orchestrator.batch_size, config.sampling.max_length
    if sft is not None:
        rows, longest = sft.batch_size, sft.max_length or config.trainer.pack_tokens
        config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"optim": sft.optim})})
    batch = Batch(rows, min(length or longest, longest))
    share = DEFAULT_SAMPLED if sampled is None else sampled
    asked = as_asked(spec, config, hardware, batch)
    return Plan(
        spec,
        config,
        hardware,
        batch,
        share,
        asked,
        choices(spec, config, hardware, batch) if search else [],
        gpus,
        inference_memory(spec, config, gpus, hardware),
        rollouts(spec, config, gpus, hardware, batch, share),
        transfer(spec, config, asked.shape, gpus, hardware),
    )
