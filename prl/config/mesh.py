"""Who the trainer's ranks are to one another: the one place that states the mesh and its rules. Free of torch.

ranks = replicate × shard × context, the context innermost: rank = (copy · shard + part) · context + place.

* Dense parameters are sharded over the shard × context ranks of each of the `replicate` copies (HSDP where there are several).
* Each group of `context` neighbours shares one stream of micro-batches, every row cut between them.
* Experts borrow these ranks: each group of `expert` neighbours holds every expert once, and the shard × context / expert
  ranks of a copy that hold the same ones shard them.
"""

from __future__ import annotations

from dataclasses import dataclass

from prl.config.named import SetupError
from prl.config.schema import Trainer

DEEPEP_RANKS = {2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160}
"""Groups that DeepEP has settings for."""


class MeshError(SetupError):
    """Ranks that cannot be laid out as the configuration asks: every broken rule with what would fit."""


@dataclass(frozen=True, slots=True)
class MeshShape:
    replicate: int = 1
    shard: int = 1
    context: int = 1
    expert: int = 1

    @property
    def world(self) -> int:
        return self.replicate * self.shard * self.context

    @property
    def data(self) -> int:
        """Streams of micro-batches."""
        return self.replicate * self.shard

    @property
    def fsdp(self) -> int:
        """Ranks that share one copy of the dense parameters."""
        return self.shard * self.context

    @property
    def expert_fsdp(self) -> int:
        """Ranks that share one copy of the same experts."""
        return self.fsdp // self.expert


def data_ranks(trainer: Trainer) -> int:
    """Streams of micro-batches: `MeshShape.data`, which needs no model."""
    return trainer.ranks // _context(trainer)


def problems(trainer: Trainer, n_experts: int) -> list[tuple[str, str]]:
    """(path below `trainer`, message) of every rule that does not hold; `n_experts` 0 for a dense model."""
    ranks, mesh, context = trainer.ranks, trainer.mesh, _context(trainer)
    out = []
    if ranks % context:
        out.append(("mesh.cp", f"expected a divisor of trainer.ranks = {ranks}{_near(ranks, context)}, got {context}"))
    elif ranks // context % mesh.replicate:
        streams = ranks // context
        out.append(
            (
                "mesh.replicate",
                f"expected a divisor of ranks / cp = {streams}{_near(streams, mesh.replicate)}, got {mesh.replicate}",
            )
        )
    if mesh.ep == "auto" or mesh.ep == 1:
        return out or _fp8_problems(trainer, n_experts)
    if not n_experts:
        out.append(("mesh.ep", f"the model has no experts to spread over {mesh.ep} ranks: expected 1 or auto"))
    elif n_experts % mesh.ep:
        near = _near(n_experts, mesh.ep)
        out.append(("mesh.ep", f"expected a divisor of the model's {n_experts} experts{near}, got {mesh.ep}"))
    if not out and (copy := ranks // mesh.replicate) % mesh.ep:
        near = _near(copy, mesh.ep)
        out.append(("mesh.ep", f"expected a divisor of the {copy} ranks of a copy (ranks / replicate){near}, got {mesh.ep}"))
    if mesh.dispatcher == "deepep" and mesh.ep not in DEEPEP_RANKS:
        known = ", ".join(map(str, sorted(DEEPEP_RANKS)))
        out.append(("mesh.ep", f"the dispatcher deepep knows groups of {known} ranks, got {mesh.ep}"))
    return out or _fp8_problems(trainer, n_experts)


def _fp8_problems(trainer: Trainer, n_experts: int) -> list[tuple[str, str]]:
    """Ranks gather codes of whole experts, as many from each. Of a mesh without other problems."""
    shape = _shape(trainer, n_experts)
    if trainer.precision != "fp8" or not n_experts or not n_experts // shape.expert % shape.expert_fsdp:
        return []
    copies = f"{n_experts // shape.expert} experts of a rank (experts / ep) over {shape.expert_fsdp} (ranks / replicate / ep)"
    return [("mesh", f"fp8 shares whole experts evenly, and cannot share the {copies}: change ranks, replicate or ep")]


def resolve(trainer: Trainer, n_experts: int) -> MeshShape:
    """The mesh with `auto` filled in: the smallest cp, then the largest ep. MeshError where a rule does not hold."""
    if found := problems(trainer, n_experts):
        raise MeshError("\n".join(f"trainer.{path}: {message}" for path, message in found))
    return _shape(trainer, n_experts)


def _shape(trainer: Trainer, n_experts: int) -> MeshShape:
    context, replicate, ep = _context(trainer), trainer.mesh.replicate, trainer.mesh.ep
    copy = trainer.ranks // replicate
    fitting = [n for n in _divisors(copy) if n_experts % n == 0] if n_experts else [1]
    if trainer.mesh.dispatcher == "deepep":
        fitting = [n for n in fitting if n == 1 or n in DEEPEP_RANKS]
    return MeshShape(replicate, copy // context, context, fitting[-1] if ep == "auto" else ep)


def _context(trainer: Trainer) -> int:
    return 1 if trainer.mesh.cp == "auto" else trainer.mesh.cp


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _near(n: int, wanted: int) -> str:
    below = [d for d in _divisors(n) if d < wanted][-1:]
    above = [d for d in _divisors(n) if d > wanted][:1]
    return f", such as {' or '.join(map(str, below + above))}"
