"""Which meshes, offloads and recomputations fit a machine, the fastest, and the nearest to what was asked. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from prl.config.mesh import MeshError, MeshShape, problems, resolve
from prl.config.rules import broken_rules
from prl.config.schema import RunConfig
from prl.models.spec import ModelSpec, read_spec
from prl.plan import work
from prl.plan.hardware import Hardware, find, table
from prl.plan.memory import Memory, trainer_memory
from prl.plan.weights import BYTES, Weight, weights
from prl.plan.work import Batch, Times

MORE = (2, 4, 8)
"""Times the ranks that are tried where nothing fits."""


@dataclass(frozen=True)
class Choice:
    """One way to train."""

    spec: ModelSpec
    config: RunConfig
    shape: MeshShape
    hardware: Hardware
    batch: Batch
    changes: tuple[str, ...] = ()
    """`key=value` of what differs from what was asked."""
    held: Sequence[Weight] | None = None
    """Its weights, where they are at hand."""

    @cached_property
    def memory(self) -> Memory:
        return trainer_memory(self.spec, self.config, self.shape, self.hardware)

    @cached_property
    def times(self) -> Times:
        return work.times(self.work, self.hardware)

    @cached_property
    def work(self) -> work.Work:
        return work.training(self.spec, self.config, self.shape, self.hardware, self.batch, self.held)

    @property
    def fits(self) -> bool:
        return not self.hopeless and not self.problem

    @property
    def hopeless(self) -> bool:
        """What it needs without doubt is too much: parts of gradients and masters, and the blocks' inputs."""
        trained = self.held or ()
        copies = 0 if self.config.trainer.offload == "parameters" else 2
        least = copies * sum(w.shard * w.master for w in trained if w.trained)
        if not self.config.trainer.offload_activations:
            row = self.config.trainer.pack_tokens // self.shape.context
            least += row * self.spec.hidden_size * BYTES[self.config.model.dtype] * self.spec.n_layers
        return least > self.hardware.usable

    @property
    def problem(self) -> str:
        """Why it does not fit; empty where it does."""
        device, host = self.memory.total, self.memory.host_total
        if self.hardware.kind == "cpu":
            device, host = device + host, 0
        if device > self.hardware.usable:
            return (
                f"a rank needs {device / 1e9:.1f} GB of {self.hardware.usable / 1e9:.1f} that {self.hardware.name} has to give"
            )
        if host > self.hardware.host_usable:
            return f"a rank keeps {host / 1e9:.1f} GB on the host, of {self.hardware.host_usable / 1e9:.1f} that are its part"
        return ""


def changed(config: RunConfig, trainer: dict[str, Any], mesh: dict[str, Any], optim: dict[str, Any] | None = None) -> RunConfig:
    t = config.trainer
    update = trainer | {"mesh": t.mesh.model_copy(update=mesh), "optim": t.optim.model_copy(update=optim or {})}
    return config.model_copy(update={"trainer": t.model_copy(update=update)})


def as_asked(spec: ModelSpec, config: RunConfig, hardware: Hardware, batch: Batch) -> Choice:
    """What the configuration says, `auto` filled in. MeshError where its rules do not hold."""
    return Choice(spec, config, shape_for(spec, config, hardware), hardware, batch)


def shape_for(spec: ModelSpec, config: RunConfig, hardware: Hardware) -> MeshShape:
    """The mesh with `auto` filled in: the smallest cp, then the largest ep, that fit; where none does, the one that needs the
    least memory. MeshError where a rule does not hold."""
    trainer = config.trainer
    first = resolve(trainer, spec.n_experts)
    if hardware.kind == "cpu" or "auto" not in (trainer.mesh.cp, trainer.mesh.ep):
        return first
    found = []
    for cp, ep in _meshes(spec, config, hardware):
        if trainer.mesh.cp in ("auto", cp) and trainer.mesh.ep in ("auto", ep):
            shape = resolve(changed(config, {}, {"cp": cp, "ep": ep}).trainer, spec.n_experts)
            memory = trainer_memory(spec, config, shape, hardware)
            if memory.total <= hardware.usable and memory.host_total <= hardware.host_usable:
                return shape
            found.append((memory.total, shape))
    return min(found, key=lambda f: f[0])[1] if found else first


