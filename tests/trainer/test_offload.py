"""State, masters and the update on the host: the same bits, checkpoints that every setting reads, few copies at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from prl.config.mesh import MeshShape
from prl.distributed.mesh import lay_out
from prl.samples import pack
from prl.trainer.offload import AHEAD, Part, Transfer
from tests.distributed.ranks import Ranks
from tests.trainer.helpers import ALONE, bits, config, rollouts, save, stepper_of

OPTIMS: dict[str, dict[str, Any]] = {
    "sgd": {"kind": "sgd"},
    "adamw": {"kind": "adamw"},
    "bfloat16": {"kind": "adamw", "state_dtype": "bfloat16"},
    "muon": {"kind": "muon", "state_dtype": "bfloat16", "weight_decay": 0.1},
}
SETTINGS = ("none", "optimizer", "parameters")


def train(rank: int, shape: MeshShape, folder: Path, kinds: list[str]) -> dict[str, list[bool]]:
    """Two steps under each setting and a third under the next one, from its checkpoint: whether all have the same bits."""
    mesh = ALONE if shape.world == 1 else lay_out(shape, rank, torch.device("cpu"))
    found = {}
    batches = [pack(rollouts(step), step=step, budget=64, ranks=shape.data)[mesh.stream] for step in (1, 2, 3)]
    for kind in kinds:
        trained, went_on = [], []
        for setting, reader in zip(SETTINGS, (*SETTINGS[1:], SETTINGS[0]), strict=True):
            c = config("bfloat16", offload=setting, optim={"lr": 1e-2, **OPTIMS[kind]})
            stepper = stepper_of(c, mesh)
            for batch in batches[:2]:
                stepper(batch)
            path = save(stepper.state, c, folder / f"{kind}-{setting}")
            other = stepper_of(config("bfloat16", offload=reader, optim={"lr": 1e-2, **OPTIMS[kind]}), mesh)
            other.state.load(path)
            other(batches[2])
            trained.append(bits(stepper.state))
            went_on.append(bits(other.state))
        found[kind] = [trained[0] == t for t in trained] + [went_on[0] == w for w in went_on] + [trained[0] != went_on[0]]
    return found


def test_every_setting_trains_the_same_bits_on_one_rank(tmp_path: Path) -> None:
    found = train(0, MeshShape(), tmp_path, list(OPTIMS))
    assert found == dict.fromkeys(OPTIMS, [True] * 7)


def test_every_setting_trains_the_same_bits_on_two_ranks(tmp_path: Path, ranks: Ranks) -> None:
    for found in ranks.run(2, train, MeshShape(shard=2, expert=2), tmp_path, ["muon"]):
        assert found == {"muon": [True] * 7}


def test_state_on_the_host_leaves_the_parameters_where_they_are() -> None:
    stepper = stepper_of(config("float32", offload="optimizer"))
    seen: list[Part] = []
    transfer = stepper.state.optimizer.parts
    stepper.state.optimizer.parts = lambda *a, **k: (seen.extend(x) or x for x in transfer(*a, **k))  # type: ignore[func-returns-value]
    stepper(pack(rollouts(1), step=1, budget=64, ranks=1)[0])
    assert len(seen) == len(stepper.state.params)
    assert all(x.value.data_ptr() != x.of.data_ptr() and torch.equal(x.value, x.of) for x in seen)


@pytest.mark.parametrize("values", [True, False])
def test_copies_are_ahead_and_behind_in_order_and_bounded(values: bool) -> None:
    params = [nn.Parameter(torch.full((2,), float(i))) for i in range(6)]
    for p in params:
        p.grad = torch.ones(2)
    asked: list[nn.Parameter] = []

    def chunks() -> Any:
        for p in params:
            asked.append(p)
            yield [p]

    order = []
    with torch.no_grad():
        for n, (part,) in enumerate(Transfer(torch.device("cpu"))(chunks(), values=values)):
            assert min(n + 1, 6) <= len(asked) <= n + AHEAD, "some ahead, no more than said"
            part.value.add_(10 * part.grad)
            order.append(int(part.of[0]) % 10)
            assert not values or part.of[0] == n, "not before the next is asked for"
    assert order == list(range(6))
    assert [p[0].item() for p in params] == [10.0 + i for i in range(6)]
