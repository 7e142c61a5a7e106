"""Every step's mismatch against the band of its pair; one clear line, and the tokens to look at, when a run leaves it; and what
of a step tells the causes apart.

Legend: N the positions whose logits score a trainable token, of which rl_N picks the RL tokens; L MoE layers, E experts,
K experts per token.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prl.config.schema import RunConfig
from prl.monitor import bands
from prl.monitor.metrics import Metrics
from prl.samples import Batch, MicroBatch, shift_left
from prl.transport.run_dir import RunDir

log = logging.getLogger(__name__)
DOCUMENTS = 64
"""Of the batch, kept for prl.score."""


class DriftError(RuntimeError):
    """Trainer and engine drift apart, and monitor.drift is stop."""


class Drift:
    """Judges the records of one trainer; `alarm` is the line of the last alarm, empty before."""

    def __init__(self, run: RunDir, config: RunConfig, metrics: Metrics):
        self.run_dir, self.config, self.metrics = run, config, metrics
        self.pair, self.watch, self.alarm = bands.Pair.of(config), bands.Watch(), ""

    def __call__(self, batch: Batch, record: Mapping[str, Any]) -> dict[str, Any] | None:
        """What the step's record says of it; None where the step trained no RL tokens."""
        if "mismatch_kl" not in record:
            return None
        verdict, self.watch = bands.judge(record, self.pair, self.watch)
        if verdict.raised:
            tokens = keep(batch, self.run_dir.root / "drift")
            self.alarm = bands.alarm_line(verdict, batch.step, self._next(tokens))
            log.warning("%s", self.alarm)
            self.metrics.log("event", name="drift", step=batch.step, text=self.alarm, causes=list(verdict.causes))
        return verdict.record()

    def _next(self, tokens: Path) -> str:
        c = self.config
        model = self.run_dir.root / "sft" / "model" if c.sft is not None else c.model.path or self.run_dir.root / "model"
        return f"python -m prl.score {model} --tokens {tokens} --dtype {c.inference.dtype} --against embedded"


def keep(batch: Batch, folder: Path) -> Path:
    """Tokens of some of the batch's documents, as prl.score reads them."""
    folder.mkdir(exist_ok=True, mode=0o700)
    path = folder / f"step_{batch.step}.jsonl"
    documents = [d for mb in batch.micro_batches for d in np.split(mb.sample.tokens, np.cumsum(mb.lengths)[:-1]) if len(d) > 1]
    path.write_text("".join(json.dumps({"tokens": d.tolist()}) + "\n" for d in documents[:DOCUMENTS]), "utf-8")
    return path


def mismatch(d: Tensor) -> Tensor:
    """exp(d) - 1 - d in float64, d = trainer - engine logprob [N]: per-token estimate of KL(engine || trainer). Not clamped."""
    d = d.double()
    return d.expm1() - d


def hints(sums: Mapping[str, float], own_d_N: Tensor, own_kl_2LE: Tensor) -> dict[str, float | None]:
    """What tells causes of a mismatch apart, over own tokens: of their differences, of the sums of `tempered_kl` and
    `shifted_kl`, and of `kl_by_expert`'s."""
    pairs, tempered = sums["neighbours"], sums["own_tempered"]
    return {
        "mean": float(own_d_N.mean()),
        "mean_error": float(own_d_N.std(correction=0)) / math.sqrt(len(own_d_N)),
        "size": float(own_d_N.abs().mean()),
        "kl_at_1": sums["kl_at_1"] / sums["own_at_1"] if tempered and sums["own_at_1"] else None,
        "kl_tempered": sums["kl_tempered"] / tempered if tempered else None,
        "shifted_kl": min(sums["kl_left"], sums["kl_right"]) / pairs if pairs else None,
        "expert_contrast": contrast(own_kl_2LE),
    }


def tempered_kl(mb: MicroBatch, kl_N: Tensor, rl_N: Tensor, own_N: Tensor) -> dict[str, Tensor | float]:
    """Sums of the mismatch of own tokens, and their numbers, at temperature 1 and at others."""
    s = mb.sample
    rows = np.flatnonzero(shift_left(s.trainable, False))
    if not len(rows):
        return dict.fromkeys(("kl_at_1", "own_at_1", "kl_tempered", "own_tempered"), 0.0)
    one = torch.from_numpy(shift_left(s.temperature)[rows] == 1).to(kl_N.device)[rl_N]
    at_1, other = own_N & one, own_N & ~one
    sums = {"kl_at_1": kl_N[at_1].sum(), "own_at_1": at_1.sum(), "kl_tempered": kl_N[other].sum(), "own_tempered": other.sum()}
    return {**sums}


def shifted_kl(new_N: Tensor, old_N: Tensor, documents_N: Tensor, own_N: Tensor) -> dict[str, Tensor]:
    """Sums of the mismatch that own tokens would have if the engine's logprobs belonged to the token before, or after."""
    both = own_N[:-1] & own_N[1:] & (documents_N[:-1] == documents_N[1:])
    left, right = mismatch(new_N[:-1] - old_N[1:]), mismatch(new_N[1:] - old_N[:-1])
    return {"neighbours": both.sum(), "kl_left": left[both].sum(), "kl_right": right[both].sum()}


HINT_TOKENS = 4096
"""Own tokens of a micro-batch that are looked at expert by expert."""


def kl_by_expert(mb: MicroBatch, kl_N: Tensor, rl_N: Tensor, own_N: Tensor, shape: tuple[int, ...]) -> Tensor:
    """float64 [2, L, E]: the mismatch of the tokens that each expert had a part in, and their number."""
    s, (n_layers, n_experts) = mb.sample, shape
    out_2LE = np.zeros((2, n_layers * n_experts))
    if s.routes is not None and len(kl_N):
        rows = np.flatnonzero(shift_left(s.trainable, False))[rl_N.numpy()][own_N.numpy()]
        keep = s.routed[rows]
        rows, kl = rows[keep][:HINT_TOKENS], kl_N[own_N].numpy()[keep][:HINT_TOKENS]
        at_NLK = s.routes[rows].astype(np.int64) + n_experts * np.arange(n_layers)[:, None]
        out_2LE[0] = np.bincount(at_NLK.ravel(), np.repeat(kl, at_NLK[0].size if len(kl) else 0), n_layers * n_experts)
        out_2LE[1] = np.bincount(at_NLK.ravel(), minlength=n_layers * n_experts)
    return torch.from_numpy(out_2LE).view(2, n_layers, n_experts)


def contrast(kl_2LE: Tensor) -> float | None:
    """Mean mismatch of the tokens of the worst expert over that of the other experts of its layer; None without routes.

    Experts with few tokens are left out: they say nothing.
    """
    total_L1, number_L1 = kl_2LE.sum(-1, keepdim=True)
    if not number_L1.numel() or not number_L1.min() > 0:
        return None
    kl_LE, number_LE = kl_2LE
    mean_LE = kl_LE / number_LE.clamp(min=1)
    rest_LE = (total_L1 - kl_LE) / (number_L1 - number_LE).clamp(min=1)
    enough_LE = (number_LE > 0.02 * number_L1) & (number_LE >= 16) & (rest_LE > 0)
    ratios = (mean_LE / rest_LE)[enough_LE]
    return float(ratios.max()) if len(ratios) else None
