"""FSDP2: parameters, gradients and optimizer state are sharded block by block, gradients are summed."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard


def shard(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    compute: torch.dtype,
    master: torch.dtype,
    keep_gathered: bool = False,
    offload: bool = False,
) -> None:
    """Shard what of `module` is not sharded yet, in place; forward and backward run in `compute`.

    Parameters are of type `master`, in which gradients are reduced and kept. They are cut along their first dimension, or
    along the second where only that divides. With `keep_gathered` they stay whole from forward to backward, with `offload`
    their parts and the gradients' are on the host. FSDP's mean is undone: with a divide factor of 1 gloo needs plain sums,
    since it knows no pre-multiplied ones.
    """
    ranks = mesh.size(mesh.ndim - 1)

    def placement(p: nn.Parameter) -> Shard | None:
        return Shard(1) if p.dim() > 2 and p.shape[0] % ranks and not p.shape[1] % ranks else None

    fully_shard(
        module,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=master, cast_forward_inputs=False),
        shard_placement_fn=placement,
        reshard_after_forward=not keep_gathered,
        offload_policy=CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy(),
    )
    sharded = cast(FSDPModule, module)
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)
