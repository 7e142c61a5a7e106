"""Arguments that no kernel takes: each of every public function is refused by name, before anything runs."""

import inspect
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from prl.kernels.checks import ArgumentError
from prl.kernels.experts import experts
from prl.kernels.grouped_gemm import grouped_gemm, grouped_gemm_fp8, grouped_gemm_weight, grouped_gemm_weight_fp8
from prl.kernels.indexer import index_scores, index_select
from prl.kernels.lm_head import logits, logprobs
from prl.kernels.numerics import FP8
from prl.kernels.permute import combine, permute, permute_quantise, sort_rows
from prl.kernels.quantise import quantise_blocks, quantise_both, quantise_columns, quantise_rows, transpose_codes
from prl.kernels.registry import GradientError
from prl.kernels.router import check_routes, route, router_logits
from prl.kernels.swiglu import swiglu, swiglu_backward_quantise, swiglu_quantise

IDS = torch.tensor([[0, 2], [2, -1], [0, 3]])


def samples() -> list[tuple]:
    """(function, its tensors, its other arguments)"""
    source, position, starts, counts = sort_rows(IDS, 4, align=128)
    x, rows, w = torch.randn(3, 128), torch.randn(len(source), 128), torch.randn(4, 256, 128)
    codes, scales, columns, column_scales = permute_quantise(x, source, position, columns=True)
    fp8_w, groups = quantise_blocks(w), (starts, counts)
    layer = x, IDS, torch.rand(3, 2), w, torch.randn(4, 128, 128)
    return [
        (quantise_rows, (x,), {}),
        (quantise_columns, (rows,), {}),
        (quantise_both, (rows,), {}),
        (quantise_blocks, (w,), {}),
        (transpose_codes, (fp8_w[0],), {}),
        (sort_rows, (IDS,), {"n_experts": 4}),
        (permute, (x, source, position), {}),
        (permute_quantise, (x, source, position), {"columns": True}),
        (combine, (rows, layer[2], source, position), {}),
        (swiglu, (rows,), {}),
        (swiglu_quantise, (torch.randn(128, 256),), {"columns": True}),
        (swiglu_backward_quantise, (torch.randn(128, 256), torch.randn(128, 128), torch.rand(128)), {}),
        (grouped_gemm, (rows, w, *groups), {}),
        (grouped_gemm_weight, (rows, rows, *groups, torch.zeros(4, 128, 128)), {}),
        (grouped_gemm_fp8, (codes, scales, *fp8_w, *groups), {}),
        (grouped_gemm_weight_fp8, (*(columns, column_scales) * 2, *groups, torch.zeros(4, 128, 128)), {}),
        (router_logits, (torch.randn(6, 4), torch.randn(8, 4)), {}),
        (
            route,
            (torch.rand(6, 8), torch.randn(8), torch.arange(12).view(6, 2) % 8, torch.rand(6) > 0.5, torch.rand(6) > 0.7),
            {"scoring": "sigmoid", "top_k": 2},
        ),
        (check_routes, (torch.arange(12).view(3, 2, 2), torch.rand(3) > 0.5), {"n_experts": 12}),
        (logits, (torch.randn(5, 4), torch.randn(7, 4)), {}),
        (logprobs, (torch.randn(5, 4), torch.randn(7, 4), torch.tensor([0, -100, 3, 6, 1]), torch.ones(5)), {"chunk": 2}),
        (index_scores, (torch.randn(2, 3, 4, 8), torch.randn(2, 9, 8), torch.rand(2, 3, 4)), {}),
        (index_select, (torch.randn(2, 3, 9), torch.rand(2, 3, 9) > 0.5), {"top_k": 4}),
        (experts, layer, {}),
        (experts, layer, {"precision": "fp8"}),
    ]


