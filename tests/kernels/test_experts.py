"""Movement of rows and the experts' GEMMs."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from prl.kernels.experts import experts
from prl.kernels.permute import combine, permute, sort_rows
from prl.kernels.swiglu import swiglu


@given(st.integers(1, 30), st.integers(1, 4), st.integers(4, 9))
@settings(max_examples=30, deadline=None)
def test_rows_are_sorted_stably_and_found_again(n, k, n_experts):
    ids = torch.stack([torch.randperm(n_experts)[:k] for _ in range(n)])
    source, position = sort_rows(ids)
    sorted_ids = ids.flatten()[source]
    assert (sorted_ids.diff() >= 0).all()
    assert (source.diff()[sorted_ids.diff() == 0] > 0).all(), "stable: quantisation scales depend on who shares a block"
    assert torch.equal(source[position.flatten()], torch.arange(n * k))
    x = torch.randn(n, 3)
    assert torch.equal(permute(x, source, position), x[source // k])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combine_sums_in_float32_and_casts_once(dtype):
    ids = torch.stack([torch.randperm(8)[:3] for _ in range(40)])
    source, position = sort_rows(ids)
    rows = torch.randn(120, 16).to(dtype)
    weights = torch.rand(40, 3)
    out = combine(rows, weights, source, position)
    expected = (rows[position].double() * weights[..., None].double()).sum(1)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected.to(dtype), rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
    if dtype == torch.bfloat16:
        assert (out != expected.to(dtype)).float().mean() < 0.02, "one rounding, not K"


def test_gradients_of_movement():
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(6)])
    source, position = sort_rows(ids)
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(6, 2, dtype=torch.float64, requires_grad=True)
    scale = torch.rand(12, 1, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x, w: combine(permute(x, source, position) * scale, w, source, position), (x, weights)
    )


def test_experts_gradients_and_empty_experts():
    counts = [3, 0, 4, 1]
    x = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    gate_up = torch.randn(4, 6, 4, dtype=torch.float64, requires_grad=True)
    down = torch.randn(4, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *a: experts(*a, counts), (x, gate_up, down))
    with torch.no_grad():
        without = experts(x, gate_up, down, counts)
    assert torch.equal(experts(x, gate_up, down, counts), without)


def test_frozen_experts_get_no_gradient():
    x = torch.randn(5, 4, requires_grad=True)
    gate_up, down = torch.randn(2, 6, 4), torch.randn(2, 4, 3, requires_grad=True)
    experts(x, gate_up, down, [2, 3]).sum().backward()
    assert gate_up.grad is None and down.grad is not None and x.grad is not None


def test_counts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"counts \[2, 2\] for 5 rows and 2 experts"):
        experts(torch.randn(5, 4), torch.randn(2, 6, 4), torch.randn(2, 4, 3), [2, 2])


def test_swiglu():
    gate, up = torch.randn(2, 7, 5, dtype=torch.float64, requires_grad=True).unbind(0)
    torch.testing.assert_close(swiglu(gate, up), F.silu(gate) * up)
    gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
    assert torch.autograd.gradcheck(swiglu, (gate, up))
