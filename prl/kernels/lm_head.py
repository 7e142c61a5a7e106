"""The fused LM head: logprob and entropy of every token without ever holding all logits.

Legend: T tokens, C tokens of a chunk, D hidden width, V vocabulary.
With z = h·Wᵀ / temperature, p = softmax(z): logprob = z[label] − logΣexp z, entropy H = −Σ p log p. The gradients are
∂logprob/∂z = onehot − p and ∂H/∂z = −p (log p + H). Backward computes the logits again, chunk by chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prl.kernels import checks
from prl.kernels.numerics import wide
from prl.kernels.registry import define

IGNORE = -100
FLOATS = (torch.bfloat16, torch.float32, torch.float64)


def logprobs(
    hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, temperature_T: Tensor | float, *, chunk: int
) -> tuple[Tensor, Tensor]:
    """(logprob [T], entropy [T]) in float32 or wider, both with gradients to `hidden_TD` and `weight_VD`.

    Entry t is of `labels_T[t]` (int64) under the logits of row t: shift labels before. A label of −100 gives 0, 0 and no
    gradient, whatever its row holds. At most `chunk` rows of logits exist at once. Sums are in float32
    or wider, those of the weight's gradient too.
    """
    checks.tensor("logprobs", "hidden_TD", hidden_TD, [None, None], FLOATS)
    checks.tensor("logprobs", "weight_VD", weight_VD, [None, hidden_TD.shape[1]], FLOATS)
    checks.tensor("logprobs", "labels_T", labels_T, [len(hidden_TD)], [torch.int64])
    if chunk < 1:
        checks.fail("logprobs", "chunk", "at least 1", chunk)
    if not len(weight_VD):
        checks.fail("logprobs", "weight_VD", "of at least one row", list(weight_VD.shape))
    if isinstance(temperature_T, Tensor):
        if temperature_T.requires_grad:
            checks.fail("logprobs", "temperature_T", "without a gradient", "one that requires it")
        checks.tensor("logprobs", "temperature_T", temperature_T.contiguous(), [len(labels_T)], [])
        checks.same_device("logprobs", hidden_TD=hidden_TD, temperature_T=temperature_T)
    temperature_T = torch.as_tensor(temperature_T, dtype=wide(hidden_TD), device=hidden_TD.device).expand(labels_T.shape)
    checks.same_device("logprobs", hidden_TD=hidden_TD, weight_VD=weight_VD, labels_T=labels_T)
    _labels_in_range(labels_T, len(weight_VD))
    return _logprobs_op(hidden_TD, weight_VD, labels_T, temperature_T.contiguous(), chunk)[:2]


def logits(hidden_TD: Tensor, weight_VD: Tensor) -> Tensor:
    """[T, V] in float32 or wider, before temperature; for sampling, without a gradient. The sum over D does not depend on T."""
    checks.tensor("logits", "hidden_TD", hidden_TD, [None, None], FLOATS)
    checks.tensor("logits", "weight_VD", weight_VD, [None, hidden_TD.shape[1]], FLOATS)
    checks.same_device("logits", hidden_TD=hidden_TD, weight_VD=weight_VD)
    return _logits_op(hidden_TD, weight_VD)


def label_logprobs(logits_TV: Tensor, labels_T: Tensor, temperature_T: Tensor) -> Tensor:
    """[T] in float32 or wider: what `logprobs` says of these labels, given `logits`; on the backend `cpu` to the last bit."""
    checks.tensor("label_logprobs", "logits_TV", logits_TV, [None, None], (torch.float32, torch.float64))
    checks.tensor("label_logprobs", "labels_T", labels_T, [len(logits_TV)], [torch.int64])
    checks.tensor("label_logprobs", "temperature_T", temperature_T, [len(logits_TV)], [logits_TV.dtype])
    checks.same_device("label_logprobs", logits_TV=logits_TV, labels_T=labels_T, temperature_T=temperature_T)
    _labels_in_range(labels_T, logits_TV.shape[1], ignored=False)
    return _label_op(logits_TV, labels_T, temperature_T)


def _labels_in_range(labels_T: Tensor, vocabulary: int, *, ignored: bool = True) -> None:
    """Read on the CPU only: elsewhere that would wait."""
    if labels_T.device.type == "cpu" and not torch.compiler.is_compiling():
        bad = (labels_T < 0) | (labels_T >= vocabulary)
        if ignored:
            bad &= labels_T != IGNORE
        if bad.any():
            op, more = ("logprobs", f" or {IGNORE}") if ignored else ("label_logprobs", "")
            checks.fail(op, "labels_T", f"0 to {vocabulary - 1}{more}", labels_T[bad][0].item())


def _logits_reference(hidden_TD: Tensor, weight_VD: Tensor) -> Tensor:
    dtype = wide(hidden_TD)
    return hidden_TD.to(dtype) @ weight_VD.to(dtype).t()


def _logits_fake(hidden_TD: Tensor, weight_VD: Tensor) -> Tensor:
    return hidden_TD.new_empty(hidden_TD.shape[0], weight_VD.shape[0], dtype=wide(hidden_TD))


def _log_softmax(hidden_CD: Tensor, weight_VD: Tensor, temperature_C: Tensor) -> tuple[Tensor, Tensor]:
    """(log p [C, V], logΣexp z [C]). log p is finite where p underflows to 0, so that p · log p is 0; NaN stays NaN."""
    z_CV = _logits_reference(hidden_CD, weight_VD).div_(temperature_C[:, None])
    total_C = z_CV.logsumexp(-1)
    return z_CV.sub_(total_C[:, None]).clamp_(min=torch.finfo(z_CV.dtype).min), total_C


def _logprobs_reference(
    hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, temperature_T: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob, entropy, logΣexp z), each [T]; the last is for backward."""
    weight_VD = weight_VD.to(wide(hidden_TD))
    out_3T = hidden_TD.new_zeros(3, len(hidden_TD), dtype=weight_VD.dtype)
    for rows in (labels_T != IGNORE).nonzero()[:, 0].split(chunk):
        log_p, total = _log_softmax(hidden_TD[rows], weight_VD, temperature_T[rows])
        logprob = log_p.gather(1, labels_T[rows, None])[:, 0]
        out_3T[:, rows] = torch.stack((logprob, -(log_p.exp() * log_p).sum(-1), total))
    logprob_T, entropy_T, total_T = out_3T.unbind(0)
    return logprob_T.clone(), entropy_T.clone(), total_T.clone()


