"""Run by `test_triton_glue.py` with TRITON_INTERPRET=1: big tiles and few of them, for a program takes milliseconds here."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import prl_triton
from prl.bench import cases
from prl.kernels.experts import experts
from prl.kernels.numerics import calc_diff
from prl_triton import configs

BIG = dict.fromkeys(("permute", "combine_backward", "swiglu", "swiglu_backward"), "ROWS")
BIG |= dict.fromkeys(("combine", "route", "route_backward"), "TOKENS")
for op, size in BIG.items():
    configs._table()[op][size] = 64  # results do not depend on tiles, the time here does

torch.use_deterministic_algorithms(True)  # fills new memory with NaN and its like: what no kernel writes shows

BF16, F32 = torch.bfloat16, torch.float32


def glue() -> Iterator[cases.Case]:
    for dtype in (BF16, F32):
        for make in (cases.normal, cases.awkward):
            yield from cases.quantisers("cpu", 256, 256, dtype, make)
    for shape in ((0, 128), (128, 0)):
        yield from cases.quantisers("cpu", *shape, F32)
    for shape in ((2, 128, 256), (3, 37, 200), (0, 128, 128), (2, 0, 128)):
        yield from cases.transposes("cpu", *shape)
    for sizes in ((70, 8, 20), (40, 2, 3), (7, 3, 0), (0, 8, 5), (5, 0, 4)):
        yield from cases.sorts("cpu", *sizes)
    for sizes in ((50, 3, 2, 256), (9, 3, 1, 100), (3, 2, 0, 128), (0, 2, 3, 128), (3, 0, 2, 128)):
        for dtype in (BF16, F32):
            yield from cases.movements("cpu", *sizes, dtype)
    for dtype in (BF16, F32):
        for sizes in ((128, 256), (37, 128), (5, 100), (0, 128), (128, 0)):
            yield from cases.swiglus("cpu", *sizes, dtype)
    for sizes in ((30, 20, 3), (1, 1, 1), (0, 8, 2)):
        yield from cases.scorings("cpu", *sizes)
    for sizes in ((30, 20, 3), (12, 24, 4, 4, 2), (9, 6, 2, 6, 3), (1, 1, 1), (0, 4, 2)):
        yield from cases.routings("cpu", *sizes)
    yield from cases.routings("cpu", 12, 10, 10, dtype=torch.int16)
    for ids in (torch.uint8, torch.uint16, torch.int32, torch.int64):
        yield from cases.inspections("cpu", 30, 3, 5, ids)
    for sizes in ((0, 3, 2), (3, 0, 2), (3, 2, 1)):
        yield from cases.inspections("cpu", *sizes, torch.uint8)
    for dtype in (BF16, F32):
        for sizes in ((2, 70, 40, 3, 20), (1, 1, 130, 2, 64), (1, 3, 5, 0, 8), (2, 0, 3, 2, 8), (1, 2, 0, 2, 8)):
            yield from cases.indexes("cpu", *sizes, dtype)
    for selection in ((9, 100, 7), (9, 300, 40), (3, 5, 5), (0, 9, 3), (3, 0, 2), (8, 2, 1)):
        yield from cases.selections("cpu", *selection)


@pytest.mark.parametrize("case", list(glue()), ids=str)
def test_agrees_with_the_reference(case: cases.Case) -> None:
    cases.check(case, prl_triton.OPS)


def test_every_shipped_configuration_is_compiled_to_be_checked() -> None:
    compiled = [aot.name for aot in prl_triton.AOT]
    assert not [op for op in configs._table() if not any(name.startswith(f"{op}.") for name in compiled)]


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2), st.integers(0, 2), st.sampled_from([BF16, F32]), st.integers(0, 999), st.booleans())
def test_any_values_are_quantised_alike(m: int, k: int, dtype: torch.dtype, seed: int, pow2: bool) -> None:
    x = cases.awkward("cpu", 128 * m, 128 * k, dtype=dtype, seed=seed)
    x = torch.where(torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) < 0.3, 0, x)
    cases.check(cases.Case("quantise_both", "fuzz", (x, pow2), cases.exactly), prl_triton.OPS)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 40), st.integers(1, 5), st.integers(0, 9), st.integers(1, 40), st.integers(1, 9), st.integers(0, 999))
def test_any_routes_move_rows_alike(tokens: int, k: int, experts: int, width: int, align: int, seed: int) -> None:
    routes = cases.ids("cpu", tokens, k, experts, seed=seed)
    cases.check(cases.Case("sort_rows", "fuzz", (routes, experts, align), cases.exactly), prl_triton.OPS)
    source, position, _, _ = prl_triton.OPS["sort_rows"](routes, experts, align)
    x = cases.awkward("cpu", tokens, width, dtype=BF16, seed=seed)
    cases.check(cases.Case("permute", "fuzz", (x, source, position), cases.exactly), prl_triton.OPS)
    rows, weights = cases.normal("cpu", len(source), width, seed=seed), cases.normal("cpu", tokens, k, seed=seed)
    cases.check(cases.Case("combine", "fuzz", (rows, weights, source, position), cases.exactly), prl_triton.OPS)


@settings(max_examples=8, deadline=None)
@given(st.data(), st.integers(1, 12), st.integers(1, 3), st.integers(1, 5), st.integers(0, 999))
def test_any_tokens_are_routed_alike(data: st.DataObject, tokens: int, groups: int, size: int, seed: int) -> None:
    kept = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, kept * size))
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-2, 3, (tokens, groups * size), generator=generator) / 2
    scores[torch.rand(scores.shape, generator=generator) < 0.1] = data.draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
    recorded = torch.randint(groups * size, (tokens, top_k), generator=generator)
    routed, padding = torch.rand(2, tokens, generator=generator) < 0.5
    optional = [data.draw(st.sampled_from([None, x])) for x in (scores[0].clone(), recorded, routed, padding)]
    args = (scores, "none", *optional, top_k, groups, kept, data.draw(st.booleans()), 1.7)
    cases.check(cases.Case("route", "fuzz", args, cases.exactly), prl_triton.OPS)


def test_a_recorded_id_out_of_range_is_as_none_recorded() -> None:
    """Nobody may wait for the device to look at ids; `check_routes` refuses them before."""
    logits, recorded = cases.normal("cpu", 70, 6), torch.randint(6, (70, 2), generator=torch.Generator().manual_seed(0))
    wrong, routed = recorded.clone(), torch.arange(70) % 5 > 0
    wrong[::5, 0], wrong[::5, 1] = -1, 6
    results = (
        prl_triton.OPS["route"](logits, "sigmoid", None, *replay, None, 2, 1, 1, True, 1.0)
        for replay in ((wrong, None), (recorded, routed))
    )
    cases.exactly(*results)


def test_a_token_does_not_depend_on_the_others() -> None:
    some, ops = torch.tensor([3, 17, 40]), prl_triton.OPS
    x = cases.normal("cpu", 41, 256, dtype=BF16)
    logits = cases.normal("cpu", 41, 24)
    q, keys, weights = cases.normal("cpu", 1, 41, 2, 16), cases.normal("cpu", 1, 9, 16), cases.normal("cpu", 1, 41, 2)
    assert cases.same(ops["swiglu"](x)[some], ops["swiglu"](x[some]))
    for scoring in ("sigmoid", "softmax"):
        args = (scoring, None, None, None, None, 4, 4, 2, True, 2.5)
        of_all, alone = (ops["route"](x, *args)[:2] for x in (logits, logits[some]))
        assert all(cases.same(a[some], b) for a, b in zip(of_all, alone, strict=True))
    for i in range(2):
        of_all, alone = (ops["swiglu_quantise"](r, False, False)[i].view(torch.uint8) for r in (x, x[some]))
        assert torch.equal(of_all[some], alone) if i == 0 else torch.equal(of_all.view(F32)[:, some], alone.view(F32))
    of_all, alone = ops["index_scores"](q, keys, weights), ops["index_scores"](q[:, some], keys, weights[:, some])
    assert cases.same(of_all[:, some].contiguous(), alone)


def test_fp8_experts_on_these_kernels_are_those_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    x, gate_up, down = cases.normal("cpu", 20, 128), cases.normal("cpu", 3, 256, 128), cases.normal("cpu", 3, 128, 128)
    weights, ids = cases.normal("cpu", 20, 2), cases.ids("cpu", 20, 2, 3)
    results = {}
    for backend in ("triton", "reference"):
        monkeypatch.setenv("PRL_KERNELS", backend)
        leaves = [t.clone().requires_grad_() for t in (x, weights, gate_up, down)]
        out = experts(leaves[0], ids, *leaves[1:], precision="fp8")
        out.backward(cases.normal("cpu", 20, 128, seed=9))
        results[backend] = [out, *(t.grad for t in leaves)]
    for got, want in zip(results["triton"], results["reference"], strict=True):
        assert calc_diff(got.detach(), want.detach()) < 1e-5
