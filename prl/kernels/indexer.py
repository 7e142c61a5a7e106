"""The DSA lightning indexer: scores of all keys and the choice of the best (DeepSeek-V3.2, arXiv 2512.02556). No gradients.

Legend: B sequences, Q queries, S keys, H index heads, D index width, K keys kept, T tokens, A layers with an indexer.
Scores are sums of ReLUs, so exact ties at zero are common; the lowest index wins, whatever the backend.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prl.kernels import checks
from prl.kernels.numerics import wide
from prl.kernels.registry import define


def index_scores(q_BQHD: Tensor, keys_BSD: Tensor, weights_BQH: Tensor) -> Tensor:
    """[B, Q, S] in float32 or wider: Σ_h weights[h] · relu(q[h]·k)."""
    keys_BSD = keys_BSD.contiguous()  # a cache is read in slices
    floats = (torch.bfloat16, torch.float32, torch.float64)
    checks.tensor("index_scores", "q_BQHD", q_BQHD, [None] * 4, floats)
    b, q, h, d = q_BQHD.shape
    checks.tensor("index_scores", "keys_BSD", keys_BSD, [b, None, d], [q_BQHD.dtype])
    checks.tensor("index_scores", "weights_BQH", weights_BQH, [b, q, h], floats)
    checks.same_device("index_scores", q_BQHD=q_BQHD, keys_BSD=keys_BSD, weights_BQH=weights_BQH)
    return _scores_op(q_BQHD.detach(), keys_BSD.detach(), weights_BQH.detach())


def index_select(scores_BQS: Tensor, mask_BQS: Tensor, top_k: int) -> Tensor:
    """bool [B, Q, S]: the `top_k` best keys of the mask (all where it has fewer), the lowest index first among equals.

    Where there are more, a NaN takes a place, as the largest, and is not chosen.
    """
    mask_BQS = mask_BQS.contiguous()  # often expanded over queries
    checks.tensor("index_select", "scores_BQS", scores_BQS, [None] * 3, (torch.float32, torch.float64))
    checks.tensor("index_select", "mask_BQS", mask_BQS, list(scores_BQS.shape), [torch.bool])
    if top_k < 1:
        checks.fail("index_select", "top_k", "at least 1", top_k)
    checks.same_device("index_select", scores_BQS=scores_BQS, mask_BQS=mask_BQS)
    return _select_op(scores_BQS, mask_BQS, top_k)


def _scores(q_BQHD: Tensor, keys_BSD: Tensor, weights_BQH: Tensor) -> Tensor:
    dtype = wide(q_BQHD)
    dots = torch.bmm(q_BQHD.to(dtype).flatten(1, 2), keys_BSD.to(dtype).transpose(1, 2)).relu_()
    return dots.unflatten(1, q_BQHD.shape[1:3]).mul_(weights_BQH.to(dtype)[..., None]).sum(2)


def _select(scores_BQS: Tensor, mask_BQS: Tensor, top_k: int) -> Tensor:
    if scores_BQS.shape[-1] <= top_k:
        return mask_BQS.clone()
    # The values of topk are determined even where its indices are not: fill up with the first of those equal to the last.
    scores_BQS = scores_BQS.masked_fill(~mask_BQS, -torch.inf)
    last_BQ1 = scores_BQS.topk(top_k, dim=-1).values[..., -1:]
    above_BQS = scores_BQS > last_BQ1
    equal_BQS = (scores_BQS == last_BQ1) & mask_BQS
    room_BQ1 = top_k - above_BQS.sum(-1, keepdim=True)
    return above_BQS | (equal_BQS & (equal_BQS.cumsum(-1) <= room_BQ1))


class SelectionError(ValueError):
    """Recorded selections that do not fit the sequence."""


@torch.no_grad()
def selection_indices(selected_BQS: Tensor, key_positions_BS: Tensor, top_k: int) -> Tensor:
    """int32 [B, Q, K]: positions of the selected keys, ascending, then −1."""
    place_BQS = torch.where(selected_BQS, selected_BQS.cumsum(-1, dtype=torch.int32) - 1, top_k).clamp_(max=top_k).long()
    out = torch.full((*selected_BQS.shape[:2], top_k + 1), -1, dtype=torch.int32, device=selected_BQS.device)
    out.scatter_(-1, place_BQS, key_positions_BS[:, None].to(torch.int32).expand(selected_BQS.shape))
    return out[..., :top_k].contiguous()


@torch.no_grad()
def selection_mask(recorded_BQK: Tensor, key_positions_BS: Tensor, own_BQS: Tensor) -> Tensor:
    """bool [B, Q, S]: the recorded positions (−1 where fewer); rows without any take `own_BQS`. Raises SelectionError."""
    n = int(key_positions_BS.max()) + 1
    recorded_BQK = recorded_BQK.long()
    if int(recorded_BQK.max()) >= n:
        raise SelectionError(f"indexer replay: position {int(recorded_BQK.max())} selected, the longest sequence has {n}")
    by_position = torch.zeros(*recorded_BQK.shape[:2], n + 1, dtype=torch.bool, device=recorded_BQK.device)
    by_position.scatter_(-1, torch.where(recorded_BQK < 0, n, recorded_BQK), True)
    replayed_BQS = by_position.gather(-1, key_positions_BS[:, None].expand(own_BQS.shape))
    return torch.where((recorded_BQK >= 0).any(-1, keepdim=True), replayed_BQS, own_BQS)


def selection_flips(a_TAK: Tensor, b_TAK: Tensor) -> Tensor:
    """bool [T, A]: whether two recorded selections keep different keys."""
    return (a_TAK.sort(dim=-1).values != b_TAK.sort(dim=-1).values).any(-1)


def _scores_fake(q_BQHD: Tensor, keys_BSD: Tensor, weights_BQH: Tensor) -> Tensor:
    b, q = q_BQHD.shape[:2]
    return q_BQHD.new_empty(b, q, keys_BSD.shape[1], dtype=wide(q_BQHD))


def _select_fake(scores_BQS: Tensor, mask_BQS: Tensor, top_k: int) -> Tensor:
    return torch.empty_like(mask_BQS)


_scores_op = define("index_scores(Tensor q_BQHD, Tensor keys_BSD, Tensor weights_BQH) -> Tensor", _scores, _scores_fake)
_select_op = define("index_select(Tensor scores_BQS, Tensor mask_BQS, int top_k) -> Tensor", _select, _select_fake)
