"""Movement of rows, SwiGLU, the grouped GEMMs, and the experts that they make up, on the reference."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from prl.kernels.checks import ArgumentError
from prl.kernels.experts import experts
from prl.kernels.grouped_gemm import grouped_gemm, grouped_gemm_weight
from prl.kernels.numerics import sqnr_db
from prl.kernels.permute import combine, permute, row_bound, sort_rows
from prl.kernels.swiglu import swiglu


@pytest.fixture(autouse=True)
def reference(monkeypatch):
    monkeypatch.setenv("PRL_KERNELS", "reference")


def choices(n, k, n_experts, absent=0.0):
    """int64 [n, k]: distinct experts, some of them −1."""
    ids = torch.stack([torch.randperm(n_experts)[:k] for _ in range(n)]) if n else torch.zeros(0, k, dtype=torch.long)
    return torch.where(torch.rand(n, k) < absent, -1, ids)


@given(st.integers(0, 30), st.integers(1, 4), st.integers(4, 9), st.sampled_from([1, 4]), st.sampled_from([0.0, 0.3]))
@settings(max_examples=40, deadline=None)
def test_rows_are_sorted_stably_and_found_again(n, k, n_experts, align, absent):
    ids = choices(n, k, n_experts, absent)
    source, position, starts, counts = sort_rows(ids, n_experts, align=align)
    assert len(source) == row_bound(n * k, n_experts, align)
    assert torch.equal(counts, torch.bincount(ids[ids >= 0], minlength=n_experts))
    assert (starts % align == 0).all() and (starts.diff() >= counts).all() and (starts.diff() < counts + align).all()
    for e in range(n_experts):
        rows = source[starts[e] : starts[e] + counts[e]]
        assert (ids.flatten()[rows] == e).all()
        assert (rows.diff() > 0).all(), "stable: quantisation scales depend on who shares a block"
    assert (source >= 0).sum() == counts.sum() and torch.equal(position < 0, ids < 0)
    assert torch.equal(source[position[ids >= 0]], torch.arange(n * k)[(ids >= 0).flatten()])
    x = torch.randn(n, 3)
    rows = permute(x, source, position)
    assert (rows[source < 0] == 0).all() and torch.equal(rows[source >= 0], x[source[source >= 0] // k])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combine_sums_in_float32_and_casts_once(dtype):
    source, position, *_ = sort_rows(choices(40, 3, 8), 8)
    rows = torch.randn(120, 16).to(dtype)
    weights = torch.rand(40, 3)
    out = combine(rows, weights, source, position)
    expected = (rows[position].double() * weights[..., None].double()).sum(1)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected.to(dtype), rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
    if dtype == torch.bfloat16:
        assert (out != expected.to(dtype)).float().mean() < 0.02, "one rounding, not K"


def test_gradients_of_movement():
    source, position, *_ = sort_rows(choices(6, 2, 5, absent=0.3), 5, align=4)
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(6, 2, dtype=torch.float64, requires_grad=True)
    scale = torch.rand(len(source), 1, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x, w: combine(permute(x, source, position) * scale, w, source, position), (x, weights)
    )


def saved_by(make):
    """Shapes of what autograd keeps for the backward of `make()`, and its result."""
    found = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(tuple(t.shape)) or t, lambda t: t):
        out = make()
    return found, out


def test_rows_that_are_only_summed_are_not_kept():
    source, position, *_ = sort_rows(choices(6, 2, 5), 5)
    rows = torch.randn(12, 3, requires_grad=True)
    assert saved_by(lambda: combine(rows, None, source, position))[0] == [(12,), (6, 2)]
    assert (12, 3) in saved_by(lambda: combine(rows, torch.rand(6, 2), source, position))[0]


@given(st.integers(0, 30), st.integers(1, 4), st.integers(4, 9), st.sampled_from([1, 4]))
@settings(max_examples=20, deadline=None)
def test_rows_are_made_for_slots_with_an_expert_alone(n, k, n_experts, align):
    ids = choices(n, k, n_experts, 0.7)
    slots = int((ids >= 0).sum())
    whole, known = sort_rows(ids, n_experts, align=align), sort_rows(ids, n_experts, align=align, slots=slots)
    assert len(known[0]) == row_bound(slots, n_experts, align) >= known[2][-1]
    assert torch.equal(known[0], whole[0][: len(known[0])]) and all(map(torch.equal, known[1:], whole[1:]))


def test_a_wrong_number_of_slots_is_refused():
    with pytest.raises(ArgumentError, match="sort_rows: slots must be the 3 of ids_TK that are not -1, got 2"):
        sort_rows(torch.tensor([[0, -1], [1, 2]]), 3, slots=2)


@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_gemm_and_its_gradients(transposed):
    starts, counts = torch.tensor([0, 4, 4, 8, 9]), torch.tensor([3, 0, 4, 1])
    a = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 6, 5, dtype=torch.float64)
    w = (w.transpose(1, 2).contiguous() if transposed else w).requires_grad_()
    out = grouped_gemm(a, w, starts, counts, transposed=transposed)
    for e in range(4):
        rows = slice(starts[e], starts[e] + counts[e])
        torch.testing.assert_close(out[rows], a[rows] @ (w[e] if transposed else w[e].t()))
    assert (out[[3, 9, 10]] == 0).all(), "rows of no group"
    assert torch.autograd.gradcheck(lambda a, w: grouped_gemm(a, w, starts, counts, transposed=transposed), (a, w))


def test_the_weights_gradient_is_added():
    starts, counts = torch.tensor([0, 2, 5]), torch.tensor([2, 3])
    g, a, out = torch.randn(5, 4), torch.randn(5, 3), torch.ones(2, 4, 3)
    grouped_gemm_weight(g, a, starts, counts, out)
    torch.testing.assert_close(out, 1 + torch.stack((g[:2].t() @ a[:2], g[2:].t() @ a[2:])))


def layer(dtype, d=4, i=3, e=4, t=8, k=2, absent=0.0):
    x = torch.randn(t, d, dtype=dtype, requires_grad=True)
    weights = torch.rand(t, k, dtype=torch.promote_types(dtype, torch.float32), requires_grad=True)
    gate_up = (torch.randn(e, 2 * i, d, dtype=dtype) / d**0.5).requires_grad_()
    down = (torch.randn(e, d, i, dtype=dtype) / i**0.5).requires_grad_()
    return x, choices(t, k, e, absent), weights, gate_up, down


@pytest.mark.parametrize("absent", [0.0, 0.4])
def test_experts_gradients(absent):
    x, ids, *rest = layer(torch.float64, absent=absent)
    ids[ids == 1] = 3  # expert 1 gets nothing, some rows have an expert twice
    assert torch.autograd.gradcheck(lambda x, *rest: experts(x, ids, *rest), (x, *rest))


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_experts_of_few_slots_keep_few_rows_and_the_same_bits(precision):
    x, ids, weights, gate_up, down = layer(torch.float32, d=128, i=128, t=400, absent=0.9)
    slots = int((ids >= 0).sum())
    results, kept = [], []
    for known in (None, slots):
        given = [t.detach().clone().requires_grad_() for t in (x, weights, gate_up, down)]
        found, out = saved_by(
            lambda given=given, known=known: experts(given[0], ids, *given[1:], precision=precision, slots=known)
        )
        out.square().sum().backward()
        results.append([out.detach(), *(t.grad for t in given)])
        kept.append({size for shape in found for size in shape})
    assert all(map(torch.equal, *results))
    most, needed = (row_bound(n, 4, 128 if precision == "fp8" else 1) for n in (800, slots))
    assert most in kept[0] and needed in kept[1] and most not in kept[1]


def test_frozen_experts_get_no_gradient():
    x, ids, weights, gate_up, down = layer(torch.float32)
    gate_up.requires_grad_(False)
    experts(x, ids, weights, gate_up, down).sum().backward()
    assert gate_up.grad is None and down.grad is not None and x.grad is not None


def test_fp8_experts_come_near_the_exact_ones():
    torch.manual_seed(0)
    given = layer(torch.float32, d=256, i=128, e=3, t=2000)
    given[1][given[1] == 1] = 2
    grad = torch.randn(2000, 256)
    results = []
    for precision in ("bf16", "fp8"):
        x, ids, weights, gate_up, down = (t.detach().clone() for t in given)
        leaves = [t.requires_grad_() for t in (x, weights, gate_up, down)]
        out = experts(x, ids, weights, gate_up, down, precision=precision)
        out.backward(grad)
        results.append([out.detach(), *(t.grad for t in leaves)])
    quality = [sqnr_db(fp8, exact) for exact, fp8 in zip(*results, strict=True)]
    assert quality[0] >= 23.5 and min(quality[1:]) >= 23, quality


def test_what_does_not_fit_is_refused():
    x, ids, weights, gate_up, down = layer(torch.float32)
    with pytest.raises(ArgumentError, match=r"experts: ids_TK must be of shape \[8, any\], got \[7, 2\]"):
        experts(x, ids[:7], weights, gate_up, down)
    with pytest.raises(ArgumentError, match=r"permute_quantise: D must be a multiple of 128, got 4"):
        experts(x, ids, weights, gate_up, down, precision="fp8")
    with pytest.raises(ArgumentError, match="grouped_gemm: starts_E1 and counts_E must be groups that lie one after the other"):
        grouped_gemm(x, gate_up, torch.tensor([0, 2, 4, 6, 9]), torch.tensor([2, 2, 2, 3]))


def test_swiglu():
    gate_up = torch.randn(7, 10, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(swiglu(gate_up), F.silu(gate_up[:, :5]) * gate_up[:, 5:])
    assert torch.autograd.gradcheck(swiglu, (gate_up,))
