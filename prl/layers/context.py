"""Attention over a row that several ranks share, for models that cache keys and values of heads.

Legend: T tokens of the whole row, L of this rank, R ranks of the context group, H query heads, G key heads, C width of a head,
N queries of a tile, S keys of a tile, P = H / G · N.

* Ulysses (arXiv 2309.14509): all-to-all, so that each rank has the whole row of some of the heads, and back.
* Ring (arXiv 2310.01889): keys and values travel round, the softmax is put together from its parts.

Where it has neither, the plain core gathers keys and values; so do latent attention and its indexer, whose keys are small.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from prl.distributed.context import Shard, runs, to_heads, to_tokens
from prl.kernels.numerics import wide
from prl.layers.attention import Core, attend
from prl.layers.layout import Layout, PackedLayout

TILE = 1024
"""Queries and keys of a ring's step that meet at once: scores exist for their pairs alone."""


def core(ranks: int, heads: int, key_heads: int) -> Core:
    """Ulysses where the ranks divide the heads, and key heads and ranks divide one another, else the ring."""
    divides = heads % ranks == 0 and (key_heads % ranks == 0 or ranks % key_heads == 0)
    return ulysses if divides else ring


def ulysses(layer: int, q_LHC: Tensor, k_LGC: Tensor, v_LGC: Tensor, layout: Layout) -> Tensor:
    """[L, H, C]. Where there are fewer key heads than ranks, neighbours get the same one."""
    layout, shard = _shared(layout)
    copies = max(1, shard.ranks // k_LGC.shape[1])
    heads = [q_LHC, k_LGC.repeat_interleave(copies, 1), v_LGC.repeat_interleave(copies, 1)]
    parts = [x.unflatten(1, (shard.ranks, -1)) for x in heads]
    mine_T = to_heads(torch.cat(parts, 2).flatten(1, 2), shard)
    q_THC, k_TGC, v_TGC = mine_T.split([p.shape[2] for p in parts], 1)
    return to_tokens(attend(layer, q_THC, k_TGC, v_TGC, layout.row), shard)


def ring(layer: int, q_LHC: Tensor, k_LGC: Tensor, v_LGC: Tensor, layout: Layout) -> Tensor:
    """[L, H, C]. Scores and softmax are in float32 or wider; backward sends keys, values and their gradients round again."""
    return cast(Tensor, _Ring.apply(q_LHC, k_LGC, v_LGC, _shared(layout)[0]))


def _shared(layout: Layout) -> tuple[PackedLayout, Shard]:
    assert isinstance(layout, PackedLayout) and layout.shard is not None, "context parallelism without a shared row"
    return layout, layout.shard


class Tile(NamedTuple):
    queries: slice
    keys: slice
    mask_NS: Tensor


def tiles(layout: PackedLayout, shard: Shard, owner: int) -> Iterator[Tile]:
    """Which of this rank's queries see which of the keys of `owner`, both in the order of their rank's tokens."""
    start_T = torch.repeat_interleave(layout.lengths.cumsum(0) - layout.lengths, layout.lengths)
    for query, first, last in _cut(shard.here_L):
        for key, low, high in _cut(shard.places_RL[owner]):
            seen, end = max(low, int(start_T[first])), min(high, last)
            if seen >= end:
                continue
            token_S, token_N = torch.arange(seen, end), torch.arange(first, last)
            mask_NS = (token_S >= start_T[first:last, None]) & (token_S <= token_N[:, None])
            keys = slice(key + seen - low, key + end - low)
            yield Tile(slice(query, query + last - first), keys, mask_NS.to(layout.device))


def _cut(tokens_L: Tensor) -> Iterator[tuple[int, int, int]]:
    """(where it begins on the rank, first token, past the last) of each piece of neighbours."""
    place = 0
    for low, high in runs(tokens_L):
        for first in range(low, high, TILE):
            last = min(first + TILE, high)
            yield place, first, last
            place += last - first


def _by_key_head(x_NHC: Tensor, key_heads: int) -> Tensor:
    """[N, H, ...] → [G, P, ...] in float32 or wider; the queries' heads that share a key head are neighbours."""
    x = x_NHC.to(wide(x_NHC)).unflatten(1, (key_heads, -1))
    return x.movedim(0, 2).flatten(1, 2)


def _by_token(x_GPC: Tensor, n: int) -> Tensor:
    """The inverse, [N, H, ...]."""
    return x_GPC.unflatten(1, (-1, n)).movedim(2, 0).flatten(1, 2)


def _scores(q_GPC: Tensor, k_SGC: Tensor, mask_NS: Tensor, scale: float) -> Tensor:
    """[G, P, S], −∞ where the mask excludes."""
    scores = torch.bmm(q_GPC, k_SGC.to(q_GPC.dtype).permute(1, 2, 0)).mul_(scale)
    scores.unflatten(1, (-1, len(mask_NS))).masked_fill_(~mask_NS, -torch.inf)
    return scores


def _send_on(x: Tensor, shard: Shard) -> tuple[Tensor, list[dist.Work]]:
    """What the place before sends, once the works are done."""
    x, got = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    send = dist.P2POp(dist.isend, x, group=shard.group, group_peer=(shard.place + 1) % shard.ranks)
    receive = dist.P2POp(dist.irecv, got, group=shard.group, group_peer=(shard.place - 1) % shard.ranks)
    return got, dist.batch_isend_irecv([send, receive])


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_LHC: Tensor, k_LGC: Tensor, v_LGC: Tensor, layout: PackedLayout) -> Tensor:
        _, shard = _shared(layout)
        groups, scale = k_LGC.shape[1], q_LHC.shape[2] ** -0.5
        top_LH = torch.full(q_LHC.shape[:2], -torch.inf, dtype=wide(q_LHC), device=q_LHC.device)
        sum_LH, out_LHC = torch.zeros_like(top_LH), torch.zeros_like(q_LHC, dtype=wide(q_LHC))
        kv = torch.stack((k_LGC, v_LGC))
        for step in range(shard.ranks):
            following, works = _send_on(kv, shard) if step + 1 < shard.ranks else (kv, [])
            for rows, keys, mask_NS in tiles(layout, shard, (shard.place - step) % shard.ranks):
                n = len(mask_NS)
                scores_GPS = _scores(_by_key_head(q_LHC[rows], groups), kv[0, keys], mask_NS, scale)
                old_NH = top_LH[rows]
                new_NH = torch.maximum(old_NH, _by_token(scores_GPS.amax(-1), n))
                finite_NH = new_NH.masked_fill(new_NH.isneginf(), 0)  # a query may see nothing yet
                p_GPS = scores_GPS.sub_(_by_key_head(finite_NH, groups)[..., None]).exp_()
                fade_NH = (old_NH - finite_NH).exp()
                v_GSC = kv[1, keys].to(p_GPS.dtype).transpose(0, 1)
                out_LHC[rows] = out_LHC[rows] * fade_NH[..., None] + _by_token(torch.bmm(p_GPS, v_GSC), n)
                sum_LH[rows] = sum_LH[rows] * fade_NH + _by_token(p_GPS.sum(-1), n)
                top_LH[rows] = new_NH
            _wait(works)
            kv = following
        out_LHC = (out_LHC / sum_LH[..., None]).to(q_LHC.dtype)
        ctx.layout = layout
        ctx.save_for_backward(q_LHC, k_LGC, v_LGC, out_LHC, top_LH + sum_LH.log())
        return out_LHC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_LHC: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_LHC, k_LGC, v_LGC, out_LHC, total_LH = ctx.saved_tensors
        layout, shard = _shared(ctx.layout)
        groups, scale = k_LGC.shape[1], q_LHC.shape[2] ** -0.5
        dtype = wide(q_LHC)
        inner_LH = (grad_LHC.to(dtype) * out_LHC.to(dtype)).sum(-1)
        d_q = torch.zeros_like(q_LHC, dtype=dtype)
        kv = torch.stack((k_LGC, v_LGC))
        d_kv = torch.zeros_like(kv, dtype=dtype)
        for step in range(shard.ranks):
            following, works = _send_on(kv, shard) if step + 1 < shard.ranks else (kv, [])
            for rows, keys, mask_NS in tiles(layout, shard, (shard.place - step) % shard.ranks):
                q_GPC, grad_GPC = _by_key_head(q_LHC[rows], groups), _by_key_head(grad_LHC[rows], groups)
                total_GP, inner_GP = _by_key_head(total_LH[rows], groups), _by_key_head(inner_LH[rows], groups)
                k_GSC, v_GSC = kv[:, keys].to(dtype).transpose(1, 2)
                p_GPS = _scores(q_GPC, kv[0, keys], mask_NS, scale).sub_(total_GP[..., None]).exp_()
                d_kv[1, keys] += torch.bmm(p_GPS.transpose(1, 2), grad_GPC).transpose(0, 1)
                d_scores = torch.bmm(grad_GPC, v_GSC.transpose(1, 2)).sub_(inner_GP[..., None]).mul_(p_GPS).mul_(scale)
                d_kv[0, keys] += torch.bmm(d_scores.transpose(1, 2), q_GPC).transpose(0, 1)
                d_q[rows] += _by_token(torch.bmm(d_scores, k_GSC), len(mask_NS))
            _wait(works)
            d_kv, returning = _send_on(d_kv, shard)  # after as many steps as ranks it is at home
            _wait(returning)
            kv = following
        d_k, d_v = d_kv.to(k_LGC.dtype)
        return d_q.to(q_LHC.dtype), d_k, d_v, None
