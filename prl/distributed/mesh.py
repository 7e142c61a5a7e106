"""How the trainer's ranks find each other and agree. With one rank nothing is set up and every method is the identity.

c10d has no authentication: its store and gloo bind to the job's interface alone (`PRL_HOST`, loopback by default). That is
a residual risk wherever that interface is shared.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from prl.config.mesh import MeshShape
from prl.transport import ports

T = TypeVar("T")
STORE = "trainer-store"
"""Name under which rank 0 announces the store."""


class RankError(RuntimeError):
    """Another rank failed at something that all must do; its message is in this one, its traceback in its own log."""


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
    shape: MeshShape = MeshShape()
    dense: DeviceMesh | None = None
    """Over which FSDP2 shards, (fsdp) or (replicate, fsdp); None with one rank, as the rest."""
    experts: DeviceMesh | None = None
    """(expert, fsdp) or (expert, replicate, fsdp), what experts are sharded over."""
    context: dist.ProcessGroup | None = None
    """The ranks that share this rank's rows, in order; None where it has them alone."""

    @property
    def main(self) -> bool:
        return self.rank == 0

    @property
    def stream(self) -> int:
        """Which stream of micro-batches is this rank's."""
        return self.rank // self.shape.context

    @property
    def place(self) -> int:
        """Among the ranks of its stream: 0 speaks for all of them where they know the same."""
        return self.rank % self.shape.context

    @property
    def expert_fsdp(self) -> DeviceMesh:
        """Over which FSDP2 shards the experts that this rank holds."""
        assert self.experts is not None and self.experts.mesh_dim_names is not None
        return self.experts[self.experts.mesh_dim_names[1:]]

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place; the same bits on every rank."""
        if self.world > 1:
            dist.all_reduce(x)
        return x

    def sum_copy(self, x: Tensor) -> Tensor:
        """Sum over the ranks that hold one copy of the parameters, in place."""
        if self.dense is not None:
            dist.all_reduce(x, group=self.dense.get_group("fsdp"))
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

    @contextmanager
    def agree(self, group: dist.ProcessGroup | None = None) -> Iterator[None]:
        """What fails on one rank inside fails on every rank, at once: elsewhere as a RankError.

        Every rank must come, and the block may hold no collective that a failed rank would be missed in.
        """
        error: BaseException | None = None
        try:
            yield
        except Exception as e:
            error = e
        flag = torch.tensor([int(error is not None)], device=self.device if group is None else "cpu")
        if self.world > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX, group)
        if not flag.item():
            return
        told = self.gather_objects(None if error is None else f"{type(error).__name__}: {error}", group)
        if error is not None:
            raise error
        raise RankError("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None))

    def gather_objects(self, x: T, group: dist.ProcessGroup | None = None) -> list[T]:
        """Every rank's object, in rank order, on every rank of `group` (all ranks)."""
        if self.world == 1:
            return [x]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, x, group=group)
        return found

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, *_: object) -> None:
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()


ALONE = Mesh(0, 1, torch.device("cpu"))
"""One process, nothing set up."""


def lay_out(shape: MeshShape, rank: int, device: torch.device) -> Mesh:
    """The mesh of an initialised process group, whose ranks must be as many; a collective."""
    ranks = torch.arange(shape.world)

    def mesh(places: Tensor, *names: str) -> DeviceMesh:
        if shape.replicate == 1:  # FSDP takes a second dimension for HSDP
            kept = [i for i, name in enumerate(names) if name != "replicate"]
            places, names = places.reshape([places.shape[i] for i in kept]), tuple(names[i] for i in kept)
        return DeviceMesh(device.type, places, mesh_dim_names=names)

    experts = ranks.view(shape.replicate, shape.expert_fsdp, shape.expert).permute(2, 0, 1)
    context = None
    if shape.context > 1:
        rows = DeviceMesh(device.type, ranks.view(shape.data, shape.context), mesh_dim_names=("data", "context"))
        context = rows.get_group("context")
    return Mesh(
        rank,
        shape.world,
        device,
        shape,
        mesh(ranks.view(shape.replicate, shape.fsdp), "replicate", "fsdp"),
        mesh(experts, "expert", "replicate", "fsdp"),
        context,
    )


def device_of(rank: int) -> torch.device:
    """The rank's GPU, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def join(run: Rendezvous, rank: int, shape: MeshShape, *, start_s: float, wait_s: float) -> Mesh:
    """Meet the other ranks through the run's folder: rank 0 opens a TCP store (prl.transport.ports) and announces it.

    `start_s` bounds the meeting, `wait_s` every later collective. TimeoutError names what was waited for.
    """
    device, world = device_of(rank), shape.world
    if world == 1:
        return Mesh(rank, world, device)
    host = os.environ.get("PRL_HOST", "127.0.0.1")
    if host.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = _open_store(run, host) if rank == 0 else _find_store(run, start_s)
    store.set_timeout(timedelta(seconds=start_s))
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=wait_s))
    return lay_out(shape, rank, device)


def _open_store(run: Rendezvous, host: str) -> dist.TCPStore:
    # TCPStore would listen on every interface; a socket of ours keeps it on the job's.
    listener = ports.listener(STORE, host)
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
