"""The optimizers, their schedule and the gradient's norm. Masters are float32 or wider, whatever the forward's type."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from prl.config.schema import Optim
from prl.distributed.mesh import Mesh
from prl.distributed.sharded import local
from prl.trainer import muon
from prl.trainer.offload import Part, Transfer, in_place

CHUNK = 1 << 26
"""Elements of a rank's parts that are updated, copied or exchanged together: bounds what an update needs beside them."""


def lr_at(optim: Optim, step: int, total: int) -> float:
    """Learning rate of step `step` (from 1) of `total`: linear warm-up, then constant, down to 0 by a line or a cosine, or
    constant and then down by a line (wsd, arXiv 2404.06395).

    A pure function of the step, so a resume needs no scheduler state.
    """
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    end = max(total, optim.warmup_steps + 1)
    length = end - optim.warmup_steps
    if optim.schedule == "wsd":
        decay = math.ceil(total * optim.decay_fraction) if optim.decay_steps is None else optim.decay_steps
        length = min(length, max(decay, 1))
    done = min(max((step - 1 - (end - length)) / length, 0.0), 1.0)
    if optim.schedule == "cosine":
        return optim.lr * (1 + math.cos(math.pi * done)) / 2
    if optim.schedule == "constant":
        return optim.lr
    return optim.lr * (1 - done)


def make(
    optim: Optim,
    params: Mapping[str, nn.Parameter],
    *,
    matrices: Mapping[str, int],
    device: torch.device,
    offload: Literal["none", "optimizer", "parameters"] = "none",
) -> Optimizer:
    """The optimizer of named parameters. `matrices`: `muon.matrices`. With `offload` its state is on the host, and `device`
    computes only Muon's products."""
    kinds = {n: "adamw" if optim.kind == "muon" and n not in matrices else optim.kind for n in params}
    groups = [
        {"params": [p for n, p in params.items() if kinds[n] == kind], "kind": kind, "lr_ratio": ratio}
        for kind, ratio in (
            ("sgd", 1.0),
            ("muon", 1.0),
            ("adamw", 1.0 if optim.adam_lr is None else optim.adam_lr / optim.lr),
        )
    ]
    on_top = {p: matrices[n] for n, p in params.items() if kinds[n] == "muon"}
    return Optimizer([g for g in groups if g["params"]], optim, on_top, device, offload)


class Optimizer(torch.optim.Optimizer):
    """Each rank updates its own parts of the parameters; Muon's orthogonalisation alone needs others.

    The state is there from the start, so that a checkpoint always has the same entries: parts of whole tensors, as the
    parameters are. It may be kept in bfloat16; arithmetic is in the parameter's type.
    """

    def __init__(
        self, groups: list[dict[str, Any]], optim: Optim, on_top: Mapping[nn.Parameter, int], device: torch.device, offload: str
    ):
        super().__init__(groups, {"lr": optim.lr})
        self.optim, self.on_top, self.device = optim, on_top, device
        self.parts: Callable[..., Iterator[list[Part]]] = Transfer(device) if offload == "optimizer" else in_place
        self.updates = {"sgd": self._sgd, "adamw": self._adamw, "muon": self._muon}
        keys = {"sgd": (), "adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum",)}
        dtype = torch.bfloat16 if optim.state_dtype == "bfloat16" else None
        for group in self.param_groups:
            for p in group["params"]:
                home = p.device if offload == "none" else torch.device("cpu")
                state = {key: torch.zeros_like(p, dtype=dtype, device=home).detach() for key in keys[group["kind"]]}
                self.state[p] = state | ({"step": torch.tensor(0.0, device=home)} if group["kind"] == "adamw" else {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            for parts in self.parts(_chunks(given), values=group["kind"] != "muon"):
                self.updates[group["kind"]](parts, group["lr"])

    def _sgd(self, parts: list[Part], lr: float) -> None:
        values, grads, none = [x.value for x in parts], [x.grad for x in parts], [None] * len(parts)
        decay = self.optim.weight_decay
        sgd(values, grads, none, weight_decay=decay, momentum=0.0, lr=lr, dampening=0.0, nesterov=False, maximize=False)  # type: ignore[arg-type]

    def _adamw(self, parts: list[Part], lr: float) -> None:
        first, second = self._wide(parts, "exp_avg"), self._wide(parts, "exp_avg_sq")
        adamw(
            [x.value for x in parts],
            [x.grad for x in parts],
            first,
            second,
            [],
            [self.state[x.of]["step"] for x in parts],
            fused=True,
            amsgrad=False,
            beta1=self.optim.betas[0],
            beta2=self.optim.betas[1],
            lr=lr,
            weight_decay=self.optim.weight_decay,
            eps=self.optim.eps,
            maximize=False,
        )
        self._keep(parts, "exp_avg", first)
        self._keep(parts, "exp_avg_sq", second)

    def _muon(self, parts: list[Part], lr: float) -> None:
        """W ← W − lr · (0.2 √max(N, K) · O + decay · W), O the orthogonalised Nesterov momentum."""
        beta, momenta = self.optim.momentum, self._wide(parts, "momentum")
        for momentum, x in zip(momenta, parts, strict=True):
            momentum.lerp_(x.grad, 1 - beta)
        updates = [x.grad.lerp(m, beta).to(self.device) for m, x in zip(momenta, parts, strict=True)]
        self._keep(parts, "momentum", momenta)
        done = muon.orthogonalise([x.of for x in parts], updates, self.on_top)
        for x, update in zip(parts, done, strict=True):
            x.value.mul_(1 - lr * self.optim.weight_decay)
            x.value.add_(update.to(x.value.device), alpha=-lr * muon.scale(x.of.shape, self.on_top[x.of]))

    def _wide(self, parts: list[Part], key: str) -> list[Tensor]:
        """State in the parameters' type: itself where it is of that type."""
        return [local(self.state[x.of][key]).to(x.grad.dtype) for x in parts]

    def _keep(self, parts: list[Part], key: str, wide: list[Tensor]) -> None:
        for x, w in zip(parts, wide, strict=True):
            if (kept := local(self.state[x.of][key])) is not w:
                kept.copy_(w)


def _chunks(params: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Cut where a rank's share of them exceeds CHUNK elements: at the same places on every rank."""
    chunk: list[nn.Parameter] = []
    size = 0
    for p in params:
        share = p.numel() // (p.device_mesh.size(-1) if isinstance(p, DTensor) else 1)
        if chunk and size + share > CHUNK:
            yield chunk
            chunk, size = [], 0
        chunk.append(p)
        size += share
    if chunk:
        yield chunk


def apply(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """One update at `lr`. At 0 nothing is touched: p - 0 * u would still turn -0.0 into 0.0."""
    if lr == 0:
        return
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_ratio"]
    optimizer.step()


def global_norm(grads: Sequence[Tensor], mesh: Mesh) -> float:
    """Euclidean norm over all parameters and ranks, accumulated in float64; not finite exactly where a gradient is not."""
    squares = [torch.linalg.vector_norm(local(g), dtype=torch.float64).square() for g in grads]
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
    return float(mesh.sum_copy(total.to(mesh.device)).sqrt())


def clip(grads: Sequence[Tensor], norm: float, limit: float) -> None:
    """Scale the gradients in place so that their global norm, `norm`, is at most `limit`; as torch's clip_grad_norm_."""
    if norm > limit:
        torch._foreach_mul_([local(g) for g in grads], limit / (norm + 1e-6))
