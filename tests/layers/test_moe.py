"""The MoE layer against a plain loop, and what replay, padding and the correction bias must do."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from prl.kernels.router import RouteError, check_routes
from prl.layers.moe import MoE
from prl.layers.router import MoEConfig, Replay, Router, update_correction_bias

CONFIG = MoEConfig(8, 6, 16, 4, "sigmoid", True, scale=2.5, shared_width=10)


def layer(config=CONFIG, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    moe = MoE(config).to(dtype)
    with torch.no_grad():
        for tensor in moe.state_dict().values():
            tensor.normal_(0, 0.5)
    return moe


def plain(moe, x_TD, ids_TK=None):
    """A loop over tokens and experts, in the words of DeepSeek-V3's section 2.1.2."""
    c = moe.gate.config
    scores = x_TD @ moe.gate.weight.T
    scores = scores.sigmoid() if c.scoring == "sigmoid" else scores.softmax(-1)
    bias = 0 if moe.gate.e_score_correction_bias is None else moe.gate.e_score_correction_bias
    out = []
    for t, x in enumerate(x_TD):
        ids = (scores[t] + bias).topk(c.top_k).indices if ids_TK is None else ids_TK[t]
        total = sum(scores[t, e] for e in ids) if c.normalise else 1.0
        y = torch.zeros_like(x)
        for e in ids:
            gate, up = (moe.experts.gate_up_proj[e] @ x).chunk(2)
            y = y + c.scale * scores[t, e] / total * (moe.experts.down_proj[e] @ (F.silu(gate) * up))
        out.append(y)
    y_TD = torch.stack(out)
    if moe.shared_experts is not None:
        s = moe.shared_experts
        y_TD = y_TD + (F.silu(x_TD @ s.gate_proj.weight.T) * (x_TD @ s.up_proj.weight.T)) @ s.down_proj.weight.T
    return y_TD


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("replayed", [True, False])
def test_values_and_gradients_equal_a_plain_loop(scoring, normalise, replayed):
    moe = layer(MoEConfig(8, 6, 16, 4, scoring, scoring == "sigmoid", normalise=normalise, scale=2.5, shared_width=10))
    x = torch.randn(13, 8, dtype=torch.float64, requires_grad=True)
    ids = torch.stack([torch.randperm(16)[:4] for _ in range(13)]) if replayed else None
    grads = []
    for y in (moe(x, Replay(ids))[0], plain(moe, x, ids)):
        torch.manual_seed(1)
        (y * torch.randn(y.shape, dtype=y.dtype)).sum().backward()
        grads.append([x.grad, *(p.grad for p in moe.parameters())])
        x.grad = None
        moe.zero_grad()
    torch.testing.assert_close(moe(x, Replay(ids))[0], plain(moe, x, ids))
    torch.testing.assert_close(grads[0], grads[1])
    assert grads[0][1].abs().sum() > 0, "the router gets its gradient, replayed too"


def test_experts_without_rows_get_zero_gradients():
    moe = layer()
    ids = torch.tensor([[0, 1, 2, 3]] * 5)
    moe(torch.randn(5, 8, dtype=torch.float64), Replay(ids))[0].sum().backward()
    assert moe.experts.gate_up_proj.grad[4:].eq(0).all() and moe.experts.down_proj.grad[4:].eq(0).all()
    assert moe.experts.down_proj.grad[:4].ne(0).any()


@pytest.mark.parametrize(("n_group", "topk_group"), [(1, 1), (4, 2)])
def test_the_router_equals_transformers(n_group, topk_group):
    from transformers.models.glm_moe_dsa import GlmMoeDsaConfig
    from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as modeling

    config = GlmMoeDsaConfig(
        hidden_size=32, n_routed_experts=16, num_experts_per_tok=4, n_group=n_group, topk_group=topk_group, num_hidden_layers=2
    )
    theirs = modeling.GlmMoeDsaTopkRouter(config)
    ours = Router(MoEConfig(32, 8, 16, 4, "sigmoid", True, n_group, topk_group, scale=config.routed_scaling_factor))
    torch.manual_seed(0)
    with torch.no_grad():
        ours.weight.normal_()
        ours.e_score_correction_bias.normal_(0, 0.5)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(200, 32)
    _, weights, ids = theirs(x)
    order = weights.argsort(-1)
    our_ids, our_weights, counts_E = ours(x, Replay())
    assert torch.equal(our_ids.sort(-1).values, ids.sort(-1).values)
    torch.testing.assert_close(our_weights.sort(-1).values, weights.gather(1, order), rtol=1e-6, atol=1e-6)
    assert torch.equal(counts_E, torch.bincount(ids.flatten(), minlength=16))


def test_the_lowest_expert_wins_a_tie():
    router = Router(CONFIG)
    torch.nn.init.zeros_(router.weight)
    assert router(torch.randn(3, 8), Replay())[0].tolist() == [[0, 1, 2, 3]] * 3
    router.e_score_correction_bias[5] = 1.0
    assert router(torch.randn(3, 8), Replay())[0].tolist() == [[5, 0, 1, 2]] * 3


def test_the_correction_bias_moves_the_choice_and_not_the_weights():
    router = layer().gate
    x = torch.randn(20, 8, dtype=torch.float64)
    ids, weights, *_ = router(x, Replay())
    router.e_score_correction_bias += 7.0
    same_ids, same_weights, *_ = router(x, Replay())
    assert torch.equal(ids, same_ids) and torch.equal(weights, same_weights)
    assert "e_score_correction_bias" not in dict(router.named_parameters())


