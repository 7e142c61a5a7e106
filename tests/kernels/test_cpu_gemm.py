"""The GEMMs and the LM head of the CPU extension, on both of its paths: AVX-512 with BF16, and portable C++."""

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import prl.kernels.grouped_gemm as gg
from prl.kernels import lm_head, registry, router
from prl.kernels.numerics import BLOCK, FP8
from prl.kernels.quantise import dequantise_columns, quantise_blocks, quantise_columns, quantise_rows

pytestmark = pytest.mark.skipif(registry.unavailable("cpu") is not None, reason=str(registry.unavailable("cpu")))

BF16, F32 = torch.bfloat16, torch.float32
ops = torch.ops.prl_cpu


@pytest.fixture(params=["avx512", "portable"], autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    if not ops.force_portable(request.param == "portable") and request.param == "avx512":
        pytest.skip("no AVX-512 with BF16")
    yield request.param
    ops.force_portable(False)


def groups(counts: list[int], align: int = 1, gap: int = 0) -> tuple[Tensor, Tensor]:
    starts = [-(-gap // align) * align]
    for count in counts:
        starts.append(-(-(starts[-1] + count + gap) // align) * align)
    return torch.tensor(starts), torch.tensor(counts, dtype=torch.int64)


def normal(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def held(starts: Tensor, counts: Tensor, rows: int) -> Tensor:
    """bool [rows]: those of a group."""
    mask = torch.zeros(rows, dtype=torch.bool)
    for start, count in zip(starts.tolist(), counts.tolist(), strict=False):
        mask[start : start + count] = True
    return mask


def error(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).square().mean().sqrt())


def as_good(got: Tensor, reference: Tensor, exact: Tensor) -> None:
    """The error against the exact product is at most 1.5 times the reference's, whose own may be 0 by luck where K is small."""
    assert got.dtype == reference.dtype and got.shape == reference.shape and got.is_contiguous()
    if got.numel():
        rounding = float(exact.abs().mean()) * torch.finfo(got.dtype).eps / 4
        assert error(got, exact) <= 1.5 * max(error(reference, exact), rounding)


SHAPES = [(128, 128), (70, 33), (300, 1030), (1, 40), (40, 1), (17, 2500), (64, 256), (129, 2)]  # N, K


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_grouped_gemm_is_as_exact_as_the_reference(n: int, k: int, dtype: torch.dtype) -> None:
    starts, counts = groups([3, 0, 17, 70, 1, 0], gap=2)
    rows = int(starts[-1]) + 5
    a, w = normal(rows, k, dtype=dtype), normal(6, n, k, dtype=dtype, seed=1)
    exact = gg._gemm_reference(a.double(), w.double(), starts, counts, False)
    got = ops.grouped_gemm(a, w, starts, counts, False)
    as_good(got, gg._gemm_reference(a, w, starts, counts, False), exact)
    assert torch.equal(ops.grouped_gemm(a, w.transpose(1, 2).contiguous(), starts, counts, True), got)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_the_weight_gradient_adds_to_what_is_there(n: int, k: int, dtype: torch.dtype) -> None:
    starts, counts = groups([3, 0, 600, 70, 1, 0], gap=2)
    rows = int(starts[-1]) + 5
    g, a = normal(rows, n, dtype=dtype), normal(rows, k, dtype=dtype, seed=1)
    before = normal(6, n, k, seed=2)
    got, reference, exact = before.clone(), before.clone(), before.double()
    ops.grouped_gemm_weight(g, a, starts, counts, got)
    gg._weight_reference(g, a, starts, counts, reference)
    gg._weight_reference(g.double(), a.double(), starts, counts, exact)
    as_good(got, reference, exact)
    assert torch.equal(got[[1, 5]], before[[1, 5]])


def fp8_operands(counts: list[int], n: int, k: int) -> tuple[Tensor, ...]:
    """(rows of a, g with padding rows of zeros, groups): as `permute_quantise` would leave them."""
    starts, held_counts = groups(counts, BLOCK)
    rows = int(starts[-1]) + BLOCK
    mask = held(starts, held_counts, rows)[:, None]
    return normal(rows, k) * mask, normal(rows, n, seed=1) * mask, starts, held_counts


@pytest.mark.parametrize("out_dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize(("n", "k"), [(128, 128), (256, 1024)])
def test_fp8_is_as_exact_as_the_reference(n: int, k: int, out_dtype: torch.dtype) -> None:
    a, _, starts, counts = fp8_operands([3, 0, 170, 128, 1, 0], n, k)
    a_fp8, w_fp8 = quantise_rows(a), quantise_blocks(normal(6, n, k, seed=2))
    a64 = a_fp8[0].double() * a_fp8[1].T.double().repeat_interleave(BLOCK, 1)
    w64 = w_fp8[0].double() * w_fp8[1].double().repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    got = ops.grouped_gemm_fp8(*a_fp8, *w_fp8, starts, counts, out_dtype)
    reference = gg._fp8_reference(*a_fp8, *w_fp8, starts, counts, out_dtype)
    as_good(got, reference, gg._gemm_reference(a64, w64, starts, counts, False))


@pytest.mark.parametrize(("n", "k"), [(128, 128), (256, 384)])
def test_fp8_weight_gradient_is_as_exact_as_the_reference(n: int, k: int) -> None:
    a, g, starts, counts = fp8_operands([3, 0, 600, 128, 1, 0], n, k)
    a_fp8, g_fp8 = quantise_columns(a), quantise_columns(g)
    before = normal(6, n, k, seed=2)
    got, reference, exact = before.clone(), before.clone(), before.double()
    ops.grouped_gemm_weight_fp8(*g_fp8, *a_fp8, starts, counts, got)
    gg._weight_fp8_reference(*g_fp8, *a_fp8, starts, counts, reference)
    g64, a64 = (dequantise_columns(*x, dtype=torch.float64) for x in (g_fp8, a_fp8))
    gg._weight_reference(g64, a64, starts, starts.diff(), exact)
    as_good(got, reference, exact)


def test_every_fp8_code_is_decoded_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(4).view(8, 128).view(FP8)
    starts, counts = groups([8], BLOCK)
    one_hot = torch.eye(128).to(FP8)[None]
    scales = (torch.ones(1, 128), torch.ones(1, 1, 1))
    a = torch.zeros(128, 128).to(FP8)
    a[:8] = codes
    got = ops.grouped_gemm_fp8(a, scales[0], one_hot, scales[1], starts, counts, F32)[:8]
    finite = ~codes.float().isnan().any(1)
    assert torch.equal(got[finite], codes.float()[finite])
    assert got[~finite].isnan().all()
    b = torch.zeros(1, 128, 128).to(FP8)
    b[0, :8] = codes
    got = ops.grouped_gemm_fp8(one_hot[0], scales[0], b, scales[1], torch.tensor([0, 128]), torch.tensor([128]), F32)
    assert torch.equal(got.T[:8][finite], codes.float()[finite]) and got.T[:8][~finite].isnan().all()


def test_rows_of_no_group_are_zeros_whatever_they_hold() -> None:
    for dtype in (BF16, F32):
        starts, counts = groups([5, 0, 9], gap=3)
        a = normal(int(starts[-1]) + 7, 40, dtype=dtype)
        mask = held(starts, counts, len(a))
        a[~mask] = torch.nan
        w = normal(3, 50, 40, dtype=dtype)
        for got in (
            ops.grouped_gemm(a, w, starts, counts, False),
            ops.grouped_gemm(a, w.mT.contiguous(), starts, counts, True),
        ):
            assert got[~mask].eq(0).all() and got[mask].isfinite().all()
        d_w = torch.zeros(3, 40, 40)
        ops.grouped_gemm_weight(a, a, starts, counts, d_w)
        assert d_w.isfinite().all() and d_w[1].eq(0).all()
    a_fp8, scales = quantise_rows(normal(512, 128))
    starts, counts = groups([5, 100], BLOCK)
    mask = held(starts, counts, 512)
    a_fp8.view(torch.uint8)[~mask], scales[:, ~mask] = 0x7F, torch.nan
    got = ops.grouped_gemm_fp8(a_fp8, scales, *quantise_blocks(normal(2, 128, 128)), starts, counts, BF16)
    assert got[~mask].eq(0).all() and got[mask].isfinite().all()


@pytest.mark.parametrize("r", [0, 4])
@pytest.mark.parametrize("counts", [[], [0, 0]])
def test_nothing_to_multiply(r: int, counts: list[int]) -> None:
    e, (starts, held_counts) = len(counts), groups(counts)
    for dtype in (BF16, F32):
        got = ops.grouped_gemm(normal(r, 3, dtype=dtype), normal(e, 5, 3, dtype=dtype), starts, held_counts, False)
        assert got.shape == (r, 5) and got.eq(0).all()
        d_w = torch.ones(e, 5, 3)
        ops.grouped_gemm_weight(normal(r, 5, dtype=dtype), normal(r, 3, dtype=dtype), starts, held_counts, d_w)
        assert d_w.eq(1).all()
    r *= BLOCK
    for n, k in ((128, 0), (0, 128), (128, 128)):
        a, w = quantise_rows(normal(r, k)), quantise_blocks(normal(e, n, k))
        got = ops.grouped_gemm_fp8(*a, *w, starts, held_counts, F32)
        assert got.shape == (r, n) and got.eq(0).all()
        d_w = torch.ones(e, n, k)
        ops.grouped_gemm_weight_fp8(*quantise_columns(normal(r, n)), *quantise_columns(normal(r, k)), starts, held_counts, d_w)
        assert d_w.eq(1).all()


def test_an_empty_sum_is_zero() -> None:
    starts, counts = groups([3, 4])
    for dtype in (BF16, F32):
        assert ops.grouped_gemm(normal(7, 0, dtype=dtype), normal(2, 5, 0, dtype=dtype), starts, counts, False).eq(0).all()
        assert ops.logits(normal(7, 0, dtype=dtype), normal(5, 0, dtype=dtype)).eq(0).all()
    starts, counts = groups([3, 4], BLOCK)
    got = ops.grouped_gemm_fp8(*quantise_rows(normal(256, 0)), *quantise_blocks(normal(2, 128, 0)), starts, counts, F32)
    assert got.shape == (256, 128) and got.eq(0).all()


DENSE = {"router_logits": (ops.router_logits, router._logits_reference), "logits": (ops.logits, lm_head._logits_reference)}


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, F32), (F32, BF16), (F32, F32)], ids=str)
@pytest.mark.parametrize("op", DENSE)
def test_logits_are_as_exact_as_the_reference(op: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    got, reference = DENSE[op]
    for t, n, d in ((300, 16, 128), (7, 301, 33), (1, 40, 1), (0, 5, 3), (3, 0, 3), (65, 64, 1500)):
        x, w = normal(t, d, dtype=dtypes[0]), normal(n, d, dtype=dtypes[1], seed=1)
        as_good(got(x, w), reference(x, w), x.double() @ w.double().T)


def forwards() -> dict[str, tuple[int, Callable[[Tensor, Tensor, Tensor], Tensor]]]:
    """Op → (alignment of groups, output rows of the rows given): a [R, 256], one group of them."""
    cases = {}
    for dtype in (BF16, F32):
        w, odd = normal(1, 200, 256, dtype=dtype, seed=1), normal(1, 33, 255, dtype=dtype, seed=1)
        for name, weight, transposed in (("nt", w, False), ("transposed", w.mT.contiguous(), True), ("odd", odd, False)):
            cases[f"{name}-{dtype}"] = (
                1,
                lambda a, s, c, w=weight, tr=transposed, dt=dtype: ops.grouped_gemm(
                    a[:, : w.shape[1 if tr else 2]].to(dt).contiguous(), w, s, c, tr
                ),
            )
        for x_dtype in (BF16, F32):
            for op, (implementation, _) in DENSE.items():
                cases[f"{op}-{x_dtype}-{dtype}"] = 1, lambda a, s, c, w=w[0], dt=x_dtype, f=implementation: f(a.to(dt), w)
    w_fp8 = quantise_blocks(normal(1, 256, 256, seed=1))
    cases["fp8"] = BLOCK, lambda a, s, c: ops.grouped_gemm_fp8(*quantise_rows(a), *w_fp8, s, c, F32)
    return cases


@pytest.mark.parametrize("case", forwards())
def test_a_row_does_not_depend_on_the_rows_beside_it(case: str, path: str) -> None:
    align, run = forwards()[case]
    a = normal(70, 256)
    batch = run(torch.nn.functional.pad(a, (0, 0, 0, -70 % align)), *groups([70], align))[:70]
    for rows in (*range(1, 20), 33, 64, 69) if path == "portable" else range(1, 71):
        some = torch.nn.functional.pad(a[70 - rows :], (0, 0, 0, -rows % align))
        assert torch.equal(run(some, *groups([rows], align))[:rows], batch[70 - rows :]), rows


def test_results_do_not_depend_on_threads() -> None:
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(everything())
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def everything() -> list[Tensor]:
    """Every op once, at a size that more than one thread takes part in."""
    starts, counts = groups([200, 0, 130, 700], BLOCK)
    rows = int(starts[-1])
    results = []
    for dtype in (BF16, F32):
        a, g, w = normal(rows, 384, dtype=dtype), normal(rows, 256, dtype=dtype), normal(4, 256, 384, dtype=dtype)
        d_w = torch.zeros(4, 256, 384)
        ops.grouped_gemm_weight(g, a, starts, counts, d_w)
        results += [ops.grouped_gemm(a, w, starts, counts, False), ops.grouped_gemm(g, w, starts, counts, True), d_w]
        results.append(ops.router_logits(a, w[0]))
        args = head(700, 64, 600, (dtype, dtype))
        outputs = ops.logprobs(*args, 4096)
        slopes = normal(700, seed=4), normal(700, seed=5)
        results += [*outputs, *ops.logprobs_backward(*slopes, *args, *outputs[1:], 4096, True, True)]
    d_w = torch.zeros(4, 256, 384)
    a_columns, g_columns = quantise_columns(normal(rows, 384)), quantise_columns(normal(rows, 256))
    ops.grouped_gemm_weight_fp8(*g_columns, *a_columns, starts, counts, d_w)
    a_rows, w_blocks = quantise_rows(normal(rows, 384)), quantise_blocks(normal(4, 256, 384))
    return [*results, d_w, ops.grouped_gemm_fp8(*a_rows, *w_blocks, starts, counts, BF16)]


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_the_public_op_are_the_references(dtype: torch.dtype, transposed: bool, monkeypatch) -> None:
    starts, counts = groups([3, 0, 40], gap=1)
    results = []
    for backend in ("cpu", "reference"):
        monkeypatch.setenv("PRL_KERNELS", backend)
        a = normal(int(starts[-1]) + 2, 24, dtype=dtype).requires_grad_()
        w = normal(3, *((24, 37) if transposed else (37, 24)), dtype=dtype, seed=1).requires_grad_()
        out = gg.grouped_gemm(a, w, starts, counts, transposed=transposed)
        out.backward(normal(*out.shape, dtype=dtype, seed=2))
        results.append((out, a.grad, w.grad))
    torch.testing.assert_close(*results, rtol=2e-2 if dtype == BF16 else 1e-5, atol=2e-2 if dtype == BF16 else 1e-5)


HEADS = [(90, 33, 77), (600, 64, 300), (60, 65, 1100)]  # T, D, V


def head(t: int, d: int, v: int, dtypes: tuple[torch.dtype, torch.dtype], scale: float = 1.0) -> tuple[Tensor, ...]:
    """(hidden, weight, labels with some ignored, temperatures)"""
    g = torch.Generator().manual_seed(3)
    labels = torch.randint(0, v, (t,), generator=g)
    labels[::7] = lm_head.IGNORE
    weight = normal(v, d, seed=1) * scale / d**0.5
    return normal(t, d, dtype=dtypes[0]), weight.to(dtypes[1]), labels, torch.rand(t, generator=g) + 0.5


@pytest.mark.parametrize("scale", [1.0, 6.0])
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, F32), (F32, BF16), (F32, F32)], ids=str)
@pytest.mark.parametrize(("t", "d", "v"), HEADS)
def test_logprobs_and_their_gradients_are_as_exact_as_the_reference(
    t: int, d: int, v: int, dtypes: tuple[torch.dtype, torch.dtype], scale: float
) -> None:
    args = head(t, d, v, dtypes, scale)
    d_out = normal(t, seed=4), normal(t, seed=5)
    results = []
    for forward, backward, dtype in (
        (ops.logprobs, ops.logprobs_backward, None),
        (lm_head._logprobs_reference, lm_head._backward_reference, None),
        (lm_head._logprobs_reference, lm_head._backward_reference, torch.float64),
    ):
        inputs = [x.to(dtype) if dtype and x.is_floating_point() else x for x in args]
        outputs = forward(*inputs, 4096)
        grads = backward(*(g.to(dtype or F32) for g in d_out), *inputs, *outputs[1:], 4096, True, True)
        results.append((*outputs, grads[0], grads[1].to(dtype or dtypes[1])))  # what autograd returns
    names = ("logprob", "entropy", "total", "d_hidden", "d_weight")
    for name, got, reference, exact in zip(names, *results, strict=True):
        small = float(exact.abs().mean()) * torch.finfo(got.dtype).eps / 2
        assert got.dtype == reference.dtype and got.shape == reference.shape and got.is_contiguous()
        assert error(got, exact) <= 1.5 * max(error(reference, exact), small), name


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_a_token_does_not_depend_on_the_tokens_beside_it(dtype: torch.dtype) -> None:
    hidden, weight, labels, temperature = head(70, 64, 1100, (dtype, dtype))
    batch = ops.logprobs(hidden, weight, labels, temperature, 4096)
    for rows in (1, 2, 5, 6, 7, 13, 64, 69):
        some = ops.logprobs(
            *(x[70 - rows :].contiguous() if x is not weight else x for x in (hidden, weight, labels, temperature)), 7
        )
        assert all(torch.equal(a, b[70 - rows :]) for a, b in zip(some, batch, strict=True)), rows


def test_ignored_tokens_have_no_part_in_anything() -> None:
    for dtype in (BF16, F32):
        hidden, weight, labels, temperature = head(40, 33, 77, (dtype, dtype))
        ignored = labels == lm_head.IGNORE
        hidden[ignored], temperature[ignored] = torch.nan, 0
        outputs = ops.logprobs(hidden, weight, labels, temperature, 4096)
        assert all(x[ignored].eq(0).all() and x.isfinite().all() for x in outputs)
        ones = torch.ones(40)
        d_hidden, d_weight = ops.logprobs_backward(
            ones, ones, hidden, weight, labels, temperature, *outputs[1:], 4096, True, True
        )
        assert d_hidden[ignored].eq(0).all() and d_hidden.isfinite().all() and d_weight.isfinite().all()
        none = torch.full_like(labels, lm_head.IGNORE)
        d_hidden, d_weight = ops.logprobs_backward(ones, ones, hidden, weight, none, temperature, ones, ones, 4096, True, True)
        assert d_hidden.eq(0).all() and d_weight.eq(0).all() and d_weight.shape == (77, 33)


def test_only_the_gradients_that_are_wanted_are_made() -> None:
    hidden, weight, labels, temperature = head(40, 33, 77, (BF16, BF16))
    saved = ops.logprobs(hidden, weight, labels, temperature, 4096)[1:]
    slopes = normal(40, seed=4), normal(40, seed=5)
    both = ops.logprobs_backward(*slopes, hidden, weight, labels, temperature, *saved, 4096, True, True)
    for want in ((True, False), (False, True)):
        grads = ops.logprobs_backward(*slopes, hidden, weight, labels, temperature, *saved, 4096, *want)
        for grad, of_both, wanted in zip(grads, both, want, strict=True):
            assert torch.equal(grad, of_both) if wanted else grad.shape == (0, 0)
    parts = [(slopes[0], None), (None, slopes[1])]
    for got, want in zip(
        *(
            [f(*part, hidden, weight, labels, temperature, *saved, 4096, True, True)[1] for part in parts]
            for f in (ops.logprobs_backward, lm_head._backward_reference)
        ),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=0.02)


def test_unlikely_and_infinite_logits() -> None:
    hidden = torch.tensor([[1.0], [300.0], [torch.inf], [torch.nan]])
    weight = torch.tensor([[1.0], [0.0], [-1.0], [2.0]])
    labels, ones = torch.tensor([0, 2, 0, 0]), torch.ones(4)
    logprob, entropy, total = ops.logprobs(hidden, weight, labels, ones, 4096)
    wanted = lm_head._logprobs_reference(hidden[:2].double(), weight.double(), labels[:2], ones[:2].double(), 4096)
    torch.testing.assert_close((logprob[:2], entropy[:2], total[:2]), tuple(x.float() for x in wanted))
    assert logprob[2:].isnan().all() and entropy[2:].isnan().all()
    grads = ops.logprobs_backward(
        ones[:2], ones[:2], hidden[:2], weight, labels[:2], ones[:2], entropy[:2], total[:2], 1, True, True
    )
    assert all(g.isfinite().all() for g in grads)


@settings(max_examples=25, deadline=None)
@given(
    t=st.integers(0, 30),
    d=st.integers(0, 20),
    v=st.integers(1, 150),
    chunk=st.integers(1, 40),
    dtypes=st.tuples(*[st.sampled_from([BF16, F32])] * 2),
)
def test_the_lm_head_and_its_gradients_are_the_references(
    t: int, d: int, v: int, chunk: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    hidden, weight, labels, temperature = head(t, max(d, 1), v, dtypes)
    hidden, weight = hidden[:, :d].contiguous(), weight[:, :d].contiguous()
    results = []
    for backend in ("cpu", "reference"):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PRL_KERNELS", backend)
            logprob, entropy = lm_head.logprobs(h, w, labels, temperature, chunk=chunk)
            grads = torch.autograd.grad((logprob * 0.7 - entropy * 0.3).sum(), (h, w))
        results.append((logprob, entropy, *(g.float() for g in grads)))
    loose = BF16 in dtypes
    torch.testing.assert_close(*results, rtol=2e-2 if loose else 1e-4, atol=2e-2 if loose else 1e-5)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_groups_and_values(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(0, 40), max_size=5))
    n, k = data.draw(st.integers(0, 140)), data.draw(st.integers(0, 70))
    dtype, transposed = data.draw(st.sampled_from([BF16, F32])), data.draw(st.booleans())
    starts, held_counts = groups(counts, gap=data.draw(st.integers(0, 3)))
    rows = int(starts[-1]) + data.draw(st.integers(0, 3))
    scale = data.draw(st.sampled_from([0.0, 1e-30, 1.0, 1e15]))
    a = normal(rows, k, dtype=dtype) * scale
    w = normal(len(counts), *((k, n) if transposed else (n, k)), dtype=dtype, seed=1)
    if a.numel():
        special = data.draw(st.sampled_from([None, torch.nan, torch.inf]))
        row = data.draw(st.integers(0, rows - 1))
        if special is not None:
            a[row, data.draw(st.integers(0, k - 1))] = special
    got = ops.grouped_gemm(a, w, starts, held_counts, transposed)
    wanted = gg._gemm_reference(a.double(), w.double(), starts, held_counts, transposed)
    finite = wanted.isfinite()
    assert torch.equal(finite, got.isfinite()) and torch.equal(wanted.isnan(), got.isnan())
    tolerance = (1e-2 if dtype == BF16 else 1e-5) * scale * max(k, 1) ** 0.5
    assert ((got.double() - wanted)[finite].abs() <= tolerance * 3).all()


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(0, 200), max_size=4),
    n=st.sampled_from([0, 128, 256]),
    k=st.sampled_from([0, 128, 384]),
    scale=st.sampled_from([0.0, 1e-30, 1.0, 1e15]),
    special=st.sampled_from([None, torch.nan, torch.inf]),
    where=st.integers(0, 10**6),
)
def test_any_fp8_groups_and_values(counts: list[int], n: int, k: int, scale: float, special: float | None, where: int) -> None:
    a, g, starts, held_counts = fp8_operands(counts, n, k)
    a *= scale
    if special is not None and sum(counts) and k:  # in a row that is some group's
        a[held(starts, held_counts, len(a)).nonzero()[where % sum(counts), 0], where % k] = special
    w_fp8 = quantise_blocks(normal(len(counts), n, k, seed=2))
    rows = (*quantise_rows(a), *w_fp8, starts, held_counts, F32)
    columns = (*quantise_columns(g), *quantise_columns(a), starts, held_counts)
    close = {"rtol": 1e-4, "atol": 1e-4 * max(scale, 1e-30) * max(k, 1) ** 0.5, "equal_nan": True}
    torch.testing.assert_close(ops.grouped_gemm_fp8(*rows), gg._fp8_reference(*rows), **close)
    got, wanted = torch.ones(2, len(counts), n, k)
    ops.grouped_gemm_weight_fp8(*columns, got)
    gg._weight_fp8_reference(*columns, wanted)
    torch.testing.assert_close(got, wanted, **close)
