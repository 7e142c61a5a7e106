"""The losses: pure functions of one micro-batch, each with its formula and paper.

Legend: N tokens of a micro-batch, D its documents (one `Sample` each). Per token j: t trainer logprob (with gradient, at
the sampling temperature), i engine logprob at sampling time, d = t - i, r = exp(d), A advantage, w weight; sg(.) stops the
gradient.

A loss gives `per_token` [N]; the micro-batch's loss is `total` = sum over masked-in tokens of w * per_token. The weights come
from `weights` with the counts of the whole batch over all ranks, so losses and gradients of micro-batches and ranks are
*summed*, never averaged, and depend on the batch alone. Ratios of a sequence are per document, normalisation is per rollout.

Three rules hold throughout:
* The exponent of every ratio is clamped to +-`MAX_LOG_RATIO`, so that no ratio overflows; the loss itself is never clamped.
* A mask selects with `torch.where` and never multiplies: what it leaves out cannot reach a value or a gradient, finite or not.
* A non-finite logprob or advantage of a masked-in token makes the loss non-finite; no comparison or clamp swallows it.

Metrics are sums over masked-in tokens: add them over micro-batches and ranks, then divide by the batch's tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from prl.config.named import named

MAX_LOG_RATIO = 20.0
"""Bound of the exponent of a ratio: exp(20) = 4.9e8, far over any use of a ratio and far under float32's limit, exp(88.7)."""


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch, flat. Everything is indexed by the token it speaks of, and is 0 where masked out, whatever came in.

    logprobs [N] float32 or wider, with gradient; old_logprobs [N] of the engine; advantages [N]; mask bool [N], the tokens
    that this loss reads; documents int64 [N], the document of each token; weights [N], from `weights`;
    entropy [N] of the trainer's distribution, with gradient.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    documents: Tensor
    weights: Tensor
    entropy: Tensor

    def __post_init__(self) -> None:
        # Before any formula: a `where` behind one would still send 0 * inf = NaN back through its gradient.
        for name in ("logprobs", "old_logprobs", "advantages", "weights", "entropy"):
            object.__setattr__(self, name, torch.where(self.mask, getattr(self, name), 0.0))

    @property
    def log_ratio(self) -> Tensor:
        """d [N]."""
        return self.logprobs - self.old_logprobs


@dataclass(frozen=True)
class LossOutput:
    per_token: Tensor
    """[N]; entries of masked-out tokens are not read."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Sums over masked-in tokens, detached."""


LossFunction = Callable[..., LossOutput]
Normalise = Literal["token", "sequence", "constant"]


def weights(
    mask: Tensor,
    documents: Tensor,
    rollout_tokens: Tensor,
    *,
    normalise: Normalise,
    n_tokens: int,
    n_rollouts: int,
    constant_tokens: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """w [N], 0 where masked out, from counts of the whole batch over all ranks.

    token: 1 / n_tokens, every token counts the same (DAPO, arXiv 2503.14476). sequence: 1 / (n_rollouts * tokens of the
    rollout in all its documents), every rollout counts the same (GRPO, arXiv 2402.03300). constant: 1 / (n_rollouts *
    constant_tokens), no bias by length at all (Dr. GRPO, arXiv 2503.20783).

    mask bool [N]; documents int64 [N]; rollout_tokens [D], trainable tokens of each document's rollout.
    """
    if normalise == "token":
        w = torch.full(mask.shape, 1.0 / max(n_tokens, 1), dtype=dtype, device=mask.device)
    elif normalise == "sequence":
        w = 1.0 / (max(n_rollouts, 1) * rollout_tokens.to(dtype)[documents])
    elif normalise == "constant":
        w = torch.full(mask.shape, 1.0 / (max(n_rollouts, 1) * constant_tokens), dtype=dtype, device=mask.device)
    else:
        raise ValueError(f"loss.normalise: {normalise!r}, expected token, sequence or constant")
    return torch.where(mask, w, 0.0)


def total(inputs: LossInputs, output: LossOutput) -> Tensor:
    """The micro-batch's share of the batch's loss, a scalar to call backward on; shares add up over micro-batches and ranks."""
    return torch.where(inputs.mask, inputs.weights * output.per_token, 0.0).sum()


def ratio(log_ratio: Tensor) -> Tensor:
    """r = exp(d), exponent clamped; of an infinite d NaN, so that a guard sees it and not a plausible ratio."""
    d = torch.where(log_ratio.isfinite(), log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), torch.nan)
    return d.exp()


