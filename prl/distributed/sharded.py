"""Tensors of which each rank holds a part: this rank's part, the whole, and writing a whole one's values into the parts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local(x: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor, else the tensor itself."""
    return x.to_local() if isinstance(x, DTensor) else x


def full(x: Tensor) -> Tensor:
    """The whole of a sharded tensor, where its mesh is, also of parts on the host: a collective that every rank must join.

    One dimension of the mesh after the other: a flattened (expert, fsdp) would gather in another order, since its ranks do not
    ascend and c10d sorts those of a group.
    """
    if not isinstance(x, DTensor):
        return x
    moved = x.to(x.device_mesh.device_type)
    assert isinstance(moved, DTensor)
    placements = list(moved.placements)
    for dim in reversed(range(len(placements))):
        placements[dim] = Replicate()
        moved = moved.redistribute(placements=placements)
    return moved.to_local()


def across_experts(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """This rank's experts [E / ep, …], themselves sharded by FSDP, as a part of all of them [E, …].

    `mesh` has the dimensions (expert, those that FSDP uses): consecutive experts are on consecutive places of the first.
    """
    assert isinstance(x, DTensor)
    shape = torch.Size([x.shape[0] * mesh.size(0), *x.shape[1:]])
    stride = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(mesh, (Shard(0), *x.placements), tensor_meta=TensorMeta(shape, stride, x.dtype))
    return DTensor(x.to_local(), spec, requires_grad=False)  # from_local would move what is on the host to the device


@torch.no_grad()
def copy_into(target: Tensor, index: tuple[int | slice, ...], source: Tensor) -> None:
    """`target[index] = source`; of a sharded target each rank writes what it holds, without a collective."""
    if not isinstance(target, DTensor):
        target[index].copy_(source)
        return
    shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    whole = (*index, *(slice(None) for _ in range(target.dim() - len(index))))
    here: list[int | slice] = []
    there: list[slice] = []
    for i, size, n, first in zip(whole, target.shape, shape, offset, strict=True):
        start, stop = (i, i + 1) if isinstance(i, int) else i.indices(size)[:2]
        low, high = max(start, first), min(stop, first + n)
        if low >= high:
            return
        here.append(low - first if isinstance(i, int) else slice(low - first, high - first))
        if not isinstance(i, int):
            there.append(slice(low - start, high - start))
    target.to_local()[tuple(here)].copy_(source[tuple(there)])
