"""FSDP2 over the data mesh: parameters, gradients and optimizer state are sharded block by block, gradients are summed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from prl.kernels.weights import gather_as_fp8


def shard(
    root: nn.Module,
    blocks: Iterable[nn.Module],
    wide: Iterable[nn.Module],
    mesh: DeviceMesh,
    *,
    compute: torch.dtype,
    master: torch.dtype,
    fp8: Iterable[nn.Module] = (),
) -> None:
    """Shard each of `wide`, each block and then what is left of `root`, in place.

    Forward and backward run in `compute`, those of `wide` in `master`; of the `fp8` modules codes and scales are gathered.

    Parameters must be equal on all ranks and of type `master`, in which gradients are reduced and kept. FSDP's mean is
    undone: with a divide factor of 1 gloo needs plain sums, since it knows no pre-multiplied ones.
    """
    for module, dtype in [*((m, master) for m in wide), *((m, compute) for m in (*blocks, root))]:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=master, cast_forward_inputs=False)
        fully_shard(module, mesh=mesh, mp_policy=policy)
        sharded = cast(FSDPModule, module)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    for module in fp8:
        gather_as_fp8(module, mesh.size())


def local(x: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor, else the tensor itself."""
    return x.to_local() if isinstance(x, DTensor) else x


def full(x: Tensor) -> Tensor:
    """The whole of a sharded tensor: a collective that every rank must join."""
    return x.full_tensor() if isinstance(x, DTensor) else x
