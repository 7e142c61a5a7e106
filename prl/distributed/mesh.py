"""How the trainer's ranks find each other and agree. With one rank nothing is set up and every method is the identity.

c10d has no authentication: its store and gloo bind to the job's interface alone (`PRL_HOST`, loopback by default). That is
a residual risk wherever that interface is shared.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

STORE = "trainer-store"
"""Name under which rank 0 announces the store."""


class Rendezvous(Protocol):
    """Where roles announce and find addresses: a `RunDir`."""

    def announce(self, role: str, **address: Any) -> None: ...

    def find(self, role: str, timeout_s: float) -> dict[str, Any]: ...


@dataclass(slots=True)
class Mesh:
    """The ranks of one trainer. Sums are sums, never means: the loss is normalised by counts of the whole batch."""

    rank: int
    world: int
    device: torch.device
    data: DeviceMesh | None = None
    """Over which FSDP2 shards; None with one rank."""

    @property
    def main(self) -> bool:
        return self.rank == 0

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place; the same bits on every rank."""
        if self.world > 1:
            dist.all_reduce(x)
        return x

    def max(self, x: Tensor) -> Tensor:
        """Elementwise maximum over the ranks, in place."""
        if self.world > 1:
            dist.all_reduce(x, dist.ReduceOp.MAX)
        return x

    def any(self, flag: bool) -> bool:
        """Whether any rank says so; every rank must ask."""
        return bool(self.max(torch.tensor([int(flag)], device=self.device)).item()) if self.world > 1 else flag

    def gather(self, x: Tensor) -> Tensor:
        """One-dimensional tensors of any lengths, end to end in rank order, on every rank."""
        if self.world == 1:
            return x
        lengths = torch.zeros(self.world, dtype=torch.int64, device=self.device)
        lengths[self.rank] = len(x)
        longest = int(self.sum(lengths).max())
        padded = torch.zeros(longest, dtype=x.dtype, device=self.device)
        padded[: len(x)] = x
        parts = [torch.empty_like(padded) for _ in range(self.world)]
        dist.all_gather(parts, padded)
        return torch.cat([p[:n] for p, n in zip(parts, lengths.tolist(), strict=True)])

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, *_: object) -> None:
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()


def device_of(rank: int) -> torch.device:
    """The rank's GPU, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def join(run: Rendezvous, rank: int, world: int, *, start_s: float, wait_s: float) -> Mesh:
    """Meet the other ranks through the run's folder: rank 0 opens a TCP store on a free port and announces it.

    `start_s` bounds the meeting, `wait_s` every later collective. TimeoutError names what was waited for.
    """
    device = device_of(rank)
    if world == 1:
        return Mesh(rank, world, device)
    host = os.environ.get("PRL_HOST", "127.0.0.1")
    if host.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = _open_store(run, host) if rank == 0 else _find_store(run, start_s)
    store.set_timeout(timedelta(seconds=start_s))
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=wait_s))
    return Mesh(rank, world, device, init_device_mesh(device.type, (world,), mesh_dim_names=("data",)))


def _open_store(run: Rendezvous, host: str) -> dist.TCPStore:
    # TCPStore would listen on every interface; a socket of ours keeps it on the job's.
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    run.announce(STORE, host=host, port=port)
    return store


def _find_store(run: Rendezvous, timeout_s: float) -> dist.TCPStore:
    """An address left by a killed trainer leads nowhere, so look again until the deadline."""
    deadline = time.monotonic() + timeout_s
    while True:
        address = run.find(STORE, max(deadline - time.monotonic(), 0))
        host, port = address["host"], address["port"]
        try:
            socket.create_connection((host, port), timeout=2).close()  # TCPStore itself would retry for long
            return dist.TCPStore(host, port, wait_for_workers=False)
        except (OSError, dist.DistError) as e:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the trainer's rank 0 announced {host}:{port}, which did not answer within {timeout_s:g} s"
                ) from e
            time.sleep(0.05)