def bad(t: Tensor, argument: str, alone: bool) -> Iterator[object]:
    yield t[None]
    yield t.view(torch.uint8).flatten()[0].clone()
    if argument != "temperature_T":
        yield t.view(torch.uint8).to(torch.complex64) if t.dtype == FP8 else t.to(torch.complex64)
    if argument not in ("keys_BSD", "mask_BQS", "temperature_T"):  # made contiguous
        yield t.tolist() if t.dtype != FP8 else None
        yield (
            torch.stack((t.view(torch.uint8),) * 2, 1).view(t.dtype)[:, 0]
            if t.dtype == FP8
            else torch.stack((t, t), -1)[..., 0]
        )
    if not alone:
        yield t.to("meta")


@pytest.mark.parametrize(
    "sample", range(len(samples())), ids=[f"{f.__name__}-{kw.get('precision', '')}".strip("-") for f, _, kw in samples()]
)
def test_wrong_types_ranks_strides_and_devices_are_refused_by_name(sample: int) -> None:
    function, tensors, others = samples()[sample]
    names = list(inspect.signature(function).parameters)
    function(*tensors, **others)
    for i, t in enumerate(tensors):
        for wrong in bad(t, names[i], len(tensors) == 1):
            with pytest.raises(ArgumentError, match=f"^{function.__name__}: .*{names[i]}.* must be "):
                function(*tensors[:i], wrong, *tensors[i + 1 :], **others)


@pytest.mark.parametrize(("groups", "kept"), [(0, 0), (1, 0), (1, 2), (-1, -1), (2, 3)])
def test_groups_of_experts_that_make_no_sense_are_refused(groups: int, kept: int) -> None:
    with pytest.raises(ArgumentError, match=f"route: topk_group must be 1 to n_group, which is {groups}, got {kept}"):
        route(torch.rand(3, 4), None, None, None, None, scoring="none", top_k=2, n_group=groups, topk_group=kept)


def test_routes_of_no_expert_and_of_other_tokens_are_refused() -> None:
    routes = torch.arange(12).view(3, 2, 2)
    with pytest.raises(ArgumentError, match="check_routes: n_experts must be at least 1, got 0"):
        check_routes(routes, None, 0)
    with pytest.raises(ArgumentError, match=r"check_routes: routed_T must be of shape \[3\], got \[1\]"):
        check_routes(routes, torch.ones(1, dtype=torch.bool), 12)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("wrong", [-2, -(2**63), 4, 2**62])
def test_an_expert_that_cannot_be_is_refused(backend: str, wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRL_KERNELS", backend)
    ids = torch.tensor([[0, 3], [-1, wrong]])
    with pytest.raises((ArgumentError, RuntimeError), match="sort_rows: ids_TK must be -1 to 3, got .*"):
        sort_rows(ids, 4)


def test_a_precision_that_is_none_is_refused() -> None:
    *_, (_, layer, _) = samples()
    with pytest.raises(ArgumentError, match="experts: precision must be bf16 or fp8, got FP8"):
        experts(*layer, precision="FP8")  # type: ignore[arg-type]


def test_temperatures_of_another_number_or_with_a_gradient_are_refused() -> None:
    hidden, weight, labels = torch.randn(5, 4), torch.randn(7, 4), torch.zeros(5, dtype=torch.int64)
    with pytest.raises(ArgumentError, match=r"logprobs: temperature_T must be of shape \[5\], got \[4\]"):
        logprobs(hidden, weight, labels, torch.ones(4), chunk=2)
    with pytest.raises(ArgumentError, match="logprobs: temperature_T must be without a gradient"):
        logprobs(hidden, weight, labels, torch.ones(5, requires_grad=True), chunk=2)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_gradient_that_there_is_not_is_an_error_instead_of_none(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRL_KERNELS", backend)
    x = torch.randn(5, 128, requires_grad=True)
    for call in (lambda: quantise_rows(x), lambda: logits(x, x.detach())):
        with pytest.raises(
            GradientError, match=r"kernel \w+ has no gradient: detach its arguments, or call it under torch.no_grad"
        ):
            call()
        with torch.no_grad():
            call()
    # A second derivative would lack what the C++ of the first has done.
    gate_up = torch.randn(5, 8, requires_grad=True)
    with pytest.raises(GradientError, match="kernel swiglu_backward has no gradient"):
        torch.autograd.grad(swiglu(gate_up).sum(), gate_up, create_graph=True)
