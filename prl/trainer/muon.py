"""Muon's orthogonalised updates (arXiv 2502.16982) of matrices and experts, each by one of the ranks that it is cut over.

Legend: E experts, N output width, K input width, R ranks of a shard group, M matrices side by side in a batch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from prl.layers.moe import Experts
from prl.models.base import Model

# https://kellerjordan.github.io/posts/muon/, also torch.optim.Muon's, which knows neither stacks, shards nor float32.
STEPS, COEFFICIENTS, EPS = 5, (3.4445, -4.7750, 2.0315), 1e-7


def matrices(model: Model) -> dict[str, int]:
    """The parameters that are matrices, and how many lie on top of each other along N: gate and up do. Embedding, LM head,
    router, norms and biases are none."""
    out = {}
    for prefix, module in model.named_modules():
        if isinstance(module, Experts) or (isinstance(module, nn.Linear) and module is not model.lm_head):
            for name, p in module.named_parameters(recurse=False):
                if p.dim() > 1:
                    out[f"{prefix}.{name}"] = 2 if name == "gate_up_proj" else 1
    return out


def scale(shape: Sequence[int], on_top: int) -> float:
    """What makes an orthogonal [N, K] as large as AdamW's updates are: a root mean square of 0.2 (section 2.2)."""
    return 0.2 * math.sqrt(max(shape[-2] // on_top, shape[-1]))


def newton_schulz(x_MNK: Tensor) -> Tensor:
    """[M, N, K] → the same with singular values near 1 (0.7 to 1.2), in its own type; zero stays zero."""
    a, b, c = COEFFICIENTS
    tall = x_MNK.shape[1] > x_MNK.shape[2]
    x = x_MNK.mT if tall else x_MNK
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=EPS)
    for _ in range(STEPS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def orthogonalise(
    params: Sequence[nn.Parameter], updates: Sequence[Tensor], on_top: Mapping[nn.Parameter, int]
) -> list[Tensor]:
    """This rank's parts of the orthogonalised updates, given its parts of the updates; a collective of each shard group.

    Whole matrices are this rank's business alone. Those cut along N go to one owner each, all in one exchange, and come back.
    """
    out: list[Tensor | None] = [None] * len(params)
    cut: dict[dist.ProcessGroup, list[int]] = defaultdict(list)
    for i, (p, update) in enumerate(zip(params, updates, strict=True)):
        if isinstance(p, DTensor) and p.placements[-1] == Shard(p.dim() - 2) and p.device_mesh.size(-1) > 1:
            cut[p.device_mesh.get_group(p.device_mesh.ndim - 1)].append(i)
        else:
            out[i] = _each(update, on_top[p])
    for group, chosen in cut.items():
        shared = [_Cut(updates[i], params[i].shape[-2], on_top[params[i]]) for i in chosen]
        for i, part in zip(chosen, _by_owners(shared, group), strict=True):
            out[i] = part
    return [o for o in out if o is not None]


def _each(x: Tensor, on_top: int) -> Tensor:
    """Every matrix in [N, K] or [E, N, K], of which `on_top` share the N rows."""
    if not x.numel():
        return x
    return newton_schulz(x.reshape(-1, x.shape[-2] // on_top, x.shape[-1])).reshape(x.shape)


class _Cut(NamedTuple):
    part: Tensor
    """This rank's rows: [n, K] or [E, n, K]."""
    rows: int
    """N."""
    on_top: int


def _by_owners(shared: Sequence[_Cut], group: dist.ProcessGroup) -> list[Tensor]:
    ranks, me = group.size(), group.rank()
    units = [(i, e) for i, c in enumerate(shared) for e in range(c.part.shape[0] if c.part.dim() == 3 else 1)]

    def cost(unit: tuple[int, int]) -> int:
        c = shared[unit[0]]
        n, k = c.rows // c.on_top, c.part.shape[-1]
        return n * k * min(n, k) * c.on_top

    def rows(unit: tuple[int, int], rank: int) -> int:
        n = shared[unit[0]].rows
        each = -(-n // ranks)
        return min(each, max(n - rank * each, 0))

    def size(unit: tuple[int, int], rank: int) -> int:
        return rows(unit, rank) * shared[unit[0]].part.shape[-1]

    owned: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for unit in sorted(units, key=cost, reverse=True):
        owner = load.index(min(load))
        owned[owner].append(unit)
        load[owner] += cost(unit)

    mine = owned[me]
    to_owners = [sum(size(u, me) for u in owned[r]) for r in range(ranks)]
    from_ranks = [sum(size(u, r) for u in mine) for r in range(ranks)]
    stacks = [c.part if c.part.dim() == 3 else c.part[None] for c in shared]
    sent = torch.cat([stacks[i][e].flatten() for owner in owned for i, e in owner])
    received = sent.new_empty(sum(from_ranks))
    dist.all_to_all_single(received, sent, from_ranks, to_owners, group=group)

    pieces = iter(received.split([size(u, r) for r in range(ranks) for u in mine]))
    parts = [[next(pieces).view(-1, stacks[i].shape[-1]) for i, _ in mine] for _ in range(ranks)]
    done = [_each(torch.cat([p[n] for p in parts]), shared[u[0]].on_top) for n, u in enumerate(mine)]
    cuts = [whole.split([rows(u, r) for r in range(ranks)]) for whole, u in zip(done, mine, strict=True)]
    back = torch.cat([c[r].flatten() for r in range(ranks) for c in cuts]) if mine else received
    dist.all_to_all_single(sent, back, to_owners, from_ranks, group=group)

    out = [torch.empty_like(s) for s in stacks]
    pieces = iter(sent.split([size(u, me) for owner in owned for u in owner]))
    for i, e in (u for owner in owned for u in owner):
        out[i][e] = next(pieces).view(out[i].shape[1:])
    return [o.view(c.part.shape) for o, c in zip(out, shared, strict=True)]
