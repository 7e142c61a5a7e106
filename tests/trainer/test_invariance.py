"""Loss, gradients and parameters do not depend on how many ranks share the work, nor on how."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.distributed.ranks import Ranks
from tests.trainer.invariance import Case, train, worst

BOUND = {"float64": 1e-10, "float32": 1e-5}
SGD, ADAMW = {"kind": "sgd"}, {"kind": "adamw", "eps": 1e-6}
CASES = {
    "dp": Case(2, {"ep": 1}),
    "dp×ep": Case(4, {"ep": 2}),
    "all ep": Case(4, {"ep": 4}, routes="crowd"),
    "replicate×shard×ep": Case(4, {"replicate": 2, "ep": 2}, routes="shun"),
    "unpacked, clipped": Case(4, {"ep": 2}, pack_tokens=28, clip=0.05),
    "a rank without work": Case(4, {"ep": 2}, rollouts=2),
    "sgd": Case(2, {"ep": 2}, optim=SGD),
    "eight": Case(8, {"replicate": 2, "ep": 4}, {"recompute": True}),
}


@functools.cache
def _alone(key: str, ranks: Ranks) -> dict[str, np.ndarray]:
    return ranks.run(1, train, _reference[key])[0]


_reference: dict[str, Case] = {}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_a_mesh_trains_as_one_process_does(name: str, dtype: str, ranks: Ranks) -> None:
    case = replace(CASES[name], dtype=dtype)
    alone = case.alone()
    _reference[repr(alone)] = alone
    expected = _alone(repr(alone), ranks)
    got = ranks.run(case.ranks, train, case)[0]
    difference, where = worst(got, expected)
    assert difference <= BOUND[dtype], (difference, where)
    assert not torch.distributed.is_initialized()
