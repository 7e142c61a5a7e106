"""The router: dense logits, and one pass for scores, choice or replay, weights and counts. All in float32 or wider.

Legend: T tokens, D hidden width, E experts, K experts per token, G groups of experts, L MoE layers.
Selection: DeepSeek-V3 (arXiv 2412.19437, section 2.1.2): the correction bias moves the choice, never the weights.
Replay: the experts that the engine chose, weighted from the trainer's own scores, so that the router gets its gradient
(R3, arXiv 2510.11370).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from prl.kernels import checks
from prl.kernels.numerics import wide
from prl.kernels.registry import define

FLOATS = (torch.bfloat16, torch.float32, torch.float64)
WIDE = (torch.float32, torch.float64)
SCORINGS = ("sigmoid", "softmax", "none")
IDS = (torch.uint8, torch.uint16, torch.int16, torch.int32, torch.int64)


class RouteError(ValueError):
    """Recorded routes that no router can have made; the message counts them by kind and names the first."""


class Routing(NamedTuple):
    ids_TK: Tensor
    """int64: the experts used, best first where the model chose them itself."""
    weights_TK: Tensor
    """float32 or wider."""
    counts_E: Tensor
    """int64: slots per expert, without those of padding rows."""


def router_logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """[T, E] in float32 or wider; the order of the sum over D does not depend on T. Differentiable."""
    checks.tensor("router_logits", "x_TD", x_TD, [None, None], FLOATS)
    checks.tensor("router_logits", "weight_ED", weight_ED, [None, x_TD.shape[1]], FLOATS)
    checks.same_device("router_logits", x_TD=x_TD, weight_ED=weight_ED)
    return _logits_op(x_TD, weight_ED)


def route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    recorded_TK: Tensor | None,
    routed_T: Tensor | None,
    padding_T: Tensor | None,
    *,
    scoring: str,
    top_k: int,
    n_group: int = 1,
    topk_group: int = 1,
    normalise: bool = True,
    scale: float = 1.0,
) -> Routing:
    """The experts of each token and their weights, in one pass without host synchronisation. Differentiable in the logits.

    `scoring` makes scores of the logits: "sigmoid", "softmax", or "none" where they are scores already. A row takes the
    recorded ids where there are any and `routed_T` (None: all rows) says so; a padding row is dealt to the experts in turn;
    any other row takes the `top_k` best of scores + bias, the lowest index first among equals (with groups, only the
    `topk_group` groups whose two best experts sum highest take part). Weights are the scores of the ids, divided by their
    sum + 1e-20 if `normalise`, times `scale`.

    Recorded ids that are replayed must be 0 … E − 1 and differ within a row: `check_routes` sees to it for all layers at once.
    An id out of range is an error here too on the CPU; on a GPU, where looking would wait, its row takes the own choice.
    """
    checks.tensor("route", "logits_TE", logits_TE, [None, None], WIDE)
    t, e = logits_TE.shape
    if bias_E is not None:
        checks.tensor("route", "bias_E", bias_E, [e], FLOATS)
        bias_E = bias_E.to(logits_TE.dtype)
    if recorded_TK is not None:
        checks.tensor("route", "recorded_TK", recorded_TK, [t, top_k], IDS)
    for name, mask in (("routed_T", routed_T), ("padding_T", padding_T)):
        if mask is not None:
            checks.tensor("route", name, mask, [t], [torch.bool])
    if scoring not in SCORINGS:
        checks.fail("route", "scoring", " or ".join(SCORINGS), scoring)
    if not 1 <= topk_group <= n_group:
        checks.fail("route", "topk_group", f"1 to n_group, which is {n_group}", topk_group)
    if not 0 < top_k <= e * topk_group // n_group:
        checks.fail("route", "top_k", f"1 to {e * topk_group // n_group}", top_k)
    checks.multiple("route", "E", e, n_group)
    checks.same_device(
        "route", logits_TE=logits_TE, bias_E=bias_E, recorded_TK=recorded_TK, routed_T=routed_T, padding_T=padding_T
    )
    args = (bias_E, recorded_TK, routed_T, padding_T, top_k, n_group, topk_group, normalise, scale)
    return Routing(*_route_op(logits_TE, scoring, *args))


def check_routes(routes_TLK: Tensor, routed_T: Tensor | None, n_experts: int) -> None:
    """Raise RouteError if a replayed row has an expert id out of range or twice. One host sync."""
    checks.tensor("check_routes", "routes_TLK", routes_TLK, [None, None, None], IDS)
    if routed_T is not None:
        checks.tensor("check_routes", "routed_T", routed_T, [len(routes_TLK)], [torch.bool])
    checks.same_device("check_routes", routes_TLK=routes_TLK, routed_T=routed_T)
    if n_experts < 1:
        checks.fail("check_routes", "n_experts", "at least 1", n_experts)
    outside, twice, first = _inspect_op(routes_TLK, routed_T, n_experts).tolist()
    if outside or twice:
        token, layer = divmod(first, routes_TLK.shape[1])
        rows = routes_TLK.shape[1] * (len(routes_TLK) if routed_T is None else int(routed_T.sum()))
        raise RouteError(
            f"router replay: {outside} rows with expert ids outside 0…{n_experts - 1}, {twice} rows with "
            f"an expert twice, of {rows}; first at token {token}, MoE layer {layer}: {routes_TLK[token, layer].tolist()}. "
            "The routes must come from a model with the same experts, by MoE ordinal."
        )


def _logits_reference(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    dtype = torch.promote_types(wide(x_TD), wide(weight_ED))
    return F.linear(x_TD.to(dtype), weight_ED.to(dtype))


def _logits_fake(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    dtype = torch.promote_types(wide(x_TD), wide(weight_ED))
    return x_TD.new_empty(x_TD.shape[0], weight_ED.shape[0], dtype=dtype)


def _logits_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _logits_backward(ctx: Any, d_logits_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x_TD, weight_ED = ctx.saved_tensors
    d_x = (d_logits_TE @ weight_ED.to(d_logits_TE.dtype)).to(x_TD.dtype) if ctx.needs_input_grad[0] else None
    d_weight = (d_logits_TE.t() @ x_TD.to(d_logits_TE.dtype)).to(weight_ED.dtype) if ctx.needs_input_grad[1] else None
    return d_x, d_weight


def _scores(logits_TE: Tensor, scoring: str) -> Tensor:
    return logits_TE.sigmoid() if scoring == "sigmoid" else logits_TE.softmax(-1) if scoring == "softmax" else logits_TE


def _top_k_stable(x: Tensor, k: int) -> Tensor:
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()


def _choice(scores_TE: Tensor, bias_E: Tensor | None, top_k: int, n_group: int, topk_group: int) -> Tensor:
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if topk_group < n_group:
        choice_TGE = choice_TE.unflatten(-1, (n_group, -1))
        group_TG = choice_TGE.topk(min(2, choice_TGE.shape[-1]), dim=-1).values.sum(-1)
        keep_TG = torch.zeros_like(group_TG, dtype=torch.bool).scatter_(1, _top_k_stable(group_TG, topk_group), True)
        choice_TE = choice_TGE.masked_fill(~keep_TG[..., None], -torch.inf).flatten(-2)
    return _top_k_stable(choice_TE, top_k)


def _route_reference(
    logits_TE: Tensor,
    scoring: str,
    bias_E: Tensor | None,
    recorded_TK: Tensor | None,
    routed_T: Tensor | None,
    padding_T: Tensor | None,
    top_k: int,
    n_group: int,
    topk_group: int,
    normalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    e = logits_TE.shape[1]
    scores_TE = _scores(logits_TE, scoring)
    ids_TK = _choice(scores_TE, bias_E, top_k, n_group, topk_group)
    if recorded_TK is not None:
        recorded_TK = recorded_TK.long()
        replay_T = torch.ones(len(ids_TK), dtype=torch.bool, device=ids_TK.device) if routed_T is None else routed_T
        if padding_T is not None:
            replay_T = replay_T & ~padding_T
        outside_TK = ((recorded_TK < 0) | (recorded_TK >= e)) & replay_T[:, None]
        if not outside_TK.is_cuda and outside_TK.any():
            checks.fail("route", "recorded_TK", f"0 to {e - 1} where it is replayed", int(recorded_TK[outside_TK][0]))
        ids_TK = torch.where((replay_T & ~outside_TK.any(-1))[:, None], recorded_TK, ids_TK)
    if padding_T is not None:
        nth_T = padding_T.cumsum(0) - 1
        dealt_TK = (nth_T[:, None] * top_k + torch.arange(top_k, device=ids_TK.device)) % e
        ids_TK = torch.where(padding_T[:, None], dealt_TK, ids_TK)
    counts_E = torch.bincount((ids_TK if padding_T is None else ids_TK[~padding_T]).flatten(), minlength=e)
    weights_TK = scores_TE.gather(1, ids_TK)
    if normalise:
        total_T1 = torch.zeros_like(weights_TK[:, :1])
        for k in range(top_k):  # in the order of the slots, so that every backend can have the same bits
            total_T1 = total_T1 + weights_TK[:, k : k + 1]
        weights_TK = weights_TK / (total_T1 + 1e-20)
    return ids_TK, weights_TK * scale, counts_E


def _route_fake(
    logits_TE: Tensor, scoring: str, bias_E: Any, recorded_TK: Any, routed_T: Any, padding_T: Any, top_k: int, *_: Any
) -> Any:
    t, e = logits_TE.shape
    new = logits_TE.new_empty
    return new(t, top_k, dtype=torch.int64), new(t, top_k), new(e, dtype=torch.int64)


def _route_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.scoring, ctx.normalise, ctx.scale = inputs[1], inputs[9], inputs[10]
    ctx.save_for_backward(inputs[0], output[0])
    ctx.set_materialize_grads(False)


def _route_backward(ctx: Any, d_ids: Any, d_weights_TK: Tensor | None, d_counts: Any) -> tuple[Tensor | None, ...]:
    if d_weights_TK is None:
        return (None,) * 11
    logits_TE, ids_TK = ctx.saved_tensors
    args = (d_weights_TK.contiguous(), logits_TE, ctx.scoring, ids_TK, ctx.normalise, ctx.scale)
    return _route_backward_op(*args), *[None] * 10


def _route_backward_reference(
    d_weights_TK: Tensor, logits_TE: Tensor, scoring: str, ids_TK: Tensor, normalise: bool, scale: float
) -> Tensor:
    """[T, E]: with w = scale · s / (Σs + ε), d_s = (scale · d_w − Σ_j d_w w) / (Σs + ε); repeated ids add up."""
    scores_TE = _scores(logits_TE, scoring)
    chosen_TK, d_chosen_TK = scores_TE.gather(1, ids_TK), d_weights_TK * scale
    if normalise:
        total_T1 = chosen_TK.sum(-1, keepdim=True) + 1e-20
        d_chosen_TK = (d_chosen_TK - (d_chosen_TK * chosen_TK / total_T1).sum(-1, keepdim=True)) / total_T1
    if scoring == "sigmoid":
        d_chosen_TK = d_chosen_TK * (chosen_TK * (1 - chosen_TK))
    d_TE = torch.zeros_like(scores_TE).scatter_add_(1, ids_TK, d_chosen_TK)
    return scores_TE * (d_TE - (d_TE * scores_TE).sum(-1, keepdim=True)) if scoring == "softmax" else d_TE


def _route_backward_fake(
    d_weights_TK: Tensor, logits_TE: Tensor, scoring: str, ids_TK: Tensor, normalise: bool, scale: float
) -> Tensor:
    return torch.empty_like(logits_TE)


def _invalid(ids_XK: Tensor, n_experts: int) -> tuple[Tensor, Tensor]:
    """bool [X] twice: rows with an id out of range; other rows with an id twice."""
    outside_X = ((ids_XK < 0) | (ids_XK >= n_experts)).any(-1)
    ordered_XK = ids_XK.sort(dim=-1).values
    return outside_X, (ordered_XK[..., 1:] == ordered_XK[..., :-1]).any(-1) & ~outside_X


def _inspect_reference(routes_TLK: Tensor, routed_T: Tensor | None, n_experts: int) -> Tensor:
    outside_TL, twice_TL = _invalid(routes_TLK.long(), n_experts)
    if routed_T is not None:
        outside_TL, twice_TL = outside_TL & routed_T[:, None], twice_TL & routed_T[:, None]
    bad = (outside_TL | twice_TL).flatten()
    index = torch.arange(len(bad), device=bad.device)
    none = torch.full((1,), len(bad), device=bad.device)
    first = torch.cat((torch.where(bad, index, len(bad)), none)).amin()
    return torch.stack((outside_TL.sum(), twice_TL.sum(), torch.where(first < len(bad), first, -1)))


def _inspect_fake(routes_TLK: Tensor, routed_T: Tensor | None, n_experts: int) -> Tensor:
    return routes_TLK.new_empty(3, dtype=torch.int64)


_logits_op = define(
    "router_logits(Tensor x_TD, Tensor weight_ED) -> Tensor",
    _logits_reference,
    _logits_fake,
    setup_context=_logits_setup,
    backward=_logits_backward,
)
_route_op = define(
    "route(Tensor logits_TE, str scoring, Tensor? bias_E, Tensor? recorded_TK, Tensor? routed_T, Tensor? padding_T, int top_k,"
    " int n_group, int topk_group, bool normalise, float scale) -> (Tensor, Tensor, Tensor)",
    _route_reference,
    _route_fake,
    setup_context=_route_setup,
    backward=_route_backward,
)
_route_backward_op = define(
    "route_backward(Tensor d_weights_TK, Tensor logits_TE, str scoring, Tensor ids_TK, bool normalise, float scale) -> Tensor",
    _route_backward_reference,
    _route_backward_fake,
)
_inspect_op = define(
    "inspect_routes(Tensor routes_TLK, Tensor? routed_T, int n_experts) -> Tensor", _inspect_reference, _inspect_fake
)
