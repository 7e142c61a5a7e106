"""From a spec to a model: the class, its type, its first weights, its size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import import_module

import torch
import xxhash
from torch import Tensor

from prl.distributed.sharded import copy_into
from prl.models.base import Model
from prl.models.convert import Operation, Shape, is_expert, keeps_float32
from prl.models.spec import ModelSpec


def operations(spec: ModelSpec) -> Sequence[Operation]:
    """How the architecture's weights are named in files: `WEIGHTS` of its hf.py."""
    return import_module(f"prl.models.{spec.architecture}.hf").WEIGHTS


def build(spec: ModelSpec, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Model:
    """The architecture's model of parameters of `dtype` whose values are not set: follow with `init_weights` or load.

    Tensors marked `Float32` in the weight list are of the wider of float32 and `dtype`.
    """
    with torch.device("meta"):
        model: Model = import_module(f"prl.models.{spec.architecture}.model").build(spec)
    wide = torch.promote_types(torch.float32, dtype)
    ops = operations(spec)
    for prefix, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.is_floating_point():
                tensor.data = tensor.data.to(wide if keeps_float32(ops, f"{prefix}.{name}") else dtype)
    return model if torch.device(device).type == "meta" else model.to_empty(device=device)


def init_weights(model: Model, seed: int) -> None:
    """`draw` into a model."""
    draw(model.spec, model.state_dict(), seed)


@torch.no_grad()
def draw(spec: ModelSpec, state: Mapping[str, Tensor], seed: int) -> None:
    """Draw first weights into a model's tensors: normal with config.json's initializer_range; norms 1, biases 0.

    Each tensor has a generator of its own, keyed by (seed, name), and is drawn whole, in float32, on the CPU: the values do
    not depend on sharding, device, type or order.
    """
    std = spec.raw["initializer_range"]
    for name, tensor in state.items():
        if name.endswith("bias"):
            tensor.zero_()
        elif tensor.dim() == 1:
            tensor.fill_(1.0)
        else:
            copy_into(tensor, (), drawn(tensor.shape, std, seed, name).__getitem__)


def drawn(shape: Sequence[int], std: float, seed: int, name: str) -> Tensor:
    """A normal float32 tensor that depends on its arguments alone."""
    generator = torch.Generator().manual_seed(xxhash.xxh64_intdigest(f"{seed}:{name}".encode()) >> 1)
    return torch.empty(*shape, dtype=torch.float32).normal_(0.0, std, generator=generator)


def shapes_of(spec: ModelSpec) -> dict[str, Shape]:
    """Name → shape of every tensor of the model, from the meta device."""
    return {name: tuple(t.shape) for name, t in build(spec, device="meta").state_dict().items()}


def count_parameters(spec: ModelSpec) -> tuple[int, int]:
    """(all, active for a token) parameters; layers for multi-token prediction are not part of the model and not counted.

    Active are the layers' parameters but for the experts that a token does not use. Embedding and LM head are counted in
    the first number only: so the published ones come out.
    """
    ops = operations(spec)
    total = active = 0
    for name, shape in shapes_of(spec).items():
        n = math.prod(shape)
        total += n
        if name.startswith("model.layers."):
            active += n * spec.top_k // spec.n_experts if is_expert(ops, name) else n
    return total, active
