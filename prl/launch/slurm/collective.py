"""One rank of a sum over nodes: `python -m prl.launch.slurm.collective SPEC`, as ranks of a run meet."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from prl.launch.slurm.task import interface_of


def main(rank: int, world: int, host: str, address: str, port: int, backend: str, timeout_s: float) -> None:
    """`host` is where rank 0 is, `address` where this one is."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface_of(address)
    limit = timedelta(seconds=timeout_s)
    store = dist.TCPStore(host, port, world, is_master=rank == 0, timeout=limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    x = torch.full((1 << 16,), float(rank), device="cuda" if backend == "nccl" else "cpu")
    dist.all_reduce(x)
    expected = world * (world - 1) / 2
    if not bool((x == expected).all()):
        raise OSError(f"the sum over {world} ranks is {x[0].item()}, expected {expected}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    spec: dict[str, Any] = json.loads(sys.argv[1])
    main(**spec)