def test_unrouted_rows_take_the_models_own_choice():
    router = layer().gate
    x = torch.randn(6, 8, dtype=torch.float64)
    own = router(x, Replay())[0]
    recorded = (own + 1) % 16
    routed = torch.tensor([True, False, True, False, False, True])
    for dtype in (torch.uint8, torch.uint16, torch.int32):
        ids = router(x, Replay(recorded.to(dtype), routed))[0]
        assert torch.equal(ids, torch.where(routed[:, None], recorded, own))
    assert torch.equal(router(x, Replay(recorded.to(torch.uint8)))[0], recorded)


def test_replaying_the_own_choice_changes_nothing():
    moe = layer()
    x = torch.randn(20, 8, dtype=torch.float64)
    y, ids, _ = moe(x, Replay())
    assert torch.equal(moe(x, Replay(ids.to(torch.uint8)))[0], y)


@pytest.mark.parametrize("n_padding", [1, 64, 250])
def test_padding_rows_spread_and_are_not_counted(n_padding):
    moe = layer()
    x = torch.randn(300, 8, dtype=torch.float64)
    x[-n_padding:] = x[-1]
    padding = torch.zeros(300, dtype=torch.bool)
    padding[-n_padding:] = True
    ids, _, counts_E = moe.gate(x, Replay(padding_T=padding))
    spread = torch.bincount(ids[padding].flatten(), minlength=16)
    assert spread.max() - spread.min() <= 1
    assert (ids.sort(-1).values.diff(dim=-1) > 0).all(), "no expert twice in a row"
    own = moe.gate(x[:-n_padding], Replay())
    assert torch.equal(counts_E, own.counts_E) and torch.equal(ids[:-n_padding], own[0])
    replayed = Replay(torch.zeros(300, 4, dtype=torch.uint8), torch.zeros(300, dtype=torch.bool), padding)
    assert torch.equal(moe.gate(x, replayed)[0], ids), "padding of zeros in the record does not crowd expert 0"


def test_what_no_router_can_have_made_is_refused_with_counts():
    routes = torch.stack([torch.stack([torch.randperm(16)[:4] for _ in range(2)]) for _ in range(9)])
    routed = torch.ones(9, dtype=torch.bool)
    routed[8] = False
    check_routes(routes, routed, 16)
    check_routes(routes.to(torch.uint16), None, 16)
    routes[8] = 99  # not replayed
    check_routes(routes, routed, 16)
    routes[3, 1, 2] = 16
    routes[5, 0] = torch.tensor([1, 2, 1, 3])
    routes[6, 0] = 7
    with pytest.raises(
        RouteError, match=r"1 rows with expert ids outside 0…15, 2 rows with an expert twice, of 16; first at token 3, "
    ):
        check_routes(routes, routed, 16)
    with pytest.raises(RouteError, match="first at token 5, MoE layer 0"):
        check_routes(routes, routed & (torch.arange(9) != 3), 16)


def test_bias_update_levels_the_load():
    bias = torch.zeros(4)
    update_correction_bias(bias, torch.tensor([10, 2, 4, 4]), 0.1)
    assert bias.tolist() == pytest.approx([-0.1, 0.1, 0.1, 0.1])
    update_correction_bias(bias, torch.tensor([5, 5, 5, 5]), 0.1)
    assert bias.tolist() == pytest.approx([-0.1, 0.1, 0.1, 0.1])
    router = layer(CONFIG, seed=3).gate
    x = torch.randn(500, 8, dtype=torch.float64)
    before = router(x, Replay()).counts_E
    for _ in range(200):
        update_correction_bias(router.e_score_correction_bias, router(x, Replay()).counts_E, 0.02)
    assert router(x, Replay()).counts_E.max() < before.max() / 2


def test_counts_are_of_one_forward_under_activation_checkpointing():
    moe = layer()
    x = torch.randn(50, 8, dtype=torch.float64, requires_grad=True)
    y, ids, counts = checkpoint(moe, x, Replay(), use_reentrant=False)
    y.sum().backward()
    assert counts.sum() == 50 * 4 and torch.equal(counts, torch.bincount(ids.flatten(), minlength=16))


def reversed_ids(compute, x_TD, ids_TK, weights_TK):
    """A dispatcher of experts that are held in the opposite order."""
    return compute(x_TD, 15 - ids_TK, weights_TK, None, ids_TK.numel())


def test_rows_move_through_the_dispatcher_alone():
    moe = layer()
    x = torch.randn(20, 8, dtype=torch.float64)
    expected = moe(x, Replay())[0]
    moe.experts.dispatcher = reversed_ids
    assert not torch.allclose(moe(x, Replay())[0], expected)
    with torch.no_grad():
        for p in moe.experts.parameters():
            p.copy_(p.flip(0))
    torch.testing.assert_close(moe(x, Replay())[0], expected)


def test_there_are_rows_for_the_slots_that_the_dispatcher_counts_alone():
    moe = layer()
    slots, shapes = 0, []

    def first_two_here(compute, x_TD, ids_TK, weights_TK):
        nonlocal slots
        slots = int((ids_TK < 2).sum())
        return compute(x_TD, ids_TK.where(ids_TK < 2, -1), weights_TK, None, slots)

    moe.experts.dispatcher = first_two_here
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(t.shape) or t, lambda t: t):
        moe(torch.randn(23, 8, dtype=torch.float64), Replay())
    assert slots and (slots, 8) in shapes and not [s for s in shapes if s[0] == 23 * 4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_router_and_combine_are_wide(dtype):
    moe = layer(dtype=dtype)
    x = torch.randn(9, 8, dtype=dtype)
    _, weights, *_ = moe.gate(x, Replay())
    assert weights.dtype == torch.promote_types(dtype, torch.float32)
    assert moe(x, Replay())[0].dtype == dtype
