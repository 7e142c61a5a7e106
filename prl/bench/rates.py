"""What products, attention and copies reach on one thread of this machine, as a trainer computes them: forward and backward.

Operations are those that `prl.plan.work` counts for the same.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prl.kernels.experts import experts
from prl.kernels.latent_attention import latent_attention
from prl.kernels.linear import linear_fp8

TURNS = 2
"""Of each, whenever they are measured."""

Way = tuple[Callable[[], object], float]
"""(what is timed, operations or bytes)."""


def ways() -> dict[str, dict[str, Way]]:
    """By the plan's kinds, of each kind several shapes; on one thread."""
    t, bf16, f32 = 2048, torch.bfloat16, torch.float32
    torch.manual_seed(0)

    def x(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape).mul_(0.05).to(dtype).requires_grad_()

    def both(f: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], object]:
        def run() -> None:
            y = f(*inputs)
            torch.autograd.grad(y, inputs, torch.ones_like(y))

        return run

    ids = torch.stack([torch.randperm(16)[:4] for _ in range(t)])
    share = torch.full((t, 4), 0.25)

    def routed(precision: Any) -> Callable[..., Tensor]:
        return lambda tokens, up, down: experts(tokens, ids, share, up, down, precision=precision)

    def products(dtype: torch.dtype, dense: Callable[..., Tensor], precision: Any) -> dict[str, Way]:
        d, i = 384, 128
        out: dict[str, Way] = {}
        for n in (384, 1024):
            out[f"linear [{t}, {d}] · [{d}, {n}]"] = both(dense, x(t, d, dtype=dtype), x(n, d, dtype=dtype)), 6.0 * t * d * n
        stacks = x(16, 2 * i, d, dtype=dtype), x(16, d, i, dtype=dtype)
        out[f"4 of 16 experts [{t}, {d}], inner {i}"] = (
            both(routed(precision), x(t, d, dtype=dtype), *stacks),
            18.0 * t * 4 * d * i,
        )
        return out

    s, h, c, b = 512, 8, 48, 4
    mask = torch.ones(b, s, s, dtype=torch.bool).tril()
    heads = [x(b, n, s, c, dtype=bf16) for n in (h, 2, 2)]
    latent = x(b, s, h, c + 16, dtype=bf16), x(b, s, c + 16, dtype=bf16)

    def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], enable_gqa=True)

    square_f32, square_bf16 = torch.ones(1024, 1024), torch.ones(1024, 1024, dtype=bf16)
    source = torch.randn(16 << 20)
    into = torch.empty_like(source)
    return {
        "float32": products(f32, F.linear, "bf16"),
        "bf16": products(bf16, F.linear, "bf16"),
        "fp8": products(bf16, linear_fp8, "fp8"),
        "attention": {
            f"grouped queries, {b} of {s}": (both(grouped, *heads), 6.0 * b * s * s * h * 2 * c),
            f"latent keys, {b} of {s}": (
                both(lambda q, k: latent_attention(q, k, mask, c, 0.1), *latent),
                6.0 * b * s * s * h * (2 * c + 16),
            ),
        },
        "peak float32": {"1024 x 1024": (lambda: square_f32 @ square_f32, 2.0 * 1024**3)},
        "peak bf16": {"1024 x 1024": (lambda: square_bf16 @ square_bf16, 2.0 * 1024**3)},
        "copy": {"64 MiB": (lambda: into.copy_(source), 2.0 * source.numel() * 4)},
    }


class Rates:
    """Operations or bytes per second of a thread, by kind; measured again whenever called."""

    def __init__(self) -> None:
        self.ways = ways()
        self.seconds: dict[tuple[str, str], list[float]] = {}

    def __call__(self) -> None:
        first = not self.seconds
        for _ in range(TURNS + first):
            for kind, found in self.ways.items():
                for name, (run, _) in found.items():
                    t0 = time.process_time()
                    run()
                    self.seconds.setdefault((kind, name), []).append(time.process_time() - t0)
        if first:  # the first turn does not count
            self.seconds = {key: s[1:] for key, s in self.seconds.items()}

    def each(self) -> dict[str, dict[str, float]]:
        return {
            kind: {name: n / statistics.median(self.seconds[kind, name]) for name, (_, n) in found.items()}
            for kind, found in self.ways.items()
        }
