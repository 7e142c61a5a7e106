"""Which weights stay whole between forward and backward: fewer gathers, the same bits."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

from prl.config.mesh import resolve
from prl.config.named import SetupError
from prl.distributed.mesh import lay_out
from prl.samples import pack
from prl.trainer.state import TrainState
from prl.trainer.step import Stepper
from tests.distributed.ranks import Ranks
from tests.trainer import helpers
from tests.trainer.helpers import rollouts


def gathers(rank: int, settings: list[list[str]]) -> list[tuple[dict[str, bytes], int] | str]:
    """Bits after a step of one micro-batch and how often weights were gathered; or the error's text."""
    out: list[Any] = []
    gather = groups.foreach_all_gather
    for keep in settings:
        c = helpers.config("float32", ranks=2, mesh={"ep": 1}, keep_gathered=keep, pack_tokens=10_000)
        mesh = lay_out(resolve(c.trainer, helpers.EXPERTS), rank, torch.device("cpu"))
        try:
            stepper = Stepper(TrainState(c, c.trainer.optim, mesh), c.trainer, 3)
        except SetupError as e:
            out.append(str(e))
            continue
        calls = 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return gather(*args, **kwargs)

        groups.foreach_all_gather = counted
        try:
            stepper(pack(rollouts(1, 6), step=1, budget=10_000, ranks=2)[rank])
        finally:
            groups.foreach_all_gather = gather
        out.append(({n: p.to_local().detach().numpy().tobytes() for n, p in stepper.state.params.items()}, calls))
    return out


def test_what_is_kept_is_gathered_once(ranks: Ranks) -> None:
    """3 blocks, of which 2 have experts of their own, and the rest: twice each where nothing is kept."""
    settings = [[], [r".*\.experts"], [r"model\.layers\.\d", "rest"], [".*"], ["model.layers.7"]]
    for found in ranks.run(2, gathers, settings):
        (bits, most), experts, blocks, everything, wrong = found
        assert [most, experts[1], blocks[1], everything[1]] == [12, 10, 8, 6]
        assert bits == experts[0] == blocks[0] == everything[0]
        assert "'model.layers.7' matches none" in wrong and "model.layers.1.mlp.experts" in wrong
