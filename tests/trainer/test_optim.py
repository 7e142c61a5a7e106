"""Schedules, the norm and the updates, against torch's own and NumPy's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from prl.config.schema import Optim
from prl.distributed.fsdp import shard
from prl.distributed.sharded import local
from prl.models.registry import build
from prl.models.spec import read_spec
from prl.samples import pack
from prl.trainer import muon, optim
from tests.distributed.ranks import Ranks
from tests.trainer.helpers import ALONE, ARCHITECTURE, config, rollouts, stepper_of
from tests.trainer.invariance import GLM_5


def test_schedules() -> None:
    def rates(total: int, **fields: Any) -> list[float]:
        return [optim.lr_at(Optim(lr=1.0, **fields), step, total) for step in range(1, total + 1)]

    assert rates(3) == [1, 1, 1]
    assert rates(6, warmup_steps=2) == [0.5, 1, 1, 1, 1, 1]
    assert rates(6, warmup_steps=2, schedule="linear") == [0.5, 1, 1, 0.75, 0.5, 0.25]
    cosine = rates(5, warmup_steps=1, schedule="cosine")
    assert cosine == pytest.approx([1, 1, (1 + math.cos(math.pi / 4)) / 2, 0.5, (1 + math.cos(3 * math.pi / 4)) / 2])
    assert optim.lr_at(Optim(lr=1.0, schedule="linear"), 50, 10) == 0
    wsd = {"schedule": "wsd", "warmup_steps": 2}
    assert rates(10, **wsd, decay_steps=4) == [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert rates(10, **wsd, decay_fraction=0.4) == rates(10, **wsd, decay_steps=4)
    assert rates(10, schedule="wsd") == [1] * 9 + [0.5], "a fifth of the steps"
    assert rates(6, **wsd, decay_steps=100) == rates(6, warmup_steps=2, schedule="linear"), "never into the warm-up"
    assert rates(3, schedule="wsd", decay_fraction=0) == [1, 1, 1]
    assert optim.lr_at(Optim(lr=1.0, **wsd), 11, 10) == 0


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_updates_are_torchs_bit_for_bit(kind: Any) -> None:
    config = Optim(kind=kind, lr=0.1, weight_decay=0.01, clip=0.5)
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(5, 3, generator=generator), torch.randn(7, generator=generator)]
    mine, theirs = ([torch.nn.Parameter(p.clone()) for p in start] for _ in range(2))
    named = {str(i): p for i, p in enumerate(mine)}
    optimizer = optim.make(config, named, matrices={}, device=ALONE.device)
    reference: torch.optim.Optimizer
    if kind == "sgd":
        reference = torch.optim.SGD(theirs, lr=config.lr, weight_decay=config.weight_decay)
    else:
        reference = torch.optim.AdamW(theirs, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=0.01, fused=True)
    for _ in range(4):
        gradients = [torch.randn(p.shape, generator=generator) for p in start]
        for p, q, g in zip(mine, theirs, gradients, strict=True):
            p.grad, q.grad = g.clone(), g.clone()
        norm = optim.global_norm([p.grad for p in mine if p.grad is not None], ALONE)
        assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(theirs, config.clip)), rel=1e-6)
        optim.clip([p.grad for p in mine if p.grad is not None], norm, config.clip)
        for q, g in zip(theirs, mine, strict=True):  # torch's norm is float32: compare the update alone
            assert q.grad is not None and g.grad is not None
            torch.testing.assert_close(q.grad, g.grad, rtol=1e-6, atol=0)
            q.grad = g.grad.clone()
        optim.apply(optimizer, config.lr)
        reference.step()
        assert all(torch.equal(p, q) for p, q in zip(mine, theirs, strict=True))


def one(kind: Any, p: nn.Parameter, matrices: dict[str, int], **fields: Any) -> optim.Optimizer:
    return optim.make(Optim(kind=kind, **fields), {"w": p}, matrices=matrices, device=ALONE.device)


def polynomial(x: np.ndarray) -> np.ndarray:
    """Muon's orthogonalisation by its definition: five times 3.4445 s - 4.775 s^3 + 2.0315 s^5 of each singular value."""
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    s = s / np.sqrt((s**2).sum())
    for _ in range(5):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    return np.asarray(u @ np.diag(s) @ vt)


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4)])
def test_muon_of_a_matrix_by_its_definition(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    expected, momentum = rng.normal(size=shape), np.zeros(shape)
    p = nn.Parameter(torch.tensor(expected))
    optimizer = one("muon", p, {"w": 1}, lr=0.1, weight_decay=0.5, momentum=0.9)
    for _ in range(3):
        g = rng.normal(size=shape)
        momentum = 0.9 * momentum + g
        update = 0.2 * math.sqrt(max(shape)) * polynomial(g + 0.9 * momentum)
        expected = expected - 0.1 * (update + 0.5 * expected)
        p.grad = torch.tensor(g)
        optim.apply(optimizer, 0.1)
    np.testing.assert_allclose(p.detach().numpy(), expected, rtol=0, atol=1e-12)


def test_muon_takes_each_expert_and_gate_and_up_for_themselves() -> None:
    rng = np.random.default_rng(1)
    g = rng.normal(size=(3, 8, 5)) * np.array([1, 1e-3, 0])[:, None, None]
    p = nn.Parameter(torch.zeros(3, 8, 5, dtype=torch.float64))
    p.grad = torch.tensor(g)
    optim.apply(one("muon", p, {"w": 2}, lr=1.0), 1.0)
    for expert in range(2):
        for half in (slice(0, 4), slice(4, 8)):
            expected = -0.2 * math.sqrt(5) * polynomial(g[expert, half])
            np.testing.assert_allclose(p[expert, half].detach().numpy(), expected, rtol=0, atol=1e-12)
    assert not p[2].any(), "no gradient, no update"


def test_muon_agrees_with_torchs_to_bfloat16() -> None:
    generator = torch.Generator().manual_seed(0)
    mine, theirs = (nn.Parameter(torch.zeros(24, 16)) for _ in range(2))
    reference = torch.optim.Muon([theirs], lr=1.0, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    optimizer = one("muon", mine, {"w": 1}, lr=1.0, weight_decay=0.1)
    for _ in range(3):
        mine.grad = torch.randn(24, 16, generator=generator)
        theirs.grad = mine.grad.clone()
        optim.apply(optimizer, 1.0)
        reference.step()
    assert (mine - theirs).norm() < 0.02 * theirs.norm()


def test_what_muon_leaves_to_adamw() -> None:
    for architecture in (ARCHITECTURE, GLM_5):
        model = build(read_spec(architecture), device="meta")
        named, matrices = dict(model.named_parameters()), muon.matrices(model)
        left = {n for n in named if n not in matrices}
        not_hidden = {n for n in named if n.endswith(("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight"))}
        assert left == not_hidden | {n for n, p in named.items() if p.dim() == 1} and len(not_hidden) == 4
        assert {n.rpartition(".")[2] for n, on_top in matrices.items() if on_top == 2} == {"gate_up_proj"}
    matrix, norm = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    c = Optim(kind="muon", lr=0.4, adam_lr=0.1)
    optimizer = optim.make(c, {"m": matrix, "n": norm}, matrices={"m": 1}, device=ALONE.device)
    matrix.grad, norm.grad = torch.eye(2), torch.ones(2)
    optim.apply(optimizer, 0.2)  # half of lr, as in a schedule
    torch.testing.assert_close(norm.detach(), torch.full((2,), 0.95))
    assert set(optimizer.state[matrix]) == {"momentum"} and set(optimizer.state[norm]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_in_bfloat16_is_rounded_once_a_step_and_nothing_else_is(kind: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, 4, generator=generator)
    narrow, wide = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer, reference = (one(kind, p, {"w": 1}, lr=0.1, state_dtype=t) for p, t in ((narrow, "bfloat16"), (wide, "float32")))
    for _ in range(5):
        narrow.grad = torch.randn(6, 4, generator=generator)
        wide.grad = narrow.grad.clone()
        for o in (optimizer, reference):
            optim.apply(o, 0.1)
        assert torch.equal(narrow, wide)
        for key, x in reference.state[wide].items():
            if x.dim():
                kept = optimizer.state[narrow][key]
                assert kept.dtype == torch.bfloat16 and torch.equal(kept, x.bfloat16())
                x.copy_(kept)


@pytest.mark.parametrize("kind", ["sgd", "adamw", "muon"])
def test_what_is_frozen_by_name_stays_and_has_no_state(kind: Any) -> None:
    frozen = [r".*\.experts\.down_proj", r"model\.embed_tokens\.weight", r".*norm\.weight"]
    c = config("float32", optim={"kind": kind, "lr": 1e-2})
    stepper = stepper_of(c.model_copy(update={"model": c.model.model_copy(update={"frozen": frozen})}))
    state = stepper.state
    before = {n: t.clone() for n, t in state.weights().items()}
    stepper(pack(rollouts(1), step=1, budget=64, ranks=1)[0])
    moved = {n for n, t in state.weights().items() if not torch.equal(t, before[n])}
    assert moved == state.params.keys() == state.model.state_dict().keys() - state_of_frozen(before)
    assert {name for name in state.saved() if name.startswith("optimizer.")} == {
        f"optimizer.{n}.{key}" for n, p in state.params.items() for key in state.optimizer.state[p]
    }


def state_of_frozen(names: Any) -> set[str]:
    ends = (".experts.down_proj", "model.embed_tokens.weight", "norm.weight", "e_score_correction_bias")
    return {n for n in names if n.endswith(ends)}


def test_small_gradients_are_not_scaled() -> None:
    g = torch.tensor([0.3, 0.4])
    optim.clip([g], optim.global_norm([g], ALONE), 1.0)
    assert g.tolist() == pytest.approx([0.3, 0.4])


def test_the_norm_does_not_overflow_and_shows_what_is_not_finite() -> None:
    assert optim.global_norm([torch.full((4,), 1e30)], ALONE) == pytest.approx(2e30)
    assert math.isnan(optim.global_norm([torch.tensor([1.0, math.nan])], ALONE))
    assert math.isinf(optim.global_norm([torch.tensor([1.0, -math.inf])], ALONE))


def shared(rank: int, copies: int, cut_over: int) -> tuple[list[bool], int]:
    """Whether this rank's parts are those of whole matrices orthogonalised by one process, and how many it worked on."""
    # Rows that do not divide or are fewer than ranks, experts cut across their rows, whole experts.
    on_top = {(5, 3): 1, (2, 4): 1, (4, 6, 5): 2, (6, 2, 3): 2, (7, 7): 1}
    mesh = DeviceMesh("cpu", torch.arange(copies * cut_over).view(copies, cut_over), mesh_dim_names=("replicate", "fsdp"))
    generator = torch.Generator().manual_seed(0)
    module = nn.ParameterList(torch.randn(s, generator=generator, dtype=torch.float64) for s in on_top)
    expected = [muon._each(p.detach(), on_top[tuple(p.shape)]) for p in module]
    shard(module, mesh if copies > 1 else mesh["fsdp"], compute=torch.float64, master=torch.float64)
    parts = list(module)
    counted, newton_schulz = [], muon.newton_schulz

    def counting(x: torch.Tensor) -> torch.Tensor:
        counted.append(len(x))
        return newton_schulz(x)

    muon.newton_schulz = counting
    try:
        with torch.no_grad():
            got = muon.orthogonalise(parts, [local(p) for p in parts], {p: on_top[tuple(p.shape)] for p in parts})
    finally:
        muon.newton_schulz = newton_schulz
    same = []
    for p, x, e in zip(parts, got, expected, strict=True):
        assert isinstance(p, DTensor)
        part = distribute_tensor(e, p.device_mesh, p.placements).to_local()
        same.append(x.shape == part.shape and torch.allclose(x, part, rtol=0, atol=1e-12))
    return same, sum(counted)


def test_each_cut_matrix_is_worked_on_by_one_rank_and_its_parts_come_back(ranks: Ranks) -> None:
    found = ranks.run(3, shared, 1, 3)
    assert all(all(same) for same, _ in found)
    # Three matrices, four experts of two halves that are cut, and in place two whole ones of two halves on every rank.
    assert sum(n for _, n in found) == 3 + 8 + 12 and max(n for _, n in found) <= 4 + 5
    found = ranks.run(4, shared, 2, 2)
    assert all(all(same) for same, _ in found)
    # On both copies the three matrices; all experts are whole.
    assert sum(n for _, n in found) == 2 * (3 + 8 + 12)
