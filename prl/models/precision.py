"""Which layers compute in FP8: chosen by name, the same way for the trainer and for an engine, and how their weights travel.

Layers that can be FP8 are routed experts (`model.layers.1.mlp.experts`) and linear layers (`….self_attn.o_proj`) whose widths
are multiples of 128. Embedding, LM head, router, norms, indexer, and what attention reads as a plain matrix never are.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from prl.config.named import SetupError
from prl.config.schema import RunConfig
from prl.kernels.numerics import BLOCK
from prl.kernels.quantise import quantise_blocks
from prl.kernels.weights import CodedWeight, Quantised
from prl.layers.linear import Linear
from prl.layers.mlp import MLP
from prl.layers.moe import Experts
from prl.models.base import Model

SCALES = "_scale_inv"
"""Suffix of the name under which a coded weight's scales travel, as in published FP8 checkpoints."""


def candidates(model: Model) -> list[str]:
    """Full names of the layers that can be FP8, in the model's order."""
    return [
        name
        for name, module in model.named_modules()
        if (isinstance(module, Experts) or (isinstance(module, Linear) and not module.never_fp8))
        and not any(n % BLOCK for p in _weights(module).values() for n in p.shape[-2:])
    ]


def trainer_layers(config: RunConfig, model: Model) -> list[str]:
    """Names of the layers that the trainer computes in FP8. SetupError as `chosen`."""
    t = config.trainer
    return chosen(model, t.fp8_layers, "trainer.fp8_layers") if t.precision == "fp8" else []


def engine_layers(config: RunConfig, model: Model) -> list[str]:
    """Names of the layers that engines are to compute in FP8. SetupError as `chosen`."""
    patterns, key = config.inference.fp8_layers, "inference.fp8_layers"
    if patterns is None:
        patterns, key = config.trainer.fp8_layers, "trainer.fp8_layers"
    return chosen(model, patterns, key) if config.inference.precision == "fp8" else []


def chosen(model: Model, patterns: Sequence[str], key: str) -> list[str]:
    """Sorted names of the layers that can be FP8 and that a name or regular expression (fullmatch) of `patterns` fits.

    SetupError names the pattern that fits none and what is nearest, or a feed-forward of which one of gate and up is named.
    """
    fitting = candidates(model)
    found: set[str] = set()
    for pattern in patterns:
        here = {name for name in fitting if re.fullmatch(pattern, name)}
        if not here:
            there = [name for name, _ in model.named_modules() if name and re.fullmatch(pattern, name)]
            if there:
                raise SetupError(f"{key}: {pattern!r} is {there[0]}, which cannot be FP8: {_why_not(model, there[0])}")
            near = difflib.get_close_matches(pattern.replace("\\", ""), fitting, 3, 0.0)
            raise SetupError(
                f"{key}: {pattern!r} fits no layer that can be FP8; nearest are {', '.join(near) or 'none: no widths fit'}"
            )
        found |= here
    for name, module in model.named_modules():
        pair = {f"{name}.gate_proj", f"{name}.up_proj"}
        if isinstance(module, MLP) and len(pair & found) == 1:
            raise SetupError(f"{key}: {' and '.join(sorted(pair))} are one product: choose both, or neither")
    return sorted(found)


def _why_not(model: Model, name: str) -> str:
    module = model.get_submodule(name)
    if isinstance(module, Linear | Experts) and not getattr(module, "never_fp8", False):
        widths = " and ".join(str(list(p.shape)) for p in _weights(module).values())
        return f"its widths {widths} are no multiples of {BLOCK}"
    return "only routed experts and linear layers can, but for the indexer's and those whose weight is read as it is"


def set_fp8(model: Model, layers: Collection[str]) -> None:
    """Let these layers compute in FP8, and no others."""
    for name, module in model.named_modules():
        if isinstance(module, Experts | Linear):
            module.precision = "fp8" if name in layers else "bf16"


def weights_of(model: Model, layers: Iterable[str]) -> list[str]:
    """Full names of the layers' weights."""
    return [f"{layer}.{name}" for layer in layers for name in _weights(model.get_submodule(layer))]


def _weights(module: nn.Module) -> Mapping[str, Tensor]:
    return {name: p for name, p in module.named_parameters(recurse=False) if p.dim() > 1 and "lora" not in name}


@torch.no_grad()
def coded(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What travels of a weight [N, K] or [E, N, K] for a layer in FP8: codes of its shape, and scales float32 per 128x128."""
    codes, scales = quantise_blocks(weight if weight.dim() == 3 else weight[None])
    yield name, codes.view(weight.shape)
    yield name + SCALES, scales if weight.dim() == 3 else scales[0]


@torch.no_grad()
def hold_codes(model: Model, layers: Collection[str]) -> None:
    """Let these layers of an engine compute in FP8 from codes and scales alone, at first those of the weights they have."""
    set_fp8(model, layers)
    for layer in layers:
        module = model.get_submodule(layer)
        for name, p in _weights(module).items():
            linear = p.dim() == 2
            weight = CodedWeight(Quantised(*quantise_blocks(p[None] if linear else p)), p.dtype, linear=linear)
            setattr(module, name, nn.Parameter(weight, requires_grad=False))


def held(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of an engine's model under the names that they travel by: writing to them writes the model."""
    out: dict[str, Tensor] = {}
    for name, t in model.state_dict().items():
        if isinstance(t, CodedWeight):
            codes, scales = (x[0] if t.dim() == 2 else x for x in t.quantised.plain)
            out |= {name: codes, name + SCALES: scales}
        else:
            out[name] = t
    return out


def layers_in(tensors: Mapping[str, object]) -> list[str]:
    """The layers whose weights travel as codes, of the names of what travels."""
    return layers_of(name.removesuffix(SCALES) for name in tensors if name.endswith(SCALES))


def layers_of(weights: Iterable[str]) -> list[str]:
    """Sorted names of the layers that weights of these names belong to."""
    return sorted({name.rpartition(".")[0] for name in weights})


def differences(here: Iterable[str], there: Iterable[str], whose: tuple[str, str]) -> str:
    """What two sets of layers do not share, in words; empty where they are equal."""
    a, b = set(here), set(there)
    parts = [f"{', '.join(sorted(only))} in {who} alone" for only, who in ((a - b, whose[0]), (b - a, whose[1])) if only]
    return "; ".join(parts)


def shortened(layers: Sequence[str]) -> str:
    """The same names in a few words: `model.layers.{1-2}.mlp.experts`."""
    numbers: dict[str, list[int]] = {}
    for layer in layers:
        match = re.fullmatch(r"(.*?\.)(\d+)(\..*)", layer)
        key, n = (f"{match[1]}{{}}{match[3]}", int(match[2])) if match else (layer, -1)
        numbers.setdefault(key, []).append(n)
    return ", ".join(key.replace("{}", _ranges(ns)) for key, ns in numbers.items())


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    words = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return words[0] if len(words) == 1 and "-" not in words[0] else "{" + ",".join(words) + "}"
