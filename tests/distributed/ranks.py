"""Processes that stay for the whole session and join as ranks of ever new groups: importing torch is paid once, not per test.

    ranks.run(4, function, *args)    function(rank, *args) on ranks 0 … 3, gloo initialised; the results, in rank order

`function` must be importable by name (a test module's own is). An exception on any rank fails the test with that rank's
traceback; a rank that does not answer within the deadline is killed with the others, and new ones are started.
"""

from __future__ import annotations

import multiprocessing as mp
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOAD = ["torch.distributed", "prl.trainer.step", "tests.trainer.helpers"]


def _serve(connection: Connection) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    torch.set_num_threads(1)
    while (job := connection.recv()) is not None:
        rank, world, store, timeout_s, function, args = job
        try:
            if world > 1:
                timeout = timedelta(seconds=timeout_s)
                dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
            answer = True, function(rank, *args)
        except BaseException:
            answer = False, traceback.format_exc()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            _clear_sharding_prop_cache()  # it holds meshes, which equal later ones of the same shape but not their groups
        connection.send(answer)


class Ranks:
    def __init__(self, most: int = 8):
        self.context = mp.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)
        self.most = most
        self.workers: list[tuple[Any, Connection]] = []

    def run(self, world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60) -> list[Any]:
        while len(self.workers) < min(world, self.most):
            here, there = self.context.Pipe()
            process = self.context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self.workers.append((process, here))
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(world):
                self.workers[rank][1].send((rank, world, Path(folder) / "store", timeout_s, function, args))
            answers: dict[int, Any] = {}
            connections = {self.workers[r][1]: r for r in range(world)}
            failures = {}
            while connections:
                ready = wait(list(connections), 5 if failures else timeout_s)
                if not ready:
                    break
                for c in ready:
                    rank = connections.pop(c)  # type: ignore[arg-type]
                    try:
                        good, answers[rank] = c.recv()  # type: ignore[union-attr]
                    except EOFError:
                        good, answers[rank] = False, "the process died"
                    if not good:
                        failures[rank] = answers[rank]
        if failures or connections:
            self.close()
            told = "\n".join(f"rank {rank} of {world}: {text}" for rank, text in sorted(failures.items()))
            silent = sorted(connections.values())
            if silent:
                told += f"\nranks {silent} of {world} did not answer within {timeout_s:g} s"
            raise AssertionError(told)
        return [answers[rank] for rank in range(world)]

    def close(self) -> None:
        for process, connection in self.workers:
            process.kill()
            process.join()
            connection.close()
        self.workers = []
