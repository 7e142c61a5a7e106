"""From logits to tokens: tempered softmax, inverse CDF, and noise that follows from (seed, position) alone.

Legend: B sequences, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def noise(seed: int, start: int, count: int) -> np.ndarray:
    """float64 [count] uniforms in [0, 1) for the tokens at positions start, start + 1, … of a sequence.

    The uniform of a position is that draw of the Philox4x64 stream keyed by `seed` (Salmon et al. 2011), so it does not
    depend on where the request started: a later turn, a resumed or a retried request gets the same noise.
    """
    bits = np.random.Philox(key=seed & (1 << 128) - 1)
    bits.advance(start // 4)
    return (bits.random_raw(start % 4 + count)[start % 4 :] >> np.uint64(11)) * 2.0**-53


def log_probabilities(logits_BV: Tensor, temperature_B: Tensor) -> Tensor:
    """Tempered log-softmax in the wider of float32 and the logits' type; temperature 0 counts as 1 here."""
    wide = torch.promote_types(logits_BV.dtype, torch.float32)
    t = torch.where(temperature_B > 0, temperature_B, 1.0).to(wide)
    return torch.log_softmax(logits_BV.to(wide) / t[:, None], -1)


def truncate(logprobs_BV: Tensor, top_p_B: Tensor, top_k_B: Tensor) -> Tensor:
    """Keep the top_k likeliest tokens (0: all), of these the fewest whose probability reaches top_p; renormalise.

    Ties at the border go to the lowest index. The likeliest token always stays.
    """
    sorted_BV, index_BV = torch.sort(logprobs_BV, descending=True, stable=True)
    rank = torch.arange(sorted_BV.shape[1], device=sorted_BV.device)
    k_B = torch.where(top_k_B > 0, top_k_B, sorted_BV.shape[1])
    sorted_BV = sorted_BV.masked_fill(rank >= k_B[:, None], -torch.inf).log_softmax(-1)
    p_BV = sorted_BV.exp()
    drop_BV = (p_BV.cumsum(-1) - p_BV >= top_p_B[:, None]) & (rank > 0) & (top_p_B[:, None] < 1)
    sorted_BV = sorted_BV.masked_fill(drop_BV, -torch.inf).log_softmax(-1)
    return torch.empty_like(sorted_BV).scatter_(1, index_BV, sorted_BV)


def sample(
    logits_BV: Tensor, temperature_B: Tensor, top_p_B: Tensor, top_k_B: Tensor, uniform_B: Tensor, *, plain: bool
) -> tuple[Tensor, Tensor]:
    """One token per row (int64 [B]) and its logprob [B] under the distribution it was drawn from.

    temperature 0 is greedy: the likeliest token, the lowest index where several are; it is certain, so its logprob is 0.
    `plain` promises that no row is greedy or truncated. A row of logits that are not finite gives a logprob of NaN.
    """
    logprobs_BV = log_probabilities(logits_BV, temperature_B)
    if not plain:
        logprobs_BV = truncate(logprobs_BV, top_p_B, top_k_B)
    cdf_BV = logprobs_BV.exp().cumsum(-1, dtype=torch.float64)
    total_B = cdf_BV[:, -1:]
    index_B = torch.searchsorted(cdf_BV, uniform_B.to(torch.float64)[:, None] * total_B, right=True)
    # Rounding may carry the product up to the total; the last token with any probability is then the one.
    token_B = torch.minimum(index_B, (cdf_BV < total_B).sum(-1, keepdim=True)).squeeze(1)
    if not plain:
        greedy_B = temperature_B == 0
        token_B = torch.where(greedy_B, logits_BV.argmax(-1), token_B)
    logprob_B = logprobs_BV.gather(1, token_B[:, None]).squeeze(1)
    if not plain:
        logprob_B = torch.where(greedy_B, logprob_B - logprob_B, logprob_B)
    return token_B, logprob_B
