"""Choice, replay and padding in one pass, on both backends of this CPU."""

import pytest
import torch

from prl.kernels.checks import ArgumentError
from prl.kernels.router import RouteError, check_routes, route


@pytest.fixture(params=["reference", "cpu"], autouse=True)
def backend(request, monkeypatch):
    monkeypatch.setenv("PRL_KERNELS", request.param)


def scores(t=40, e=16, seed=0):
    return torch.rand(t, e, generator=torch.Generator().manual_seed(seed))


def test_choice_by_hand():
    s = torch.tensor([[0.1, 0.8, 0.8, 0.3], [0.5, 0.5, 0.5, 0.5]])
    bias = torch.tensor([0.9, 0.0, 0.0, 0.0])
    out = route(s, bias, None, None, None, scoring="none", top_k=2, scale=2.0)
    assert out.ids_TK.tolist() == [[0, 1], [0, 1]], "the bias chooses, ties go to the lowest index"
    torch.testing.assert_close(out.weights_TK, torch.tensor([[0.1 / 0.9, 0.8 / 0.9], [0.5, 0.5]]) * 2)
    assert out.counts_E.tolist() == [2, 2, 0, 0]


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_weights_are_the_scores_of_the_logits(scoring):
    """The same for experts that are chosen and for the same replayed."""
    logits = 3 * torch.randn(40, 16, generator=torch.Generator().manual_seed(0))
    exact = torch.sigmoid(logits.double()) if scoring == "sigmoid" else torch.softmax(logits.double(), -1)
    out = route(logits, None, None, None, None, scoring=scoring, top_k=3, normalise=False)
    want = exact.topk(3)
    assert torch.equal(out.ids_TK, want.indices)
    torch.testing.assert_close(out.weights_TK.double(), want.values, rtol=4 * 2**-23, atol=0)
    again = route(logits, None, out.ids_TK.to(torch.uint8), None, None, scoring=scoring, top_k=3, normalise=False)
    assert torch.equal(again.weights_TK, out.weights_TK)


def test_groups_whose_biased_scores_are_negative():
    """Masked experts are never taken, however low the others score."""
    s, bias = scores(e=8), torch.full((8,), -5.0)
    out = route(s, bias, None, None, None, scoring="none", top_k=4, n_group=2, topk_group=1)
    assert ((out.ids_TK < 4).all(1) | (out.ids_TK >= 4).all(1)).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int16, torch.int32, torch.int64])
def test_recorded_ids_are_taken_where_they_are_routed(dtype):
    s = scores()
    own = route(s, None, None, None, None, scoring="sigmoid", top_k=2)
    recorded = torch.stack([torch.randperm(16)[:2] for _ in range(40)])
    routed, padding = torch.arange(40) % 4 > 0, torch.arange(40) > 30
    want = torch.where(routed[:, None], recorded, own.ids_TK)
    recorded[~routed] = 200  # not looked at
    recorded[35] = 16
    out = route(s, None, recorded.to(dtype), routed, padding, scoring="sigmoid", top_k=2)
    assert torch.equal(out.ids_TK[:31], want[:31])
    assert torch.equal(out.counts_E, torch.bincount(want[:31].flatten(), minlength=16))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int16, torch.int32, torch.int64])
def test_a_replayed_id_out_of_range_is_refused(dtype):
    recorded = torch.zeros(4000, 2, dtype=dtype)
    recorded[3999, 1] = 16
    for wrong in (16, -1)[: 1 + dtype.is_signed]:
        recorded[3999, 1] = wrong
        with pytest.raises((ArgumentError, RuntimeError), match=f"route: recorded_TK must be 0 to 15 .*, got {wrong}"):
            route(scores(4000), None, recorded, None, None, scoring="sigmoid", top_k=2)


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax", "none"])
def test_gradients_reach_every_replayed_expert(scoring):
    """float64 runs on the reference: its gradient is checked numerically, the backend's float32 one against it."""
    recorded = torch.tensor([[0, 4]] * 5 + [[2, 2]], dtype=torch.uint8)
    slope = torch.randn(6, 2, generator=torch.Generator().manual_seed(1))
    given = 0.2 + 0.8 * scores(t=6, e=5)  # a gradient's rounding grows with 1 / the sum of its scores

    def weighted(x):
        out = route(x, None, recorded, None, None, scoring=scoring, top_k=2, scale=1.5)
        return (out.weights_TK * slope.to(x.dtype)).sum()

    narrow = given.clone().requires_grad_()
    weighted(narrow).backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PRL_KERNELS")
        exact = given.double().requires_grad_()
        assert torch.autograd.gradcheck(weighted, (exact,))
        weighted(exact).backward()
    torch.testing.assert_close(narrow.grad, exact.grad.float(), rtol=1e-4, atol=1e-6)
    assert (exact.grad[:5][:, [0, 4]] != 0).all()


def test_padding_is_dealt_out_and_not_counted():
    padding = torch.arange(40) >= 20
    out = route(scores(), None, None, None, padding, scoring="none", top_k=2)
    assert torch.equal(out.ids_TK[20:].flatten(), torch.arange(40) % 16)
    assert torch.equal(out.counts_E, torch.bincount(out.ids_TK[:20].flatten(), minlength=16))


def test_routes_that_no_router_can_have_made():
    routes = torch.zeros(4, 3, 2, dtype=torch.uint8)
    routes[..., 1] = 1
    check_routes(routes, None, 8)
    routes[2, 1] = torch.tensor([3, 3], dtype=torch.uint8)
    routes[3, 0] = torch.tensor([3, 9], dtype=torch.uint8)
    with pytest.raises(RouteError, match=r"1 rows with expert ids outside 0…7, 1 rows .* of 12; first at token 2, MoE layer 1"):
        check_routes(routes, None, 8)
    check_routes(routes, torch.tensor([True, True, False, False]), 8)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"scoring": "tanh"}, "scoring must be sigmoid or softmax or none, got tanh"),
        ({"top_k": 0}, "top_k must be 1 to 16, got 0"),
        ({"top_k": 9, "n_group": 2, "topk_group": 1}, "top_k must be 1 to 8, got 9"),
        ({"n_group": 3, "topk_group": 3}, "E must be a multiple of 3, got 16"),
    ],
)
def test_sizes_that_do_not_fit(change, says):
    with pytest.raises(ArgumentError, match=f"route: {says}"):
        route(scores(), None, None, None, None, **({"scoring": "none", "top_k": 2} | change))


def test_a_record_of_another_length_is_refused():
    with pytest.raises(ArgumentError, match=r"route: recorded_TK must be of shape \[40, 2\], got \[39, 2\]"):
        route(scores(), None, torch.zeros(39, 2, dtype=torch.uint8), None, None, scoring="none", top_k=2)