def _meshes(spec: ModelSpec, config: RunConfig, hardware: Hardware) -> Iterator[tuple[int, int]]:
    """(cp, ep) that the rules allow, the smallest cp and the largest ep first. cp stays in a node; compiled blocks have 1."""
    divisors = [n for n in range(1, config.trainer.ranks + 1) if config.trainer.ranks % n == 0]
    for cp in divisors if not config.trainer.compile else [1]:
        heads = 1 if spec.architecture == "glm_moe_dsa" else spec.raw["num_attention_heads"]
        if cp > max(hardware.gpus_per_node, 1) or (heads > 1 and heads % cp):
            continue
        for ep in reversed(divisors):
            if (ep == 1 or spec.n_experts) and not problems(changed(config, {}, {"cp": cp, "ep": ep}).trainer, spec.n_experts):
                yield cp, ep


def choices(spec: ModelSpec, config: RunConfig, hardware: Hardware, batch: Batch) -> list[Choice]:
    """All that the rules allow, for the ranks and the precision asked; fastest first."""
    asked = as_asked(spec, config, hardware, batch)
    out = []
    for cp, ep in _meshes(spec, config, hardware):
        shape = resolve(changed(config, {}, {"cp": cp, "ep": ep}).trainer, spec.n_experts)
        held = weights(spec, config, shape)
        for offload in ("none", "optimizer", "parameters"):
            for recompute, waiting in (("none", 0), ("selective", 0), ("full", 0), ("full", 4)):
                keys = {"offload": offload, "recompute": recompute, "offload_activations": waiting}
                new = changed(config, keys, {"cp": cp, "ep": ep})
                if set(broken_rules(new)) - set(broken_rules(config)):
                    continue
                said = {
                    "trainer.mesh.cp": (asked.shape.context, cp),
                    "trainer.mesh.ep": (asked.shape.expert, ep),
                    "trainer.offload": (config.trainer.offload, offload),
                    "trainer.recompute": (config.trainer.recompute, recompute),
                    "trainer.offload_activations": (config.trainer.offload_activations, waiting),
                }
                changes = tuple(f"{key}={b}" for key, (a, b) in said.items() if a != b)
                out.append(Choice(spec, new, shape, hardware, batch, changes, held))
    return sorted(out, key=lambda c: (c.times.serial, len(c.changes)))


def best(found: Sequence[Choice]) -> Choice | None:
    """The fastest that fits."""
    return next((c for c in found if c.fits), None)


def nearest(found: Sequence[Choice]) -> Choice | None:
    """What fits with the fewest changes, of those the fastest; where nothing does, with more ranks."""
    if not found:
        return None
    near = next((c for c in sorted(found, key=lambda c: len(c.changes)) if c.fits), None)
    if near is not None:
        return near
    first = found[0]
    for more in MORE:
        ranks = first.config.trainer.ranks * more
        wider = first.config.model_copy(update={"trainer": first.config.trainer.model_copy(update={"ranks": ranks})})
        try:
            again = best(choices(first.spec, wider, first.hardware, first.batch))
        except MeshError:
            continue
        if again is not None:
            t = again.config.trainer
            keys: dict[str, object] = {"ranks": ranks, "mesh.cp": again.shape.context, "mesh.ep": again.shape.expert}
            keys |= {"offload": t.offload, "recompute": t.recompute}
            keys |= {"offload_activations": t.offload_activations} if t.offload_activations else {}
            said = tuple(f"trainer.{k}={v}" for k, v in keys.items())
            return Choice(again.spec, again.config, again.shape, again.hardware, again.batch, said)
    return None


def here() -> Hardware:
    """The table's row of this machine's GPUs; without them, or for unknown ones, a CPU's, for which `auto` is the old rule."""
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        model = next((line for line in file.read_text().splitlines() if line.startswith("Model:")), "")
        for name in table():
            if name in model:
                return find(name)
    return find("cpu")


def shape_here(config: RunConfig) -> MeshShape:
    """`shape_for` this machine and the configuration's model."""
    return shape_for(read_spec(config.model.path or config.model.architecture or {}), config, here())
