"""Run by `test_triton_gemm.py` with TRITON_INTERPRET=1 and PRL_KERNELS=triton: few programs, each of milliseconds."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import prl_triton
from prl.bench import cases
from prl.kernels import grouped_gemm as gg
from prl.kernels.lm_head import logits, logprobs
from prl.kernels.numerics import calc_diff
from prl.kernels.quantise import quantise_blocks, quantise_columns, quantise_rows
from prl.kernels.router import router_logits
from prl_triton.grouped_gemm import tiles

BF16, F32 = torch.bfloat16, torch.float32


def gemms() -> Iterator[cases.Case]:
    for dtype in (BF16, F32):
        yield from cases.products("cpu", [3, 0, 130, 70], 72, 70, dtype, before=2, after=5)
        yield from cases.products("cpu", [5, 0, 3], 7, 5, dtype, align=4)
        yield from cases.products("cpu", [1], 1, 1, dtype)
        yield from cases.products("cpu", [], 5, 6, dtype, after=4)
        yield from cases.products("cpu", [0, 0], 5, 6, dtype)
        yield from cases.products("cpu", [2], 5, 0, dtype, after=1)
        yield from cases.products("cpu", [2], 0, 5, dtype)
    yield from cases.products_fp8("cpu", [100, 0, 200], 128, 256, before=128, after=70 + 58)
    yield from cases.products_fp8("cpu", [1], 256, 128)
    yield from cases.products_fp8("cpu", [], 128, 128, after=128)
    yield from cases.products_fp8("cpu", [0, 0], 128, 128)
    yield from cases.products_fp8("cpu", [2], 128, 0)
    yield from cases.products_fp8("cpu", [2], 0, 128)
    for sizes in ((70, 24, 130), (3, 5, 7), (1, 1, 1), (0, 4, 8), (4, 0, 8), (4, 3, 0)):
        yield from cases.router_products("cpu", *sizes)
    yield from cases.heads("cpu", 70, 300, 72, 48, BF16, BF16)
    yield from cases.heads("cpu", 40, 140, 40, 24, F32, F32)
    for types in ((BF16, BF16), (F32, F32), (BF16, F32)):
        yield from cases.heads("cpu", 5, 3, 2, 100, *types)
        yield from cases.heads("cpu", 0, 5, 4, 8, *types)


@pytest.mark.parametrize("case", list(gemms()), ids=str)
def test_agrees_with_the_reference(case: cases.Case) -> None:
    cases.check(case, prl_triton.OPS)


@settings(max_examples=8, deadline=None)
@given(
    counts=st.lists(st.sampled_from([0, 1, 3, 64, 65, 129]), max_size=5),
    n=st.integers(1, 70),
    k=st.integers(0, 70),
    dtype=st.sampled_from([BF16, F32]),
    align=st.sampled_from([1, 8]),
    around=st.tuples(st.integers(0, 5), st.integers(0, 130)),
)
def test_any_groups(counts: list[int], n: int, k: int, dtype: torch.dtype, align: int, around: tuple[int, int]) -> None:
    for case in cases.products("cpu", counts, n, k, dtype, align=align, before=around[0], after=around[1]):
        cases.check(case, prl_triton.OPS)


@settings(max_examples=8, deadline=None)
@given(
    counts=st.lists(st.sampled_from([0, 1, 127, 128, 130]), max_size=4),
    n=st.sampled_from([128, 256]),
    k=st.sampled_from([0, 128, 384]),
    around=st.tuples(st.sampled_from([0, 128]), st.sampled_from([0, 256])),
)
def test_any_fp8_groups(counts: list[int], n: int, k: int, around: tuple[int, int]) -> None:
    for case in cases.products_fp8("cpu", counts, n, k, before=around[0], after=around[1]):
        cases.check(case, prl_triton.OPS)


def alone(row: int, e: int, n_groups: int, align: int) -> tuple[Tensor, Tensor]:
    """(starts, counts) of one group e with one row."""
    starts, counts, _ = cases.groups("cpu", [int(i == e) for i in range(n_groups)], align)
    return starts, counts


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_row_of_a_grouped_gemm_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    starts, counts, _ = cases.groups("cpu", [130, 0, 60], 1)
    a, w = cases.normal("cpu", 190, 80, dtype=dtype), cases.normal("cpu", 3, 40, 80, dtype=dtype, seed=1)
    all_rows = gg.grouped_gemm(a, w, starts, counts)
    for row, e in ((0, 0), (77, 0), (129, 0), (130, 2), (189, 2)):
        assert torch.equal(gg.grouped_gemm(a[row : row + 1], w, *alone(row, e, 3, 1))[0], all_rows[row]), row


def test_a_row_of_an_fp8_gemm_does_not_depend_on_the_others() -> None:
    starts, counts, _ = cases.groups("cpu", [200, 0, 60], 128)
    a, w = quantise_rows(cases.normal("cpu", 384, 256)), quantise_blocks(cases.normal("cpu", 3, 128, 256, seed=1))
    all_rows = gg.grouped_gemm_fp8(*a, *w, starts, counts)
    for row, e in ((0, 0), (199, 0), (256, 2), (315, 2)):
        codes, scales = torch.zeros_like(a[0][:128]), torch.ones(2, 128)
        codes[0], scales[:, 0] = a[0][row], a[1][:, row]
        one = gg.grouped_gemm_fp8(codes, scales, *w, *alone(row, e, 3, 128))
        assert torch.equal(one[0], all_rows[row]), row


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_token_of_a_dense_product_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    x, w = cases.normal("cpu", 140, 80, dtype=dtype), cases.normal("cpu", 40, 80, dtype=dtype, seed=1)
    labels = torch.arange(140) % 40

    def head(s: slice) -> Tensor:
        return torch.stack(logprobs(x[s], w, labels[s], 0.7, chunk=64)).t()

    for f in (lambda s: router_logits(x[s], w), lambda s: logits(x[s], w), head):
        all_rows = f(slice(None))
        for row in (0, 63, 64, 139):
            assert torch.equal(f(slice(row, row + 1))[0], all_rows[row]), row


def test_fp8_against_the_unquantised_product() -> None:
    starts, counts, _ = cases.groups("cpu", [256, 128], 128)
    a, w = cases.normal("cpu", 384, 256), cases.normal("cpu", 2, 128, 256, seed=1)
    g = cases.normal("cpu", 384, 128, seed=2)
    out = gg.grouped_gemm_fp8(*quantise_rows(a), *quantise_blocks(w), starts, counts)
    assert calc_diff(out, gg._gemm_reference(a, w, starts, counts, False)) < 1e-3
    d_w, exact = torch.zeros(2, 128, 256), torch.zeros(2, 128, 256)
    gg.grouped_gemm_weight_fp8(*quantise_columns(g), *quantise_columns(a), starts, counts, d_w)
    gg._weight_reference(g, a, starts, counts, exact)
    assert calc_diff(d_w, exact) < 1e-3


def test_not_finite_stays_in_its_row() -> None:
    starts, counts, _ = cases.groups("cpu", [128], 128)
    x, w = cases.normal("cpu", 128, 128), cases.normal("cpu", 1, 128, 128, seed=1)
    x[5, 9], x[17, 100] = torch.nan, torch.inf
    fp8 = gg.grouped_gemm_fp8(*quantise_rows(x), *quantise_blocks(w), starts, counts)
    plain = gg.grouped_gemm(x.bfloat16(), w.bfloat16(), starts, counts)
    logprob, entropy = logprobs(x, w[0], torch.zeros(128, dtype=torch.int64), 1.0, chunk=128)
    for rows in (fp8, plain, torch.stack((logprob, entropy), 1)):
        bad = (~rows.isfinite()).any(1)
        assert bad[[5, 17]].all() and bad.sum() == 2


def test_codes_that_tma_cannot_address_are_copied() -> None:
    flat = torch.zeros(128 * 128 + 1, dtype=torch.uint8).view(torch.float8_e4m3fn)
    at = tiles(flat[1:].view(128, 128))
    assert at.base.data_ptr() % 16 == 0 and at.base.shape == (128, 128)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_gradients_of_a_grouped_gemm(dtype: torch.dtype) -> None:
    starts, counts, of_group = cases.groups("cpu", [9, 0, 5], 4, after=3)
    results = []
    for kind in (dtype, torch.float64):
        a = cases.normal("cpu", len(of_group), 24, dtype=dtype).to(kind).requires_grad_()
        w = cases.normal("cpu", 3, 16, 24, dtype=dtype, seed=1).to(kind).requires_grad_()
        if kind == torch.float64:
            out = torch.zeros(len(of_group), 16, dtype=kind)
            for e, rows in gg._spans(starts, counts):
                out[rows] = a[rows] @ w[e].t()
        else:
            out = gg.grouped_gemm(a, w, starts, counts)
        results.append(torch.autograd.grad(out, (a, w), cases.normal("cpu", *out.shape, dtype=dtype, seed=2).to(kind)))
    for got, exact in zip(*results, strict=True):
        assert cases.error(got, exact) < (4e-3 if dtype == BF16 else 1e-6)


@pytest.mark.parametrize(("dtype", "most"), [(BF16, 4e-3), (F32, 2e-6)])
@pytest.mark.parametrize("of", ["logprob", "entropy", "both"])
def test_gradients_of_the_head(dtype: torch.dtype, most: float, of: str) -> None:
    labels = torch.arange(20) % 30
    labels[[3, 9, 19]] = -100
    results = []
    for kind in (dtype, torch.float64):
        h = cases.normal("cpu", 20, 16, dtype=dtype).to(kind).requires_grad_()
        w = cases.normal("cpu", 30, 16, dtype=dtype, seed=1).to(kind).requires_grad_()
        if kind == dtype:
            logprob, entropy = logprobs(h, w, labels, 0.7, chunk=8)
        else:
            log_p = (h @ w.t() / 0.7).log_softmax(-1)
            kept = labels != -100
            logprob = torch.where(kept, log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0], 0)
            entropy = torch.where(kept, -(log_p.exp() * log_p).sum(-1), 0)
        slope = cases.normal("cpu", 20, seed=2)
        loss = (logprob * slope).sum() * (of != "entropy") + (entropy * slope.flip(0)).sum() * (of != "logprob")
        results.append([logprob.detach(), entropy.detach(), *torch.autograd.grad(loss, (h, w))])
    for got, exact in zip(*results, strict=True):
        assert cases.error(got, exact) < most


def test_probabilities_that_underflow() -> None:
    hidden, weight = torch.tensor([[1e4, 0.0]], requires_grad=True), torch.eye(2, requires_grad=True)
    logprob, entropy = logprobs(hidden, weight, torch.tensor([0]), 1.0, chunk=4)
    assert logprob.item() == 0 and entropy.item() == 0
    (logprob + entropy).sum().backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all() and weight.grad.isfinite().all()


def test_large_logits_lose_no_entropy() -> None:
    """The sum for the entropy is taken from the row's maximum, so a shift of all logits changes nothing."""
    h, w = torch.zeros(1, 3), cases.normal("cpu", 50, 3)
    h[0] = torch.tensor([1.0, 0.5, 0])
    w[:, 2] = 1
    entropies = []
    for shift in (0.0, 2.0**14):
        h[0, 2] = shift
        entropies.append(logprobs(h, w.bfloat16().float(), torch.tensor([3]), 1.0, chunk=1)[1])
    assert (entropies[0] - entropies[1]).abs() < 2e-3


def test_rows_without_a_label_have_no_gradient_whatever_they_meet() -> None:
    h, w = cases.normal("cpu", 4, 16).requires_grad_(), cases.normal("cpu", 9, 16, seed=1)
    w[2] = torch.inf
    logprob, entropy = logprobs(h, w, torch.tensor([1, -100, 3, -100]), 1.0, chunk=4)
    (d_h,) = torch.autograd.grad(logprob.sum() + entropy.sum(), h)
    assert d_h[[1, 3]].eq(0).all() and not d_h[[0, 2]].isfinite().all()


def test_a_label_outside_the_vocabulary_has_no_logprob() -> None:
    """On a GPU labels are not read before; the CPU's check is passed by here."""
    h, w = cases.normal("cpu", 3, 16), cases.normal("cpu", 9, 16, seed=1)
    args = (h, w, torch.tensor([9, 2, 1000]), torch.ones(3), 2)
    logprob, entropy, _ = prl_triton.OPS["logprobs"](*args)
    assert logprob.isnan().tolist() == [True, False, True] and entropy.isfinite().all()
