"""The mesh of the trainer's ranks: what auto means, that every rank has one place, and what is said of what does not divide."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prl.config.mesh import MeshError, data_ranks, problems, resolve
from prl.config.schema import Mesh, Trainer


def trainer(ranks: int, **mesh: Any) -> Trainer:
    return Trainer.model_validate({"ranks": ranks, "mesh": mesh})


@pytest.mark.parametrize(
    ("ranks", "mesh", "experts", "expected"),
    [
        (1, {}, 16, (1, 1, 1, 1)),
        (2, {}, 16, (1, 2, 1, 2)),
        (128, {}, 256, (1, 128, 1, 128)),  # the largest that divides both
        (96, {}, 256, (1, 96, 1, 32)),
        (4, {}, 0, (1, 4, 1, 1)),  # no experts to spread
        (128, {"cp": 8, "ep": 8}, 256, (1, 16, 8, 8)),
        (16, {"replicate": 2, "cp": 2}, 8, (2, 4, 2, 8)),
        (8, {"cp": 8, "ep": 4}, 8, (1, 1, 8, 4)),
        (12, {"dispatcher": "deepep"}, 12, (1, 12, 1, 4)),  # of which DeepEP knows groups
    ],
)
def test_auto_is_the_smallest_cp_then_the_largest_ep(
    ranks: int, mesh: dict[str, Any], experts: int, expected: tuple[int, ...]
) -> None:
    shape = resolve(trainer(ranks, **mesh), experts)
    assert (shape.replicate, shape.shard, shape.context, shape.expert) == expected


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 8), st.sampled_from([0, 6, 8, 16]))
def test_a_mesh_without_problems_uses_every_rank_once(ranks: int, cp: int, replicate: int, experts: int) -> None:
    given_ = trainer(ranks, cp=cp, replicate=replicate)
    if problems(given_, experts):
        with pytest.raises(MeshError):
            resolve(given_, experts)
        return
    shape = resolve(given_, experts)
    assert shape.world == ranks and shape.context == cp and shape.data == data_ranks(given_)
    assert shape.fsdp % shape.expert == 0 and (experts % shape.expert == 0 if experts else shape.expert == 1)


def test_fp8_shares_whole_experts_evenly() -> None:
    assert resolve(Trainer(ranks=128, precision="fp8", mesh=Mesh(ep=8)), 256).expert_fsdp == 16
    with pytest.raises(MeshError, match=r"trainer.mesh: fp8 .* the 16 experts of a rank \(experts / ep\) over 14 "):
        resolve(Trainer(ranks=224, precision="fp8", mesh=Mesh(ep=16)), 256)
    with pytest.raises(MeshError, match="the 8 experts of a rank .* over 7 "):
        resolve(Trainer(ranks=224, precision="fp8"), 256)


@pytest.mark.parametrize(
    ("ranks", "mesh", "experts", "says"),
    [
        (6, {"cp": 4}, 8, r"trainer.mesh.cp: expected a divisor of trainer.ranks = 6, such as 3 or 6, got 4"),
        (
            8,
            {"cp": 2, "replicate": 3},
            8,
            "mesh.replicate: expected a divisor of ranks / cp = 4, such as 2 or 4, got 3",
        ),
        (8, {"ep": 3}, 8, r"trainer.mesh.ep: expected a divisor of the model's 8 experts, such as 2 or 4, got 3"),
        (6, {"ep": 4}, 8, r"ep: expected a divisor of the 6 ranks of a copy \(ranks / replicate\), such as 3 or 6, got 4"),
        (12, {"ep": 6, "dispatcher": "deepep"}, 12, "ep: the dispatcher deepep knows groups of 2, 4, 8, 16, .* ranks, got 6"),
        (2, {"ep": 2}, 0, "no experts to spread over 2 ranks: expected 1 or auto"),
    ],
)
def test_what_does_not_divide_is_named_with_what_does(ranks: int, mesh: dict[str, Any], experts: int, says: str) -> None:
    with pytest.raises(MeshError, match=says):
        resolve(trainer(ranks, **mesh), experts)
