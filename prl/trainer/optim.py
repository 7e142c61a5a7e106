"""The optimizer, its schedule and the gradient's norm. Masters and state are float32 or wider, whatever the forward's type."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from prl.config.schema import Optim
from prl.distributed.mesh import Mesh
from prl.distributed.sharded import local


def lr_at(optim: Optim, step: int, total: int) -> float:
    """Learning rate of step `step` (from 1) of `total`: linear warm-up, then constant, or down to 0 by a line or a cosine.

    A pure function of the step, so a resume needs no scheduler state.
    """
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    done = min((step - optim.warmup_steps - 1) / max(total - optim.warmup_steps, 1), 1.0)
    if optim.schedule == "linear":
        return optim.lr * (1 - done)
    if optim.schedule == "cosine":
        return optim.lr * (1 + math.cos(math.pi * done)) / 2
    return optim.lr


def make(optim: Optim, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's own AdamW or SGD, with its state in place from the start, so that a checkpoint always has the same entries."""
    params = list(params)
    if optim.kind == "sgd":
        return torch.optim.SGD(params, lr=optim.lr, weight_decay=optim.weight_decay)
    adamw = torch.optim.AdamW(params, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay)
    for p in params:
        adamw.state[p] = {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    return adamw


def apply(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """One update at `lr`. At 0 nothing is touched: p - 0 * u would still turn -0.0 into 0.0."""
    if lr == 0:
        return
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()


def global_norm(grads: Sequence[Tensor], mesh: Mesh) -> float:
    """Euclidean norm over all parameters and ranks, accumulated in float64; not finite exactly where a gradient is not."""
    squares = [torch.linalg.vector_norm(local(g), dtype=torch.float64).square() for g in grads]
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=mesh.device)
    return float(mesh.sum_copy(total).sqrt())


def clip(grads: Sequence[Tensor], norm: float, limit: float) -> None:
    """Scale the gradients in place so that their global norm, `norm`, is at most `limit`; as torch's clip_grad_norm_."""
    if norm > limit:
        torch._foreach_mul_([local(g) for g in grads], limit / (norm + 1e-6))
