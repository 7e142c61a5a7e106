"""Activation checkpointing: parts of a forward that keep their inputs alone and are computed again in backward.

The parts are methods of modules, wrapped inside FSDP's hooks: backward has gathered a unit's weights before it runs again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from prl.config.schema import RecomputeTarget
from prl.layers.attention import Attention
from prl.layers.block import LayerInput, LayerOutput
from prl.layers.mla import MLA
from prl.layers.mlp import MLP
from prl.layers.moe import Experts
from prl.layers.norm import RMSNorm
from prl.layers.router import Replay
from prl.models.base import Model

TARGETS: dict[RecomputeTarget, dict[type, str]] = {
    "norm": {RMSNorm: "forward"},
    "attn_proj": {Attention: "project", MLA: "project"},
    "mla_up_proj": {MLA: "expand"},
    "mlp": {MLP: "forward"},
    "routed_experts": {Experts: "compute_here"},
}
"""Name → the methods that it stands for. Routing and the dispatch to other ranks are in none of them: they run once."""


def recompute(model: Model, kind: Literal["none", "full", "selective"], targets: Sequence[RecomputeTarget]) -> None:
    """Let backward compute again nothing, whole blocks, or of each block the parts that `targets` names."""
    if kind == "full":
        for block in model.layers:
            block.forward = functools.partial(_block_again, block.forward)
    elif kind == "selective":
        methods = {cls: name for target in targets for cls, name in TARGETS[target].items()}
        for module in model.layers.modules():
            for name in (name for cls, name in methods.items() if isinstance(module, cls)):
                setattr(module, name, functools.partial(_again, getattr(module, name)))


def _again(method: Callable[..., Any], *args: Any) -> Any:
    if not torch.is_grad_enabled():
        return method(*args)
    return checkpoint(method, *args, use_reentrant=False, preserve_rng_state=False)


def _block_again(forward: Callable[[Tensor, LayerInput], LayerOutput], x_TD: Tensor, inputs: LayerInput) -> LayerOutput:
    """The experts chosen are those of the first time whatever becomes of a tie: they are replayed from its output."""
    out: LayerOutput = _again(forward, x_TD, inputs)
    if out.routes_TK is not None:
        inputs.experts = Replay(out.routes_TK, None, inputs.experts.padding_T)
    return out
