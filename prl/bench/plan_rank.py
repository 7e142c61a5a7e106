"""A rank of `bench plan`: `python -m prl.bench.plan_rank SPEC.json INDEX FOLDER` prints one JSON object of seconds.

It trains all cases of as many ranks, one after the other. Between them one rank times products (`prl.bench.rates`), several
what ranks of a trainer exchange.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import torch
import torch.distributed as dist

from prl.bench.memory_rank import join, prepare
from prl.bench.rates import Rates
from prl.bench.runs import say
from prl.trainer.state import TrainState
from prl.trainer.step import Stepper

ROUNDS = 3
NUMBERS = 1 << 21
"""float32 that a rank sends to each other in an exchange."""


def timed(act: Callable[[], object]) -> tuple[float, float]:
    """Seconds, (on the clock, of this process's threads)."""
    wall, cpu = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - wall, time.process_time() - cpu


def exchange(world: int) -> tuple[float, list[tuple[float, float]]]:
    """(bytes that a rank sends, seconds of each round): tokens to experts, parts gathered, gradients reduced."""
    here = torch.ones(world * NUMBERS)
    there = torch.empty_like(here)
    part = torch.empty(NUMBERS)

    def act() -> None:
        dist.all_to_all_single(there, here)
        dist.all_gather_into_tensor(there, part)
        dist.reduce_scatter_tensor(part, here)
        dist.barrier()

    act()
    return 3.0 * (world - 1) * NUMBERS * 4, [timed(act) for _ in range(ROUNDS)]


def rank(index: int, spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    ranks = spec["ranks"]
    join(index, ranks, folder)
    rates = Rates() if ranks == 1 else None
    cases: dict[str, list[tuple[float, float]]] = {}
    exchanges: list[tuple[float, float]] = []
    sent = 0.0
    for name, case in spec["cases"].items():
        config, mesh, batches = prepare(index, case)
        if rates is None:
            sent, more = exchange(ranks)
            exchanges += more
        else:
            rates()
        stepper = Stepper(TrainState(config, config.trainer.optim, mesh), config.trainer, len(batches))
        cases[name] = [timed(lambda batch=batch, stepper=stepper: stepper(batch)) for batch in batches]  # type: ignore[misc]
        if index == 0:
            say(name)
    found: dict[str, Any] = {"cases": cases, "bytes": sent, "exchanges": exchanges}
    if rates is not None:
        found["rates"] = rates.each()
    if ranks > 1:
        dist.destroy_process_group()
    return found


if __name__ == "__main__":
    print(orjson.dumps(rank(int(sys.argv[2]), orjson.loads(Path(sys.argv[1]).read_bytes()), Path(sys.argv[3]))).decode())
