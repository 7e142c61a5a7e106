"""The ops of the bitwise mode: right, and the same bits for a row whatever comes with it."""

import pytest
import torch

from prl.kernels import lm_head, registry
from prl.kernels.attention import attention, attention_again
from prl.kernels.checks import ArgumentError
from prl.kernels.dense import linear, per_head
from prl.kernels.rope import rotate_pairs

pytestmark = pytest.mark.skipif(registry.unavailable("cpu") is not None, reason=str(registry.unavailable("cpu")))

DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture(autouse=True, params=["avx512", "portable"])
def path(request):
    portable = request.param == "portable"
    if not torch.ops.prl_cpu.force_portable(portable) and not portable:
        pytest.skip("this processor has the portable path only")
    yield
    torch.ops.prl_cpu.force_portable(False)


def given(dtype, b, q, s, h, g, x, c):
    shapes = (b, q, h, x), (b, s, g, x), (b, s, g, c)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def softmax_attention(q, k, v, seen, scale):
    """In float64, head by head."""
    per = q.shape[2] // k.shape[2]
    out = []
    for h in range(q.shape[2]):
        z = scale * q[:, :, h].double() @ k[:, :, h // per].double().mT
        out.append(z.masked_fill(~seen, -torch.inf).softmax(-1) @ v[:, :, h // per].double())
    return torch.stack(out, 2)


def causal(b, q, s):
    return (torch.arange(s) <= torch.arange(s - q, s)[:, None]).expand(b, q, s)


def indices(seen, width):
    rows = [row.nonzero()[:, 0].tolist() for row in seen.flatten(0, 1)]
    return torch.tensor([r + [-1] * (width - len(r)) for r in rows], dtype=torch.int32).unflatten(0, seen.shape[:2])


SHAPES = [(2, 5, 9, 8, 2, 24, 24), (1, 70, 300, 8, 8, 64, 64), (3, 1, 257, 72, 1, 80, 64), (2, 33, 100, 6, 2, 20, 100)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_softmax_attention(shape, dtype):
    q, k, v = given(dtype, *shape)
    seen = torch.rand(*shape[:3]) < 0.5
    seen[..., -1] = True
    got = attention(q, k, v, shape[-1], seen, 0.2)
    expected = softmax_attention(q, k, v, seen, 0.2)
    # An error of a score, at most 80 products of some 4 · 4 · 0.2 each, is one of p in its own size.
    assert (got - expected).abs().max() < (1e-5 if dtype == torch.float32 else 2**-8 * expected.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_depends_on_a_query_and_its_keys_alone(shape, dtype):
    """One query of one sequence with the keys it sees gives the bits that it has among all, by mask and by index."""
    q, k, v = given(dtype, *shape)
    b, n_queries, s, _, _, _, c = shape
    whole = attention(q, k, v, c, causal(b, n_queries, s), 0.2)
    for i in {0, n_queries // 2, n_queries - 1}:
        n = s - n_queries + i + 1
        one, keys, values = q[-1:, i : i + 1], k[-1:, :n], v[-1:, :n]
        assert torch.equal(attention(one, keys, values, c, torch.ones(1, 1, n, dtype=torch.bool), 0.2)[0, 0], whole[-1, i])
    seen = torch.rand(b, n_queries, s) < 0.3
    seen[..., 0] = True
    by_mask = attention(q, k, v, c, seen, 0.2)
    assert torch.equal(attention(q, k, v, c, indices(seen, s), 0.2), by_mask)
    few = seen[-1, -1].nonzero()[:, 0]
    alone = attention(q[-1:, -1:], k[-1:, few], v[-1:, few], c, torch.ones(1, 1, len(few), dtype=torch.bool), 0.2)
    assert torch.equal(alone[0, 0], by_mask[-1, -1])


def test_values_may_be_the_first_entries_of_the_keys():
    q, k, _ = given(torch.float32, 2, 3, 7, 4, 1, 10, 6)
    seen = causal(2, 3, 7)
    assert torch.equal(attention(q, k, None, 6, seen, 0.3), attention(q, k, k[..., :6], 6, seen, 0.3))
    assert torch.equal(attention(q, k, None, 6, indices(seen, 8), 0.3), attention(q, k, None, 6, seen, 0.3))


def test_what_is_not_finite_stays_visible_and_in_its_row():
    q, k, v = given(torch.float32, 1, 4, 9, 2, 1, 8, 8)
    q[0, 1] = torch.nan
    got = attention(q, k, v, 8, causal(1, 4, 9), 0.3)
    assert got[0, 1].isnan().all() and got[0, [0, 2, 3]].isfinite().all()


def test_gradients_of_attention_are_those_of_the_function_given():
    q, k, v = (t.requires_grad_() for t in given(torch.float64, 1, 3, 5, 4, 2, 6, 6))
    seen = causal(1, 3, 5)
    again = lambda q, k, v: softmax_attention(q, k, v, seen, 0.3)  # noqa: E731
    grad = torch.randn(1, 3, 4, 6, dtype=torch.float64)
    got = torch.autograd.grad(attention_again(q, k, v, 6, seen, 0.3, again), (q, k, v), grad)
    for a, b in zip(got, torch.autograd.grad(again(q, k, v), (q, k, v), grad), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [24, 37, 300])
def test_a_row_of_a_product_depends_on_itself_alone(k, dtype):
    x, w = torch.randn(40, k).to(dtype), torch.randn(70, k).to(dtype)
    whole = linear(x, w)
    expected = x.double() @ w.double().t()
    assert (whole - expected).abs().max() < (1e-4 if dtype == torch.float32 else 2**-8 * expected.abs().max())
    for rows in (slice(3, 4), slice(3, 10), slice(30, 40)):
        assert torch.equal(linear(x[rows], w), whole[rows])
    heads = x.unflatten(0, (8, 5))
    w_HNK = w.unflatten(0, (5, 14))
    assert torch.equal(per_head(heads, w_HNK)[3:4], per_head(heads[3:4], w_HNK))
    bmm = torch.einsum("thk,hnk->thn", heads.double(), w_HNK.double())
    assert (per_head(heads, w_HNK) - bmm).abs().max() < (1e-4 if dtype == torch.float32 else 2**-8 * bmm.abs().max())
    assert torch.equal(per_head(heads, w_HNK.mT.contiguous(), transposed=True), per_head(heads, w_HNK))


def test_gradients_of_products_and_rotations():
    torch.manual_seed(0)
    x, w = (
        torch.randn(5, 4, dtype=torch.float64, requires_grad=True),
        torch.randn(3, 4, dtype=torch.float64, requires_grad=True),
    )
    assert torch.autograd.gradcheck(linear, (x, w))
    angle = torch.randn(5, 2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: rotate_pairs(x[:, None], angle.cos(), angle.sin()), (x,))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("r", [2, 6, 26, 64])
def test_a_rotation_is_rounded_operation_by_operation(r, dtype):
    x, angle = torch.randn(9, 3, r).to(dtype), torch.randn(9, r // 2)
    cos, sin = angle.cos(), angle.sin()
    got = rotate_pairs(x, cos, sin)
    for i in range(r // 2):
        a, b = x[..., 2 * i].float(), x[..., 2 * i + 1].float()
        assert torch.equal(got[..., 2 * i], (a * cos[:, i, None] - b * sin[:, i, None]).to(dtype))
        assert torch.equal(got[..., 2 * i + 1], (b * cos[:, i, None] + a * sin[:, i, None]).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [5, 64, 1500, 9000])
def test_the_logprob_of_a_label_is_that_of_the_fused_head(vocabulary, dtype):
    # Flat distributions: every slab weighs, and among many rows the order of their sums shows in some.
    hidden, weight = torch.randn(400, 37).to(dtype) / 3, torch.randn(vocabulary, 37).to(dtype)
    labels, temperature = torch.randint(vocabulary, (400,)), torch.rand(400) + 0.3
    fused, _ = lm_head.logprobs(hidden, weight, labels, temperature, chunk=7)
    some = slice(11, 390)
    assert torch.equal(
        lm_head.label_logprobs(lm_head.logits(hidden[some], weight), labels[some], temperature[some]), fused[some]
    )
    bad = torch.full((400,), torch.nan).scatter_(0, torch.tensor([3]), 1.0)
    assert lm_head.label_logprobs(bad[:, None].expand(400, vocabulary).contiguous(), labels, temperature)[0].isnan()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda q, k, v, m: attention(q, k[:, :, :, :4], v, 6, m, 1.0), r"keys_BSGX must be of shape \[2, any, any, 6\]"),
        (lambda q, k, v, m: attention(q[:, :, :3], k, v, 6, m, 1.0), "H must be a multiple of 2, got 3"),
        (lambda q, k, v, m: attention(q, k, v, 5, m, 1.0), r"values_BSGC must be of shape \[2, 9, 2, 5\]"),
        (lambda q, k, v, m: attention(q, k, None, 7, m, 1.0), "value_width must be 1 to X, which is 6, got 7"),
        (lambda q, k, v, m: attention(q, k, v, 6, m[..., 1:], 1.0), r"seen must be of shape \[2, 3, 9\]"),
        (lambda q, k, v, m: attention(q, k, v, 6, m.long(), 1.0), "seen must be of type bool or int32"),
        (lambda q, k, v, m: attention(*(t[..., :5].bfloat16() for t in (q, k)), None, 5, m, 1.0), "X must be a multiple of 2"),
        (lambda q, k, v, m: linear(q[0, 0], k[0, 0, :, :4]), r"weight_NK must be of shape \[any, 6\]"),
        (lambda q, k, v, m: rotate_pairs(q[0], v[0, :3, 0], v[0, :3, 0]), r"cos_TP must be of shape \[3, 3\]"),
        (lambda q, k, v, m: lm_head.label_logprobs(q[0, 0], torch.tensor([0, 6, 1, 2]), torch.ones(4)), "0 to 5, got 6"),
    ],
)
def test_errors_name_the_argument(call, message):
    with pytest.raises(ArgumentError, match=message):
        call(*given(torch.float32, 2, 3, 9, 4, 2, 6, 6), causal(2, 3, 9))


def test_an_index_out_of_range_is_an_error():
    q, k, v = given(torch.float32, 1, 1, 9, 2, 1, 8, 8)
    with pytest.raises(RuntimeError, match="seen must be below 9, got 9"):
        attention(q, k, v, 8, torch.tensor([[[0, 9]]], dtype=torch.int32), 1.0)
