"""The fused LM head: logprob and entropy of every token without ever holding all logits.

Legend: T tokens, N tokens that have a label, C tokens of a chunk, D hidden width, V vocabulary.
With z = h·Wᵀ / temperature, p = softmax(z): logprob = z[label] − logΣexp z, entropy H = −Σ p log p. The gradients are
∂logprob/∂z = onehot − p and ∂H/∂z = −p (log p + H). Backward computes the logits again, chunk by chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prl.kernels.precision import wide
from prl.kernels.registry import choose, implements

IGNORE = -100


def logprobs(
    hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, temperature_T: Tensor | float, *, chunk: int
) -> tuple[Tensor, Tensor]:
    """(logprob [T], entropy [T]) in float32 or wider, both with gradients to `hidden_TD` and `weight_VD`.

    Entry t is of `labels_T[t]` (int64) under the logits of row t: shift labels before. A label of −100 gives 0, 0 and no
    gradient, and costs nothing. At most `chunk` rows of logits exist at once.
    """
    return choose("logprobs")(hidden_TD, weight_VD, labels_T, temperature_T, chunk)


def logits(hidden_TD: Tensor, weight_VD: Tensor) -> Tensor:
    """[T, V] in float32 or wider, before temperature; for sampling."""
    return choose("logits")(hidden_TD, weight_VD)


@implements("logits", "reference")
def _logits(hidden_TD: Tensor, weight_VD: Tensor) -> Tensor:
    dtype = wide(hidden_TD)
    return hidden_TD.to(dtype) @ weight_VD.to(dtype).t()


def _log_softmax(hidden_CD: Tensor, weight_VD: Tensor, temperature_C: Tensor) -> Tensor:
    """Finite where p underflows to 0, so that p · log p is 0; NaN stays NaN."""
    log_p_CV = _logits(hidden_CD, weight_VD).div_(temperature_C[:, None]).log_softmax(-1)
    return log_p_CV.clamp_(min=torch.finfo(log_p_CV.dtype).min)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, temperature_N: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden_ND, weight_VD, labels_N, temperature_N)
        ctx.chunk = chunk
        ctx.set_materialize_grads(False)
        weight_VD = weight_VD.to(wide(weight_VD))
        logprob_N, entropy_N = hidden_ND.new_empty(2, len(hidden_ND), dtype=wide(hidden_ND)).unbind(0)
        for at in range(0, len(hidden_ND), chunk):
            c = slice(at, at + chunk)
            log_p = _log_softmax(hidden_ND[c], weight_VD, temperature_N[c])
            logprob_N[c] = log_p.gather(1, labels_N[c, None])[:, 0]
            entropy_N[c] = -(log_p.exp() * log_p).sum(-1)
        return logprob_N, entropy_N

    @staticmethod
    def backward(ctx: Any, d_logprob_N: Tensor | None, d_entropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, labels_N, temperature_N = ctx.saved_tensors
        dtype = wide(hidden_ND)
        wide_VD = weight_VD.to(dtype)
        d_hidden = torch.zeros_like(hidden_ND) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(wide_VD) if ctx.needs_input_grad[1] else None
        for at in range(0, len(hidden_ND), ctx.chunk):
            c = slice(at, at + ctx.chunk)
            log_p = _log_softmax(hidden_ND[c], wide_VD, temperature_N[c])
            p = log_p.exp()
            if d_entropy_N is not None:
                slope = log_p.sub_((p * log_p).sum(-1, keepdim=True)).mul_(-d_entropy_N[c, None])
            else:
                slope = log_p.zero_()
            if d_logprob_N is not None:
                slope.sub_(d_logprob_N[c, None])
            dz = p.mul_(slope)
            if d_logprob_N is not None:
                dz.scatter_add_(1, labels_N[c, None], d_logprob_N[c, None])
            dz.div_(temperature_N[c, None])
            if d_hidden is not None:
                d_hidden[c] = dz @ wide_VD
            if d_weight is not None:
                d_weight.addmm_(dz.t(), hidden_ND[c].to(dtype))
        return d_hidden, None if d_weight is None else d_weight.to(weight_VD.dtype), None, None, None


@implements("logprobs", "reference")
def _logprobs(
    hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, temperature_T: Tensor | float, chunk: int
) -> tuple[Tensor, Tensor]:
    dtype = wide(hidden_TD)
    temperature_T = torch.as_tensor(temperature_T, dtype=dtype, device=hidden_TD.device).expand(labels_T.shape)
    kept_N = (labels_T != IGNORE).nonzero()[:, 0]
    parts = _LogProbs.apply(hidden_TD[kept_N], weight_VD, labels_T[kept_N], temperature_T[kept_N], chunk)
    logprob_T, entropy_T = (hidden_TD.new_zeros(labels_T.shape, dtype=dtype).index_put((kept_N,), part) for part in parts)
    return logprob_T, entropy_T
