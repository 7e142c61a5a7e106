"""What new weights cost on their way from the trainer to the engines. Free of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from prl.config.mesh import MeshShape
from prl.config.schema import RunConfig
from prl.models.spec import ModelSpec
from prl.plan.hardware import Hardware
from prl.plan.weights import BLOCK, BYTES, can_be_fp8, engine_patterns, shapes


@dataclass(frozen=True)
class Transfer:
    """Of one version. A file system slower than the adapters adds what it is slower."""

    stored: int
    """Bytes of a version, written once."""
    read: int
    """Bytes that all engines read."""
    write_s: float
    """Through the adapters of the trainer's ranks."""
    read_s: float
    """Through those of an engine's GPUs; engines read at the same time."""

    @property
    def seconds(self) -> float:
        return self.write_s + self.read_s


def transfer(spec: ModelSpec, config: RunConfig, shape: MeshShape, gpus: int, hardware: Hardware) -> Transfer:
    """`gpus`: of one engine. The trainer sends the model's type, and what an engine computes in FP8 as codes and scales."""
    element = BYTES[config.model.dtype]
    patterns = engine_patterns(config)
    stored = 0
    for name, shape_ in shapes(spec).items():
        n = math.prod(shape_)
        stored += n + 4 * (n // BLOCK**2) if can_be_fp8(name, shape_, patterns) else n * element
    rate = hardware.network_bytes_per_s * hardware.achieved.network
    if hardware.kind == "cpu":
        rate = hardware.memory_bytes_per_s * hardware.achieved.memory
    return Transfer(stored, stored * config.inference.replicas, stored / (rate * shape.world), stored / (rate * gpus))