def document_sums(values: Tensor, documents: Tensor) -> Tensor:
    """Sum of `values` [N] over each token's document, given back to every token [N]."""
    return values.new_zeros(int(documents.max()) + 1).index_add(0, documents, values)[documents]


def sequence_log_ratio(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Sum and mean of d over the masked-in tokens of each token's document, [N] each, detached."""
    d = inputs.log_ratio.detach()
    sums = document_sums(d, inputs.documents)
    return sums, sums / document_sums(inputs.mask.to(d.dtype), inputs.documents).clamp(min=1)


def _counted(inputs: LossInputs, **flags: Tensor) -> dict[str, Tensor]:
    return {name: (flag & inputs.mask).sum() for name, flag in flags.items()}


def dppo(
    inputs: LossInputs, *, mask_low: float = 0.2, mask_high: float = 0.2, adv_tau: float = 1.0, kl_tau: float = 1e-3
) -> LossOutput:
    """DPPO with squared-log KL: a trust region on the token's probability itself, and a pull back to the sampler.

        dp = exp(t) - exp(i);  drop = (A > 0 and dp > mask_high) or (A <= 0 and dp < -mask_low)
        L = -[not drop] adv_tau A r + kl_tau d^2          (gradient flows through r; d^2 acts on dropped tokens too)

    Binary total variation mask of DPPO (arXiv 2602.04879), squared-log KL of Kimi K2.5 (arXiv 2602.02276).
    """
    d, a = inputs.log_ratio, inputs.advantages
    dp = (inputs.logprobs.exp() - inputs.old_logprobs.exp()).detach()
    high, low = (a > 0) & (dp > mask_high), (a <= 0) & (dp < -mask_low)
    policy = -adv_tau * a * torch.where(high | low, 0.0, ratio(d))
    return LossOutput(policy + kl_tau * d.square(), _counted(inputs, dropped_high=high, dropped_low=low))


def grpo(inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float = 3.0) -> LossOutput:
    """GRPO's clipped surrogate, with clip-higher and dual clip.

        L = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A);  where A < 0 and dual_clip > 1: L = min(L, -dual_clip A)

    GRPO (arXiv 2402.03300), clip-higher of DAPO (arXiv 2503.14476), dual clip (arXiv 1912.09729; 0 turns it off).
    """
    r, a = ratio(inputs.log_ratio), inputs.advantages
    plain, clipped = -r * a, -r.clamp(1 - clip_low, 1 + clip_high) * a
    loss = torch.maximum(plain, clipped)
    capped = torch.zeros_like(inputs.mask)
    if dual_clip:
        cap = -dual_clip * a
        capped = (a < 0) & (loss > cap)
        loss = torch.where(capped, cap, loss)
    return LossOutput(loss, _counted(inputs, clipped=(clipped > plain) & ~capped, dual_clipped=capped))


def gspo(inputs: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossOutput:
    """GSPO, token form: the clipped surrogate on the length-normalised ratio of the whole sequence.

        s = exp(mean of d over the document);  s_j = sg(s) exp(t_j - sg(t_j));  L = -min(s_j A, clip(s_j, 1 -+ clip) A)

    With one advantage per sequence and `normalise: sequence` this is GSPO itself. arXiv 2507.18071.
    """
    _, mean = sequence_log_ratio(inputs)
    t, a = inputs.logprobs, inputs.advantages
    s = ratio(mean) * (t - t.detach()).exp()
    plain, clipped = -s * a, -s.clamp(1 - clip_low, 1 + clip_high) * a
    return LossOutput(torch.maximum(plain, clipped), _counted(inputs, clipped=clipped > plain))


def cispo(inputs: LossInputs, *, ratio_low: float = 0.0, ratio_high: float = 5.0) -> LossOutput:
    """CISPO: clip the weight, keep every token's gradient.

        L = -sg(clip(r, ratio_low, ratio_high)) A t

    MiniMax-M1 (arXiv 2506.13585), which leaves the lower bound open.
    """
    r = ratio(inputs.log_ratio).detach()
    outside = (r < ratio_low) | (r > ratio_high)
    loss = -r.clamp(ratio_low, ratio_high) * inputs.advantages * inputs.logprobs
    return LossOutput(loss, _counted(inputs, clipped=outside))


def icepop(inputs: LossInputs, *, ratio_low: float = 0.5, ratio_high: float = 5.0) -> LossOutput:
    """IcePop: tokens whose trainer and engine disagree too much get no gradient.

        L = -r A  where ratio_low <= r <= ratio_high, else 0

    One update per batch, so the paper's two ratios are one. Ring-1T (arXiv 2510.18855).
    """
    r = ratio(inputs.log_ratio)
    low, high = r < ratio_low, r > ratio_high
    loss = -inputs.advantages * torch.where(low | high, 0.0, r)
    return LossOutput(loss, _counted(inputs, dropped_low=low, dropped_high=high))


def tis(inputs: LossInputs, *, ratio_high: float = 2.0) -> LossOutput:
    """Truncated importance sampling.

        L = -sg(min(r, ratio_high)) A t

    Ionides (2008), "Truncated Importance Sampling"; for the mismatch of engine and trainer, Yao et al. (2025), "Your
    Efficient RL Framework Secretly Brings You Off-Policy RL Training".
    """
    return cispo(inputs, ratio_low=0.0, ratio_high=ratio_high)


def ce(inputs: LossInputs) -> LossOutput:
    """Cross-entropy: L = -t. For SFT and for tokens of the ce stream; ignores advantages."""
    return LossOutput(-inputs.logprobs)


LOSSES: dict[str, LossFunction] = {
    "dppo": dppo,
    "grpo": grpo,
    "gspo": gspo,
    "cispo": cispo,
    "icepop": icepop,
    "tis": tis,
    "ce": ce,
}

COMMON_OPTIONS = ("sequence_low", "sequence_high", "geometric_low", "geometric_high", "entropy_tau")
"""Options of every loss, see `mask_documents`; entropy_tau: L -= entropy_tau * entropy."""


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf


def mask_documents(
    inputs: LossInputs,
    *,
    sequence_low: float = 0.0,
    sequence_high: float = math.inf,
    geometric_low: float = 0.0,
    geometric_high: float = math.inf,
) -> tuple[LossInputs, dict[str, Tensor]]:
    """Documents whose ratio leaves the bounds get advantage 0: no policy gradient, while pull-back terms still act.

    sequence: exp(sum of d over the document); geometric: exp(mean of d). The batch's counts stay as they are. Compared in
    log space, so nothing overflows. Liu et al. (2025), "When Speed Kills Stability"; geometric: arXiv 2507.18071's ratio.
    """
    sums, mean = sequence_log_ratio(inputs)

    drop_sequence = (sums < _log(sequence_low)) | (sums > _log(sequence_high))
    drop_geometric = (mean < _log(geometric_low)) | (mean > _log(geometric_high))
    drop = (drop_sequence | drop_geometric) & inputs.advantages.isfinite()
    masked = replace(inputs, advantages=torch.where(drop, 0.0, inputs.advantages))
    return masked, _counted(inputs, masked_sequence=drop_sequence, masked_geometric=drop_geometric)


def resolve(kind: str) -> LossFunction:
    """The loss of that name in `LOSSES`, or a user's own at `package.module:function`; it also takes `COMMON_OPTIONS`.

    A user's function has the signature `(inputs: LossInputs, **options: float) -> LossOutput`. ValueError names an unknown one.
    """
    loss = named(kind, LOSSES, "trainer.loss.kind")

    def composed(inputs: LossInputs, **options: float) -> LossOutput:
        bounds = {name: options.pop(name) for name in COMMON_OPTIONS[:4] if name in options}
        entropy_tau = options.pop("entropy_tau", 0.0)
        metrics: dict[str, Tensor] = {}
        if bounds:
            inputs, metrics = mask_documents(inputs, **bounds)
        out = loss(inputs, **options)
        per_token = out.per_token
        if entropy_tau:
            per_token = per_token - entropy_tau * inputs.entropy
        return LossOutput(per_token, {**out.metrics, **metrics})

    return composed
