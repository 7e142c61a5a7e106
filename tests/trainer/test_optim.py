"""Schedules, the norm and the update, against torch's own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from prl.config.schema import Optim
from prl.trainer import optim
from tests.trainer.helpers import ALONE


def test_schedules() -> None:
    def rates(total: int, **fields: Any) -> list[float]:
        return [optim.lr_at(Optim(lr=1.0, **fields), step, total) for step in range(1, total + 1)]

    assert rates(3) == [1, 1, 1]
    assert rates(6, warmup_steps=2) == [0.5, 1, 1, 1, 1, 1]
    assert rates(6, warmup_steps=2, schedule="linear") == [0.5, 1, 1, 0.75, 0.5, 0.25]
    cosine = rates(5, warmup_steps=1, schedule="cosine")
    assert cosine == pytest.approx([1, 1, (1 + math.cos(math.pi / 4)) / 2, 0.5, (1 + math.cos(3 * math.pi / 4)) / 2])
    assert optim.lr_at(Optim(lr=1.0, schedule="linear"), 50, 10) == 0


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_updates_are_torchs_bit_for_bit(kind: Any) -> None:
    config = Optim(kind=kind, lr=0.1, weight_decay=0.01, clip=0.5)
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(5, 3, generator=generator), torch.randn(7, generator=generator)]
    mine, theirs = ([torch.nn.Parameter(p.clone()) for p in start] for _ in range(2))
    optimizer = optim.make(config, mine)
    reference: torch.optim.Optimizer
    if kind == "sgd":
        reference = torch.optim.SGD(theirs, lr=config.lr, weight_decay=config.weight_decay)
    else:
        reference = torch.optim.AdamW(theirs, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=0.01)
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


def test_small_gradients_are_not_scaled() -> None:
    g = torch.tensor([0.3, 0.4])
    optim.clip([g], optim.global_norm([g], ALONE), 1.0)
    assert g.tolist() == pytest.approx([0.3, 0.4])


def test_the_norm_does_not_overflow_and_shows_what_is_not_finite() -> None:
    assert optim.global_norm([torch.full((4,), 1e30)], ALONE) == pytest.approx(2e30)
    assert math.isnan(optim.global_norm([torch.tensor([1.0, math.nan])], ALONE))
    assert math.isinf(optim.global_norm([torch.tensor([1.0, -math.inf])], ALONE))
