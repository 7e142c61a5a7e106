"""The CPU kernels other than GEMMs against the reference, on both paths: AVX-512 where the processor has it, and portable."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import prl.kernels.experts  # noqa: F401 (the ops)
from prl.bench.cases import (
    Outputs,
    awkward,
    check,
    exact_scores,
    exactly,
    normal,
    outputs,
    route_slopes,
    same,
    scores_of,
    scorings,
    ulps,
    within,
)
from prl.kernels import indexer, permute, quantise, registry, router, swiglu
from prl.kernels.numerics import FP8

pytestmark = pytest.mark.skipif(registry.unavailable("cpu") is not None, reason=str(registry.unavailable("cpu")))

examples = settings(max_examples=25, deadline=None)
dtypes = st.sampled_from([torch.bfloat16, torch.float32])
seeds = st.integers(0, 2**16)
ID_TYPES = (torch.uint8, torch.uint16, torch.int16, torch.int32, torch.int64)


def run(op: str, *args: object) -> Outputs:
    """The results of the op, checked to be the same bits on both paths and to leave the arguments alone."""
    before = [a.clone() if isinstance(a, Tensor) else a for a in args]
    function = getattr(torch.ops.prl_cpu, op)
    results = []
    try:
        for portable in (False, True):
            torch.ops.prl_cpu.force_portable(portable)
            results.append(outputs(function(*args)))
    finally:
        torch.ops.prl_cpu.force_portable(False)
    exactly(results[1], results[0])
    assert all(same(a, b) for a, b in zip(args, before, strict=True) if isinstance(a, Tensor)), "an argument was written to"
    return results[0]


def reference(op: str, *args: object) -> Outputs:
    return outputs(registry._OPS[op].reference(*args))


def agree(op: str, *args: object) -> Outputs:
    """`run`, checked to be what the reference says, bit for bit."""
    got, want = run(op, *args), reference(op, *args)
    assert [(g.shape, g.dtype, g.is_contiguous()) for g in got] == [(w.shape, w.dtype, True) for w in want]
    exactly(got, want)
    return got


def values(kind: str, *shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    if kind == "awkward":
        return awkward("cpu", *shape, dtype=dtype, seed=seed)
    if kind == "codes":  # every float8 value, those halfway between two of them, and their neighbours
        grid = torch.arange(127, dtype=torch.uint8).view(FP8).float()
        grid = torch.cat((grid, (grid[1:] + grid[:-1]) / 2))
        grid = torch.cat((grid, grid.nextafter(torch.zeros(1)), grid.nextafter(torch.full((1,), 500.0))))
        n = torch.Size(shape).numel()
        x = grid[torch.randint(len(grid), (n,), generator=torch.Generator().manual_seed(seed))].view(shape)
        if n:
            x[..., 0] = 448  # so that the scale of a row is 1
        return (x * torch.where(normal("cpu", *shape, seed=seed) < 0, -1, 1)).to(dtype)
    x = normal("cpu", *shape, seed=seed)
    return (x.masked_fill_(x.abs() < 0.7, 0) if kind == "sparse" else x).to(dtype)


kinds = st.sampled_from(["normal", "sparse", "codes", "awkward"])


def layout(tokens: int, k: int, n_experts: int, align: int, seed: int, absent: float = 0.2, skew: bool = False) -> tuple:
    """(ids, source, position) of ids that may repeat, be −1, and all go to one expert."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(max(n_experts, 1), (tokens, k), generator=g)
    ids = torch.where(torch.rand(tokens, k, generator=g) < (0.8 if skew else 0), 0, ids)
    ids = torch.where(torch.rand(tokens, k, generator=g) < (absent if n_experts else 2), -1, ids)
    source, position, *_ = permute._sort_reference(ids, n_experts, align)
    return ids, source, position


# Quantisers


