"""The expert layer on every backend that runs on this CPU: quality of FP8, batch invariance, determinism, no missing op."""

import pytest
import torch

from prl.kernels import registry
from prl.kernels.experts import experts
from prl.kernels.grouped_gemm import grouped_gemm_fp8
from prl.kernels.numerics import calc_diff, sqnr_db
from prl.kernels.quantise import quantise_blocks, quantise_rows
from prl.kernels.router import route, router_logits

PRECISIONS = ["bf16", "fp8"]


@pytest.fixture(params=["reference", "cpu"])
def backend(request, monkeypatch):
    monkeypatch.setenv("PRL_KERNELS", request.param)
    return request.param


def layer(t=1500, d=256, i=128, e=6, k=2, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    x = torch.randn(t, d, dtype=dtype)
    ids = torch.rand(t, e).argsort(-1)[:, :k].contiguous()
    ids[ids == 1] = 2  # expert 1 has no rows, some rows have expert 2 twice
    weights = torch.rand(t, k)
    gate_up = (torch.randn(e, 2 * i, d) / d**0.5).to(dtype)
    down = (torch.randn(e, d, i) / i**0.5).to(dtype)
    return x, ids, weights, gate_up, down


def run(given, precision, grad=None):
    """[output, gradients of x, weights, gate_up, down]."""
    x, ids, weights, gate_up, down = given
    leaves = [t.detach().clone().requires_grad_() for t in (x, weights, gate_up, down)]
    out = experts(leaves[0], ids, *leaves[1:], precision=precision)
    if grad is None:
        return [out.detach()]
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def error(got, exact):
    return float((got.double() - exact.double()).norm())


def test_the_cpu_backend_has_every_op_of_its_own():
    """Nothing of the table falls to the reference where the extension is built."""
    missing = {(op, state) for op, backend, state in registry.status("cpu") if backend == "cpu" and state != "chosen"}
    assert not missing


def test_one_linear_in_fp8(backend):
    torch.manual_seed(0)
    x, w = torch.randn(512, 512), torch.randn(1, 256, 512)
    starts, counts = torch.tensor([0, 512]), torch.tensor([512])
    y = grouped_gemm_fp8(*quantise_rows(x), *quantise_blocks(w), starts, counts, out_dtype=torch.float32)
    exact = x.double() @ w[0].double().t()
    assert sqnr_db(y, exact) >= 28 and calc_diff(y, exact) < 1e-3


def test_quality_of_fp8(backend, monkeypatch):
    given = layer()
    grad = torch.randn_like(given[0])
    got = run(given, "fp8", grad)
    monkeypatch.setenv("PRL_KERNELS", "reference")
    exact, emulated = run(given, "bf16", grad), run(given, "fp8", grad)
    quality = [sqnr_db(g, e) for g, e in zip(got, exact, strict=True)]
    assert quality[0] >= 23.5 and min(quality[1:]) >= 23, quality
    worse = [error(g, e) / error(r, e) for g, r, e in zip(got, emulated, exact, strict=True)]
    assert max(worse) <= 1.05, worse


@pytest.mark.parametrize("precision", PRECISIONS)
def test_bf16_layer_is_as_exact_as_the_references(backend, monkeypatch, precision):
    given = layer(t=400, dtype=torch.bfloat16)
    grad = torch.randn_like(given[0])
    got = run(given, precision, grad)
    monkeypatch.setenv("PRL_KERNELS", "reference")
    reference = run(given, precision, grad)
    x, ids, weights, *rest = given
    exact = run((x.double(), ids, weights.double(), *(t.double() for t in rest)), "bf16", grad.double())
    worse = [error(g, e) / error(r, e) for g, r, e in zip(got, reference, exact, strict=True)]
    assert max(worse) <= 1.05, worse


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_token_does_not_depend_on_its_batch(monkeypatch, precision, dtype):
    """Router and experts, bit for bit: alone, in a small batch, and in another order."""
    monkeypatch.setenv("PRL_KERNELS", "cpu")
    x, _, _, gate_up, down = layer(t=300, dtype=dtype)
    gate = torch.randn(len(gate_up), x.shape[1])

    def forward(x):
        routing = route(router_logits(x, gate), None, None, None, None, scoring="sigmoid", top_k=2)
        return experts(x, routing.ids_TK, routing.weights_TK, gate_up, down, precision=precision)

    with torch.no_grad():
        whole = forward(x)
        order = torch.randperm(len(x))
        assert torch.equal(forward(x[order].contiguous()), whole[order])
        for tokens in ([0], [7, 100], list(range(33)), list(range(128))):
            assert torch.equal(forward(x[tokens].contiguous()), whole[tokens]), len(tokens)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_same_bits_every_time_and_for_every_number_of_threads(backend, precision):
    given = layer(t=700, dtype=torch.bfloat16)
    grad = torch.randn_like(given[0])
    first = run(given, precision, grad)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for a, b in zip(first, run(given, precision, grad), strict=True):
            assert torch.equal(a, b) or backend == "reference"  # torch's own products promise nothing
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(first, run(given, precision, grad), strict=True))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_tokens_no_own_expert_and_no_experts(backend, precision):
    x, ids, weights, *rest = layer(t=5)
    empty = run((x[:0], ids[:0], weights[:0], *rest), precision, x[:0])
    assert [t.shape for t in empty] == [x[:0].shape, x[:0].shape, weights[:0].shape, *(t.shape for t in rest)]
    absent = run((x, torch.full_like(ids, -1), weights, *rest), precision, torch.ones_like(x))
    none = run((x, torch.full_like(ids, -1), weights, *(t[:0] for t in rest)), precision, torch.ones_like(x))
    for t in (*empty, *absent, *none):
        assert (t == 0).all()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_is_not_finite_stays_visible(backend, precision):
    given = layer(t=40)
    given[0][3, 5] = torch.nan
    out, d_x, *_ = run(given, precision, torch.ones_like(given[0]))
    assert out[3].isnan().all() and out[[0, 1, 2, 4]].isfinite().all()
    assert d_x[[0, 1, 2, 4]].isfinite().all()
