"""Low-rank adapters (LoRA, arXiv 2106.09685): a weight is W + (alpha / rank) · B · A wherever it is read; W is frozen.

Adapters stand beside their weight in its module, so FSDP gathers and casts them with it, and expert parallelism cuts both.

Legend: E experts, N output width, K input width, R rank.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from prl.config.named import SetupError
from prl.config.schema import Lora
from prl.distributed.sharded import copy_into
from prl.layers.moe import Experts
from prl.models.base import Model
from prl.models.registry import drawn

A, B = "_lora_A", "_lora_B"
"""Suffixes of the adapters' names: [R, K] and [N, R], of experts [E, R, K] and [E, N, R]."""


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + scale · B · A, in the type of all three."""
    add = torch.addmm if weight.dim() == 2 else torch.baddbmm
    return add(weight, b, a, alpha=scale)


def adapt(model: Model, lora: Lora) -> dict[str, float]:
    """Put adapters, without values, beside the weights that `targets` match, and freeze all else. Name → scale of each weight.

    Targets are linear layers and experts' stacks, but for those that are frozen already. SetupError for one that matches none.
    """
    places = {
        f"{prefix}.{name}".removesuffix(".weight"): (module, name, f"{prefix}.{name}")
        for prefix, module in model.named_modules()
        if isinstance(module, nn.Linear | Experts)
        for name, p in module.named_parameters(recurse=False)
        if p.dim() > 1 and p.requires_grad
    }
    chosen = {place for pattern in lora.targets for place in _matching(pattern, places)}
    model.requires_grad_(False)
    for place, (module, name, _) in places.items():
        if place in chosen:
            _adapt(module, name, lora.rank, lora.alpha / lora.rank)
    return {full_name: lora.alpha / lora.rank for place, (_, _, full_name) in places.items() if place in chosen}


def draw(adapted: Iterable[str], weights: Mapping[str, Tensor], seed: int) -> None:
    """First values: A normal with variance 1 / K, from the seed and its name alone, and B zero, so nothing is added yet."""
    for name in adapted:
        a = weights[name + A]
        copy_into(a, (), drawn(a.shape, a.shape[-1] ** -0.5, seed, name + A).__getitem__)
        weights[name + B].zero_()


def _matching(pattern: str, places: Iterable[str]) -> list[str]:
    found = [place for place in places if re.fullmatch(pattern, place)]
    if not found:
        ends = {place.rpartition(".")[2]: place for place in places}
        near = difflib.get_close_matches(re.split(r"[.\\]", pattern)[-1], ends, 3, 0.0)
        raise SetupError(
            f"trainer.lora.targets: {pattern!r} matches no linear layer and no experts that may be trained; nearest are "
            + (", ".join(ends[end] for end in near) or "none: model.frozen freezes all")
        )
    return found


def _adapt(module: nn.Module, name: str, rank: int, scale: float) -> None:
    weight = module._parameters[name]
    assert weight is not None
    module.register_parameter(name + A, nn.Parameter(weight.new_empty(*weight.shape[:-2], rank, weight.shape[-1])))
    module.register_parameter(name + B, nn.Parameter(weight.new_empty(*weight.shape[:-1], rank)))

    def effective(self: nn.Module) -> Tensor:
        weight, a, b = (self._parameters[n] for n in (name, name + A, name + B))
        assert weight is not None and a is not None and b is not None
        # Only FSDP itself reads a weight that is not gathered: it wants the parameter.
        return weight if isinstance(weight, DTensor) else merged(weight, a, b, scale)

    # A property comes before the parameter of its name, whoever reads it: attention, a fused MLP, the FP8 kernels.
    module.__class__ = type(type(module).__name__, (type(module),), {name: property(effective)})