@given(st.integers(0, 3), st.integers(0, 3), dtypes, kinds, st.booleans(), seeds)
@examples
def test_quantisers(m, k, dtype, kind, pow2, seed):
    x = values(kind, 128 * m, 128 * k, dtype=dtype, seed=seed)
    both = agree("quantise_both", x, pow2)
    exactly(run("quantise_rows", x, pow2) + run("quantise_columns", x, pow2), both)
    agree("quantise_rows", x[: 128 * m * 2 // 3].contiguous(), pow2)
    agree("quantise_columns", x[:, : 128 * k * 2 // 3].contiguous(), pow2)
    agree("quantise_blocks", torch.stack((x, x.flip(0))), pow2)


def test_every_float_of_a_few_binades_is_rounded_as_torch_does():
    bits = torch.arange(0x3A000000, 0x43E00000, 1019, dtype=torch.int32)  # 2^-11 to 448
    x = torch.cat((bits, bits + 0x0007FFFF & ~0xFFFFF | 0x80000)).view(torch.float32)  # and ties
    x = torch.cat((x, -x)).clamp(-448, 448)
    x = torch.nn.functional.pad(x, (0, -len(x) % 127)).view(-1, 127)
    x = torch.nn.functional.pad(x, (1, 0), value=448.0)
    codes, scales = run("quantise_rows", x, False)
    assert (scales == 1).all()
    exactly((codes,), (x.to(FP8),))


@given(st.integers(0, 2), st.integers(0, 150), st.integers(0, 300), seeds)
@examples
def test_transposed_codes(e, n, k, seed):
    codes = torch.randint(256, (e, n, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)).view(FP8)
    agree("transpose_codes", codes)


# Movement of rows


@given(st.integers(0, 40), st.integers(1, 8), st.integers(0, 9), st.sampled_from([1, 3, 128]), st.booleans(), seeds)
@examples
def test_sorted_rows(tokens, k, n_experts, align, skew, seed):
    ids, *_ = layout(tokens, k, n_experts, align, seed, skew=skew)
    agree("sort_rows", ids, n_experts, align)


@given(st.integers(0, 40), st.integers(1, 9), st.integers(0, 9), st.integers(0, 150), dtypes, kinds, seeds)
@examples
def test_rows_moved_and_combined(tokens, k, n_experts, width, dtype, kind, seed):
    _, source, position = layout(tokens, k, n_experts, 4, seed)
    agree("permute", values(kind, tokens, width, dtype=dtype, seed=seed), source, position)
    rows = values(kind, len(source), width, dtype=dtype, seed=seed + 1)
    weights = values("sparse", tokens, k, dtype=torch.float32, seed=seed + 2)
    agree("combine", rows, weights, source, position)
    agree("combine", rows, None, source, position)


@given(st.integers(0, 40), st.integers(1, 9), st.integers(0, 9), st.integers(0, 150), dtypes, seeds)
@examples
def test_the_gradients_of_the_combination(tokens, k, n_experts, width, dtype, seed):
    _, source, position = layout(tokens, k, n_experts, 4, seed)
    d_out, rows = (values("normal", n, width, dtype=dtype, seed=seed + n) for n in (tokens, len(source)))
    args = (d_out, rows, values("sparse", tokens, k, dtype=torch.float32, seed=seed), source, position)
    (d_rows, d_weights), (want_rows, want_weights) = run("combine_backward", *args), reference("combine_backward", *args)
    exactly((d_rows,), (want_rows,))
    torch.testing.assert_close(d_weights, want_weights, rtol=1e-5, atol=1e-5 * max(width, 1) ** 0.5)


@given(st.integers(0, 70), st.integers(1, 8), st.integers(0, 5), st.integers(0, 2), dtypes, kinds, st.booleans(), seeds)
@examples
def test_rows_quantised_as_they_are_moved(tokens, k, n_experts, blocks, dtype, kind, pow2, seed):
    _, source, position = layout(tokens, k, n_experts, 128, seed, skew=True)
    x = values(kind, tokens, 128 * blocks, dtype=dtype, seed=seed)
    for columns in (False, True):
        agree("permute_quantise", x, source, position, columns, pow2)


@pytest.mark.parametrize("op", ["permute", "permute_quantise", "combine", "combine_backward"])
def test_a_layout_of_another_op_is_refused(op):
    _, source, position = layout(100, 2, 3, 128, 0)
    x, rows, weights = torch.randn(100, 128), torch.randn(len(source), 128), torch.randn(100, 2)
    call = {
        "permute": lambda s, p: permute.permute(x, s, p),
        "permute_quantise": lambda s, p: permute.permute_quantise(x, s, p, columns=False),
        "combine": lambda s, p: permute.combine(rows, weights, s, p),
        "combine_backward": lambda s, p: permute._combine_backward_op(x, rows, weights, s, p),
    }[op]
    call(source, position)
    beyond = "source_R" if op == "permute" else "position_TK"
    with pytest.raises(RuntimeError, match=f"{op}: {beyond} must be -1 to"):
        call(*(torch.where(t == t.max(), 10**6, t) for t in (source, position)))
    if op in ("permute_quantise", "combine_backward"):
        with pytest.raises(RuntimeError, match=f"{op}: source_R and position_TK must be of one sort_rows"):
            call(source, position.flip(0).contiguous())


def test_an_expert_that_is_not_there_is_refused():
    with pytest.raises(RuntimeError, match="sort_rows: ids_TK must be -1 to 2, got 3"):
        permute.sort_rows(torch.tensor([[0, 3]]), 3)


# SwiGLU


@given(st.integers(0, 20), st.integers(0, 70), st.floats(0.1, 30), seeds)
@examples
def test_swiglu_is_within_four_units(rows, width, scale, seed):
    gate_up = values("normal", rows, 2 * width, dtype=torch.float32, seed=seed) * scale
    (got,), (want,) = run("swiglu", gate_up), reference("swiglu", gate_up)
    assert (ulps(got, want) <= 4).all()
    half = gate_up.bfloat16()
    exactly(run("swiglu", half), (run("swiglu", half.float())[0].bfloat16(),))


def test_swiglu_over_all_magnitudes():
    gate = torch.arange(0, 2**31 - 2**23, 4111, dtype=torch.int64).to(torch.int32).view(torch.float32)
    gate = torch.cat((gate, -gate, torch.linspace(-110, 110, 40001), torch.tensor([torch.inf, -torch.inf, torch.nan])))
    gate_up = torch.stack((gate, torch.ones_like(gate)), 1)
    (got,), (want,) = run("swiglu", gate_up), reference("swiglu", gate_up)
    tiny = (gate < -87.3) & (gate > -89)  # the sigmoid is denormal, so that one unit of it is many of the product
    assert (ulps(got[~tiny], want[~tiny]) <= 4).all()
    torch.testing.assert_close(got[tiny], want[tiny], rtol=0, atol=1e-42)


@given(st.integers(0, 20), st.integers(0, 70), dtypes, seeds)
@examples
def test_the_gradient_of_swiglu(rows, width, dtype, seed):
    gate_up, grad = (values("normal", rows, n, dtype=dtype, seed=seed + n) for n in (2 * width, width))
    (got,), (want,) = run("swiglu_backward", gate_up, grad), reference("swiglu_backward", gate_up.double(), grad.double())
    torch.testing.assert_close(got.double(), want, rtol=4e-3 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


@given(st.integers(0, 2), st.integers(0, 2), dtypes, st.booleans(), seeds)
@examples
def test_swiglu_quantised_is_its_product_quantised(r, blocks, dtype, pow2, seed):
    rows, width = 128 * r, 128 * blocks
    gate_up, grad = (values("normal", rows, n, dtype=dtype, seed=seed + n) * 3 for n in (2 * width, width))
    gate_up[rows // 2 :] *= 1e-18
    weights = values("sparse", rows, dtype=torch.float32, seed=seed)
    (product,) = run("swiglu", gate_up.float())
    exactly(run("swiglu_quantise", gate_up, True, pow2), reference("quantise_both", product, pow2))
    part = gate_up[: rows // 3].contiguous()
    exactly(run("swiglu_quantise", part, False, pow2)[:2], reference("quantise_rows", product[: rows // 3], pow2))

    *got, d_weights = run("swiglu_backward_quantise", gate_up, grad, weights, pow2)
    (slopes,) = run("swiglu_backward", gate_up.float(), grad.float() * weights[:, None])
    want = reference("quantise_both", slopes, pow2) + reference("quantise_columns", product * weights[:, None], pow2)
    exactly(tuple(got), want)
    want_weights = (grad.double() * product.double()).sum(1)
    torch.testing.assert_close(d_weights.double(), want_weights, rtol=1e-5, atol=1e-3)


# The router


ROUTER = {op: functools.partial(run, op) for op in ("route", "route_backward")}


def own_scores(logits: Tensor, scoring: str) -> Tensor:
    return scores_of(ROUTER["route"], logits, scoring)


@given(st.integers(0, 20), st.integers(1, 300), st.floats(0.1, 30), seeds)
@examples
def test_scores_are_within_four_units(tokens, experts, scale, seed):
    logits = values("normal", tokens, experts, dtype=torch.float32, seed=seed) * scale
    for scoring in ("sigmoid", "softmax"):
        want = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
        within(4, exact_scores(logits, scoring))((own_scores(logits, scoring),), (want,))


@pytest.mark.parametrize("sizes", [(30, 20, 3), (70, 256, 8), (9, 16, 4), (5, 300, 280), (1, 1, 1), (0, 8, 2)])
def test_scores_choice_and_gradient_of_logits(sizes):
    for case in scorings("cpu", *sizes):
        check(case, ROUTER)


@st.composite
def routing(draw) -> tuple:
    """Arguments of `route`: few distinct scores, so that there are ties; NaN and infinities among them at times."""
    tokens, groups = draw(st.integers(0, 12)), draw(st.sampled_from([1, 1, 2, 3, 4]))
    experts = groups * draw(st.sampled_from([1, 2, 5, 16, 67]))
    kept = draw(st.integers(1, groups))
    k = draw(st.integers(1, min(experts * kept // groups, 9)))
    g = torch.Generator().manual_seed(draw(seeds))
    scores = (
        torch.randint(-3, 4, (tokens, experts), generator=g) / 4 * torch.where(torch.rand(experts, generator=g) < 0.5, 1, -1)
    )
    if draw(st.booleans()):
        odd = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])[torch.randint(4, scores.shape, generator=g)]
        scores = torch.where(torch.rand(scores.shape, generator=g) < 0.1, odd, scores)
    bias = torch.randint(-2, 3, (experts,), generator=g) / 4 if draw(st.booleans()) else None
    recorded = None
    if draw(st.booleans()):
        dtype = draw(st.sampled_from(ID_TYPES))
        known = min(experts, torch.iinfo(dtype).max + 1)
        recorded = torch.randint(known, (tokens, k), generator=g)
        if draw(st.booleans()):
            recorded = torch.rand(tokens, known, generator=g).topk(k).indices
    routed, padding = (torch.rand(tokens, generator=g) < p if draw(st.booleans()) else None for p in (0.7, 0.3))
    if recorded is not None:
        if routed is not None:
            recorded[~routed] = torch.iinfo(dtype).max  # not looked at
        recorded = recorded.to(dtype)
    return scores, bias, recorded, routed, padding, k, groups, kept, draw(st.booleans()), draw(st.sampled_from([1.0, 2.5]))


@given(routing(), st.sampled_from(router.SCORINGS))
@settings(max_examples=200, deadline=None)
def test_routes(args, scoring):
    """All that follows from the scores is as in the reference, bit for bit."""
    logits, *rest = args
    scores = logits if scoring == "none" else own_scores(logits, scoring)
    exactly(run("route", logits, scoring, *rest), reference("route", scores, "none", *rest))


@pytest.mark.parametrize("experts", [1, 15, 16, 17, 256, 257, 1000])
def test_the_best_of_many_experts(experts):
    scores = normal("cpu", 30, experts).sigmoid()
    agree("route", scores, "none", normal("cpu", experts, seed=1), None, None, None, min(experts, 8), 1, 1, True, 2.5)
    ids, *_ = run("route", scores, "none", None, None, None, None, experts, 1, 1, False, 1.0)
    assert torch.equal(ids, scores.sort(dim=1, descending=True, stable=True).indices)


@given(routing(), seeds)
@examples
def test_the_gradient_of_routes(args, seed):
    logits, *_, k, _, _, _, _ = args
    logits = values("normal", *logits.shape, dtype=torch.float32, seed=seed)
    ids = torch.randint(logits.shape[1], (len(logits), k), generator=torch.Generator().manual_seed(seed))  # they may repeat
    for case in route_slopes(values("normal", len(logits), k, dtype=torch.float32, seed=seed + 1), logits, ids):
        check(case, ROUTER)


@given(st.integers(0, 9), st.integers(0, 3), st.integers(1, 9), st.sampled_from(ID_TYPES), st.booleans(), seeds)
@settings(max_examples=60, deadline=None)
def test_inspected_routes(tokens, layers, k, dtype, masked, seed):
    g = torch.Generator().manual_seed(seed)
    routes = torch.randint(-1 if dtype.is_signed and seed % 2 else 0, 66, (tokens, layers, k), generator=g).to(dtype)
    routed = torch.rand(tokens, generator=g) < 0.5 if masked else None
    agree("inspect_routes", routes, routed, 64 + seed % 3)


# The indexer


@given(st.integers(0, 2), st.integers(0, 3), st.integers(1, 6), st.integers(1, 70), st.integers(1, 20), dtypes, seeds)
@examples
def test_index_scores(batch, queries, heads, keys, width, dtype, seed):
    q = values("normal", batch, queries, heads, width, dtype=dtype, seed=seed)
    k = values("normal", batch, keys, width, dtype=dtype, seed=seed + 1)
    weights = values("normal", batch, queries, heads, dtype=dtype, seed=seed + 2)
    (got,), (want,) = run("index_scores", q, k, weights), reference("index_scores", q.double(), k.double(), weights.double())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-5)


@given(st.integers(0, 3), st.integers(1, 90), st.integers(1, 95), st.sampled_from([0.0, 0.5, 1.0]), st.booleans(), seeds)
@settings(max_examples=100, deadline=None)
def test_index_selection(queries, keys, top_k, ties, odd, seed):
    g = torch.Generator().manual_seed(seed)
    scores = torch.where(torch.rand(2, queries, keys, generator=g) < ties, 0.0, torch.randn(2, queries, keys, generator=g))
    if odd:
        special = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 1e-45])
        special = special[torch.randint(5, scores.shape, generator=g)]
        scores = torch.where(torch.rand(scores.shape, generator=g) < 0.2, special, scores)
    mask = torch.rand(scores.shape, generator=g) < 0.7
    mask[..., keys * 4 // 5 :] &= bool(seed % 2)
    agree("index_select", scores, mask, top_k)
    agree("index_select", scores, torch.ones_like(mask), top_k)


def test_selection_among_many_keys():
    scores = torch.randn(1, 4, 5000, generator=torch.Generator().manual_seed(0)).relu_()
    mask = torch.ones(4, 5000, dtype=torch.bool).tril(3000).expand(1, 4, -1).contiguous()
    for top_k in (1, 600, 2048, 2999):
        (selected,) = agree("index_select", scores, mask, top_k)
        assert (selected.sum(-1) == top_k).all()


# What else rests on them


def test_a_row_does_not_depend_on_the_others():
    """Everything that is part of a forward, one row at a time and all together, at places that are no multiple of a vector."""
    g = torch.Generator().manual_seed(0)
    gate_up, logits = torch.randn(37, 2 * 128, generator=g), torch.randn(37, 75, generator=g) * 9
    q, keys, weights = (
        torch.randn(1, 37, 5, 24, generator=g),
        torch.randn(1, 300, 24, generator=g),
        torch.randn(1, 37, 5, generator=g),
    )

    def forward(rows: slice) -> list[Tensor]:
        def route(scoring: str, recorded: Tensor | None) -> Tensor:
            return run("route", logits[rows].contiguous(), scoring, None, recorded, None, None, 6, 1, 1, True, 2.5)[1]

        replayed = torch.arange(6).expand(len(logits[rows]), 6).contiguous()

        return [
            run("swiglu", gate_up[rows, 1:121].contiguous())[0],
            run("swiglu_quantise", gate_up[rows].contiguous(), False, False)[0].view(torch.uint8),
            *(route(scoring, recorded) for scoring in ("sigmoid", "softmax") for recorded in (None, replayed)),
            run("index_scores", q[:, rows].contiguous(), keys, weights[:, rows].contiguous())[0][0],
        ]

    together = forward(slice(0, 37))
    for row in (0, 1, 17, 36):
        for one, all_rows in zip(forward(slice(row, row + 1)), together, strict=True):
            assert torch.equal(one[0], all_rows[row])
    shorter = run("index_scores", q, keys[:, :90].contiguous(), weights)[0]
    assert torch.equal(shorter, together[-1][None, :, :90]), "nor does a key's score depend on the other keys"


def test_threads_change_nothing():
    _, source, position = layout(700, 4, 6, 128, 0)
    x, weights = torch.randn(700, 256), torch.rand(700, 4)
    rows, gate_up = torch.randn(len(source), 256), torch.randn(256, 2 * 1024)
    logits, padding = torch.randn(700, 64), torch.rand(700) < 0.2
    calls = {
        "quantise_both": (gate_up, False),
        "quantise_blocks": (gate_up.view(2, 128, -1), False),
        "permute": (x, source, position),
        "permute_quantise": (x, source, position, True, False),
        "combine": (rows, weights, source, position),
        "combine_backward": (x, rows, weights, source, position),
        "swiglu_quantise": (gate_up, True, False),
        "swiglu_backward_quantise": (gate_up, gate_up[:, :1024].contiguous(), torch.rand(256), False),
        "route": (logits, "softmax", None, torch.randint(64, (700, 4)), None, padding, 4, 1, 1, True, 1.0),
        "route_backward": (torch.rand(700, 4), logits, "sigmoid", torch.randint(64, (700, 4)), True, 1.0),
        "inspect_routes": (torch.randint(66, (700, 8, 4)), padding, 64),
        "index_scores": (torch.randn(1, 300, 4, 32), torch.randn(1, 600, 32), torch.randn(1, 300, 4)),
        "index_select": (torch.randn(1, 300, 600), torch.rand(1, 300, 600) < 0.9, 100),
    }
    one = {op: outputs(getattr(torch.ops.prl_cpu, op)(*args)) for op, args in calls.items()}
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for op, args in calls.items():
            exactly(outputs(getattr(torch.ops.prl_cpu, op)(*args)), one[op])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_through_the_public_functions(dtype, monkeypatch):
    """A router, its replay and the movement of rows, forward and backward, on this backend and on the reference."""
    g = torch.Generator().manual_seed(3)
    x, logits = torch.randn(50, 64, generator=g).to(dtype), torch.randn(50, 12, generator=g)
    recorded = torch.rand(50, 12, generator=g).topk(3).indices.to(torch.uint8)
    out_grad = torch.randn(50, 32, generator=g).to(dtype)

    def gradients(backend: str, scoring: str, replay: bool) -> list[Tensor]:
        monkeypatch.setenv("PRL_KERNELS", backend)
        leaves = [x.clone().requires_grad_(), logits.clone().requires_grad_()]
        routed = torch.arange(50) % 5 > 0
        routing = router.route(leaves[1], None, recorded if replay else None, routed, None, scoring=scoring, top_k=3, scale=2.5)
        source, position, *_ = permute.sort_rows(routing.ids_TK, 12)
        rows = swiglu.swiglu(permute.permute(leaves[0], source, position))
        permute.combine(rows, routing.weights_TK, source, position).backward(out_grad)
        return [leaf.grad for leaf in leaves]

    for scoring in ("sigmoid", "softmax"):
        for replay in (False, True):
            for got, want in zip(*(gradients(b, scoring, replay) for b in ("cpu", "reference")), strict=True):
                tolerance = 2e-2 if got.dtype == torch.bfloat16 else 1e-4 if dtype == torch.float32 else 5e-2
                torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_every_op_that_is_not_a_gemm_is_there():
    modules = (quantise, permute, swiglu, router, indexer)
    ops = {op for op in registry._OPS if any(registry._OPS[op].reference.__module__ == m.__name__ for m in modules)}
    assert ops - {"router_logits"} <= registry.functions("cpu").keys() and len(ops) > 15