def _label_reference(logits_TV: Tensor, labels_T: Tensor, temperature_T: Tensor) -> Tensor:
    return (logits_TV / temperature_T[:, None]).log_softmax(-1).gather(1, labels_T[:, None])[:, 0]


def _label_fake(logits_TV: Tensor, labels_T: Tensor, temperature_T: Tensor) -> Tensor:
    return logits_TV.new_empty(logits_TV.shape[0])


def _logprobs_fake(
    hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, temperature_T: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    new = hidden_TD.new_empty
    t, dtype = hidden_TD.shape[0], wide(hidden_TD)
    return new(t, dtype=dtype), new(t, dtype=dtype), new(t, dtype=dtype)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    hidden_TD, weight_VD, labels_T, temperature_T, ctx.chunk = inputs
    ctx.save_for_backward(hidden_TD, weight_VD, labels_T, temperature_T, output[1], output[2])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_logprob_T: Tensor | None, d_entropy_T: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if d_logprob_T is None and d_entropy_T is None:
        return (None,) * 5
    hidden_TD, weight_VD, labels_T, temperature_T, entropy_T, total_T = ctx.saved_tensors
    want_hidden, want_weight = ctx.needs_input_grad[:2]
    slopes = [None if d is None else d.contiguous() for d in (d_logprob_T, d_entropy_T)]
    saved = (hidden_TD, weight_VD, labels_T, temperature_T, entropy_T, total_T)
    d_hidden, d_weight = _backward_op(*slopes, *saved, ctx.chunk, want_hidden, want_weight)
    return d_hidden if want_hidden else None, d_weight.to(weight_VD.dtype) if want_weight else None, None, None, None


def _backward_reference(
    d_logprob_T: Tensor | None,
    d_entropy_T: Tensor | None,
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    temperature_T: Tensor,
    entropy_T: Tensor,
    total_T: Tensor,
    chunk: int,
    want_hidden: bool,
    want_weight: bool,
) -> tuple[Tensor, Tensor]:
    """(d_hidden [T, D], d_weight [V, D] in float32 or wider), empty where not wanted."""
    dtype = wide(hidden_TD)
    wide_VD = weight_VD.to(dtype)
    d_hidden = torch.zeros_like(hidden_TD) if want_hidden else hidden_TD.new_empty(0, 0)
    d_weight = torch.zeros_like(wide_VD) if want_weight else wide_VD.new_empty(0, 0)
    for rows in (labels_T != IGNORE).nonzero()[:, 0].split(chunk):
        hidden = hidden_TD[rows].to(dtype)
        log_p = _logits_reference(hidden, wide_VD).div_(temperature_T[rows, None])
        log_p.sub_(total_T[rows, None]).clamp_(min=torch.finfo(dtype).min)
        p = log_p.exp()
        slope = torch.zeros_like(p)
        if d_entropy_T is not None:
            slope = log_p.add_(entropy_T[rows, None]).mul_(-d_entropy_T[rows, None])
        if d_logprob_T is not None:
            slope.sub_(d_logprob_T[rows, None])
        dz = p.mul_(slope)
        if d_logprob_T is not None:
            dz.scatter_add_(1, labels_T[rows, None], d_logprob_T[rows, None])
        dz.div_(temperature_T[rows, None])
        if want_hidden:
            d_hidden[rows] = (dz @ wide_VD).to(d_hidden.dtype)
        if want_weight:
            d_weight.addmm_(dz.t(), hidden)
    return d_hidden, d_weight


def _backward_fake(
    d_logprob_T: Any, d_entropy_T: Any, hidden_TD: Tensor, weight_VD: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    want_hidden, want_weight = rest[-2:]
    d_hidden = torch.empty_like(hidden_TD) if want_hidden else hidden_TD.new_empty(0, 0)
    return d_hidden, weight_VD.new_empty(weight_VD.shape if want_weight else (0, 0), dtype=wide(hidden_TD))


_logits_op = define("logits(Tensor hidden_TD, Tensor weight_VD) -> Tensor", _logits_reference, _logits_fake)
_label_op = define(
    "label_logprobs(Tensor logits_TV, Tensor labels_T, Tensor temperature_T) -> Tensor",
    _label_reference,
    _label_fake,
    backends=("cpu",),
)
_logprobs_op = define(
    "logprobs(Tensor hidden_TD, Tensor weight_VD, Tensor labels_T, Tensor temperature_T, int chunk)"
    " -> (Tensor, Tensor, Tensor)",
    _logprobs_reference,
    _logprobs_fake,
    setup_context=_setup,
    backward=_backward,
)
_backward_op = define(
    "logprobs_backward(Tensor? d_logprob_T, Tensor? d_entropy_T, Tensor hidden_TD, Tensor weight_VD, Tensor labels_T,"
    " Tensor temperature_T, Tensor entropy_T, Tensor total_T, int chunk, bool want_hidden, bool want_weight)"
    " -> (Tensor, Tensor)",
    _backward_reference,
    _backward_fake,
)
