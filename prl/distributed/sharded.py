"""Tensors of which each rank holds a part: this rank's part, the whole, and writing a whole one's values into the parts."""

from __future__ import annotations

from collections.abc import Callable

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


Index = tuple[int | slice, ...]


def part_of(x: Tensor, index: Index) -> tuple[Index, tuple[slice, ...]] | None:
    """Of the block `x[index]` what this rank holds: its place in `local(x)` and its place in the block; None: nothing."""
    whole = (*index, *(slice(None) for _ in range(x.dim() - len(index))))
    if isinstance(x, DTensor):
        shape, offset = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    else:
        shape, offset = x.shape, (0,) * x.dim()
    here: list[int | slice] = []
    there: list[slice] = []
    for i, size, n, first in zip(whole, x.shape, shape, offset, strict=True):
        start, stop = (i, i + 1) if isinstance(i, int) else i.indices(size)[:2]
        low, high = max(start, first), min(stop, first + n)
        if low >= high:
            return None
        here.append(low - first if isinstance(i, int) else slice(low - first, high - first))
        if not isinstance(i, int):
            there.append(slice(low - start, high - start))
    return tuple(here), tuple(there)


@torch.no_grad()
def copy_into(target: Tensor, index: Index, read: Callable[[tuple[slice, ...]], Tensor]) -> None:
    """`target[index] = read(all of it)`; of a sharded target each rank reads and writes what it holds, without a collective."""
    if (part := part_of(target, index)) is not None:
        here, there = part
        local(target)[here].copy_(read(there))
