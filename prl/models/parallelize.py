"""Who is sharded how: experts over the expert ranks, then everything by FSDP2, block by block.

A model does not know of it: its experts become this rank's own, its MoE layers get a dispatcher, and its parameters are
gathered when they are needed. Every architecture is made of the same blocks, so one rule serves all.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from prl.config import schema
from prl.config.named import SetupError
from prl.distributed import fsdp
from prl.distributed.deepep import DeepEP
from prl.distributed.expert import AllToAll
from prl.distributed.mesh import Mesh
from prl.distributed.sharded import across_experts
from prl.layers import context
from prl.layers.attention import Attention, attend
from prl.layers.moe import Dispatcher, Experts
from prl.models.base import Model
from prl.models.spec import ModelSpec

log = logging.getLogger(__name__)


def split_experts(model: Model, mesh: Mesh, settings: schema.Mesh) -> None:
    """Leave of each layer's experts this rank's, and send tokens to the others'. Before values are set; a collective.

    DispatcherError where the demanded dispatcher cannot run.
    """
    if mesh.shape.expert == 1:
        return
    assert mesh.experts is not None
    dispatcher = _dispatcher(model.spec, mesh.experts.get_group("expert"), mesh.device, settings)
    for module in (m for m in model.modules() if isinstance(m, Experts)):
        for name, p in list(module.named_parameters()):
            mine = p.new_empty(len(p) // mesh.shape.expert, *p.shape[1:])
            setattr(module, name, nn.Parameter(mine, requires_grad=p.requires_grad))
        module.dispatcher = dispatcher


def _dispatcher(spec: ModelSpec, group: ProcessGroup, device: torch.device, settings: schema.Mesh) -> Dispatcher:
    chunks, fp8 = settings.dispatch_chunks, settings.fp8_dispatch
    if settings.dispatcher == "deepep":
        return DeepEP(group, spec.n_experts, spec.hidden_size, device, chunks, fp8)
    return AllToAll(group, spec.n_experts, chunks, fp8)


def share_rows(model: Model, mesh: Mesh) -> None:
    """Attention that works where the ranks of a stream share its rows; latent attention needs nothing but the layout, nor does
    that of the bitwise mode, which gathers keys and values."""
    ranks = mesh.shape.context
    if ranks == 1:
        return
    for attention in (m for m in model.modules() if isinstance(m, Attention) and m.core is attend):
        c = attention.config
        attention.core = context.core(ranks, c.heads, c.key_heads)
        if attention.core is context.ring and attention.layer == 0 and mesh.main:
            log.warning("%d heads with %d key heads do not divide by cp = %d: ring attention", c.heads, c.key_heads, ranks)


def parallelize(
    policy: nn.Module,
    model: Model,
    mesh: Mesh,
    types: Mapping[str, torch.dtype],
    master: torch.dtype,
    *,
    offload: bool = False,
    keep_gathered: Sequence[str] = (),
) -> None:
    """Shard `policy`, which holds `model`. `types`: what the forward wants each of the model's parameters in. With `offload`
    parameters and gradients are on the host.

    Units are each layer's experts, modules whose parameters are of another type than most, the blocks, and the rest. Those that
    a regular expression in `keep_gathered` matches (fullmatch) stay whole from forward to backward. SetupError where one of
    them matches none.
    """
    if mesh.dense is None:
        return
    compute = types["model.embed_tokens.weight"]
    units: list[str] = []

    def shard(name: str, module: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> None:
        units.append(name)
        keep = any(re.fullmatch(p, name) for p in keep_gathered)
        fsdp.shard(module, mesh, compute=dtype, master=master, offload=offload, keep_gathered=keep)

    for name, module in model.named_modules():
        own = {types[f"{name}.{p}"] for p, _ in module.named_parameters(recurse=False)}
        if isinstance(module, Experts):
            shard(name, module, mesh.expert_fsdp, own.pop())
        elif own and own != {compute}:
            shard(name, module, mesh.dense, own.pop())
    for i, block in enumerate(model.layers):
        shard(f"model.layers.{i}", block, mesh.dense, compute)
    shard("rest", policy, mesh.dense, compute)
    for pattern in keep_gathered:
        if not any(re.fullmatch(pattern, name) for name in units):
            raise SetupError(f"trainer.keep_gathered: {pattern!r} matches none of what is sharded: {', '.join(units)}")
    if mesh.shape.expert > 1:
        _prefetch(model)


def _prefetch(model: Model) -> None:
    """A block starts gathering its experts and the next block as it begins; in backward likewise, in the other direction.

    A dispatch lets the host wait for the device, so what is gathered behind it would not be under way beside anything. The
    blocks alone do so: what a block holds runs once more where it is computed again, in the middle of backward.
    """
    units = [[m for m in block.modules() if isinstance(m, FSDPModule)] for block in model.layers]
    for i, (block, *inner) in enumerate(units):
        block.set_modules_to_forward_prefetch([*inner, *(following[0] for following in units[i + 1 : i + 2])])
        block.set_modules_to_backward_prefetch([*reversed(inner), *(before[0] for before in units[max(i - 1, 0) : i])])


def whole(model: Model, mesh: Mesh, name: str, x: Tensor) -> Tensor:
    """A parameter of the model, or a tensor of its shape such as its gradient, as a part of the whole model's."""
    if mesh.experts is None or not isinstance(model.get_submodule(name.rpartition(".")[0]), Experts):
        return x
    return across_experts(x, mesh.experts)
