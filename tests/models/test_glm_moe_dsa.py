"""GLM-5's architecture: agreement with transformers, with itself from a cache, under replay, recomputation and float64."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from prl.kernels import registry
from prl.kernels.indexer import selection_flips
from prl.kernels.lm_head import logprobs
from prl.kernels.router import RouteError
from prl.layers import dsa, layout
from prl.layers.layout import PackedLayout
from prl.models.base import ForwardInput
from prl.models.registry import build, init_weights
from prl.models.spec import read_spec
from tests.layers.cached import Cache, CachedLayout

CONFIG = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 16,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "indexer_types": ["full", "shared", "full", "full"],
}
LENGTHS = [40, 12, 1, 90, 16, 17, 33, 5]


def make(config=CONFIG, dtype=torch.float32, seed=0):
    model = build(read_spec(config), dtype=dtype)
    init_weights(model, seed)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("bias"):
                tensor.normal_(0, 0.1)
            elif tensor.dim() == 1:
                tensor.uniform_(0.7, 1.3)
    return model


def given(lengths=LENGTHS, seed=1, **kw):
    torch.manual_seed(seed)
    tokens = torch.randint(0, CONFIG["vocab_size"], (sum(lengths),))
    return ForwardInput(tokens, torch.cat([torch.arange(n) for n in lengths]), PackedLayout(lengths), **kw)


def token_logprobs(model, tokens, hidden_TD):
    """[T − 1]: of each next token, whatever document it is in."""
    return logprobs(hidden_TD[:-1], model.lm_head_weight, tokens[1:], 1.0, chunk=64)[0]


@pytest.fixture
def index_scores_seen(monkeypatch):
    """Every [B, Q, S] of index scores, in order of computation."""
    seen, choose = [], registry.choose
    _, compute = registry._chosen("index_scores", "cpu", False, None)

    def spy(*args):
        seen.append(compute(*args))
        return seen[-1]

    monkeypatch.setattr(registry, "choose", lambda name, *a: spy if name == "index_scores" else choose(name, *a))
    return seen


def differs(scores, ours, theirs):
    """Whether two choices (bool, like `scores`) differ; they may only where the scores do by less than 1e-4 relative."""
    if torch.equal(ours, theirs):
        return False
    only_ours, only_theirs = scores[ours & ~theirs], scores[theirs & ~ours]
    gap = (only_ours[:, None] - only_theirs).abs().max()
    assert gap <= 1e-4 * torch.cat([only_ours, only_theirs]).abs().max(), (only_ours, only_theirs)
    return True


def chosen(ids, n):
    """bool [n]: what is in `ids`."""
    return torch.zeros(n, dtype=torch.bool).index_fill_(0, ids.long(), True)


@pytest.mark.parametrize("index_heads", [8, 2])
def test_logprobs_equal_transformers(index_heads, index_scores_seen):
    """To 1e-5 in every sequence without a flip; flips only between equals. Two index heads tie at zero in every fifth row."""
    import transformers

    config = CONFIG | {"index_n_heads": index_heads}
    model = make(config)
    spec = model.spec
    theirs = transformers.GlmMoeDsaForCausalLM(transformers.GlmMoeDsaConfig(**config)).eval()
    missing, unexpected = theirs.load_state_dict(model.state_dict(), strict=False)
    assert not missing and not unexpected
    choices = {}  # layer → (kind, choice of each query)

    def keep_keys(layer):
        return lambda module, args, out: choices.setdefault(layer, []).append(("keys", out[0]))

    def keep_experts(layer):
        return lambda module, args, out: choices.setdefault(layer, []).append(
            ("experts", out[2], out[0].sigmoid() + module.e_score_correction_bias)
        )

    for i in spec.indexed_layers:
        theirs.model.layers[i].self_attn.indexer.register_forward_hook(keep_keys(i))
    for i in spec.moe_layers:
        theirs.model.layers[i].mlp.gate.register_forward_hook(keep_experts(i))

    def first_flips(n, out):
        """Choices in the order of computation, up to the first kind in which any differs: how many do, there."""
        for layer in range(spec.n_layers):
            for kind, ids, *scores in choices.get(layer, []):
                if kind == "keys":
                    if n <= spec.index_topk:
                        continue
                    a = spec.indexed_layers.index(layer)
                    ours, scores = out.selections_TAS[:, a], index_scores_seen[a][0]
                    pairs = [(scores[q], chosen(ours[q][ours[q] >= 0], n), chosen(ids[q][ids[q] <= q], n)) for q in range(n)]
                else:
                    ours = out.routes_TLK[:, spec.moe_layers.index(layer)]
                    pairs = [(scores[0][q], chosen(ours[q], spec.n_experts), chosen(ids[q], spec.n_experts)) for q in range(n)]
                if flips := sum(differs(*p) for p in pairs):
                    return flips
        return 0

    lengths = LENGTHS + [60] * 6
    inputs = given(lengths, record_selections=True)
    checked = flipped = 0
    with torch.no_grad():
        packed = model(inputs)
        packed_logprobs = token_logprobs(model, inputs.tokens_T, packed.hidden_TD)
        for n, end in zip(lengths, torch.tensor(lengths).cumsum(0).tolist(), strict=True):
            tokens = inputs.tokens_T[end - n : end]
            choices.clear(), index_scores_seen.clear()
            expected = theirs(tokens[None]).logits[0].log_softmax(-1)
            alone = model(ForwardInput(tokens, torch.arange(n), PackedLayout([n]), record_selections=True))
            if first_flips(n, alone):
                flipped += 1
                continue
            checked += 1
            wanted = expected[:-1].gather(1, tokens[1:, None])[:, 0]
            torch.testing.assert_close(token_logprobs(model, tokens, alone.hidden_TD), wanted, rtol=0, atol=1e-5)
            if torch.equal(packed.selections_TAS[end - n : end], alone.selections_TAS):
                torch.testing.assert_close(packed_logprobs[end - n : end - 1], wanted, rtol=0, atol=1e-5)
                assert torch.equal(packed.routes_TLK[end - n : end], alone.routes_TLK)
    long = sum(n > spec.index_topk for n in lengths)
    assert (checked >= len(lengths) - 2) if index_heads == 8 else (0 < flipped <= long), f"{checked} equal, {flipped} flipped"


def flips_before(ours, theirs, lengths):
    """bool [T]: whether a choice of this token's sequence differed at or before it."""
    flips = selection_flips(ours, theirs).any(-1)
    return torch.cat([part.cumsum(0) > 0 for part in flips.split(list(lengths))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("replayed", [True, False])
def test_cached_forwards_equal_the_full_one(dtype, replayed):
    """Prompts in two chunks, then tokens one by one, sequences of unequal length together: as an engine does it."""
    model = make(dtype=dtype)
    lengths = [40, 23, 60]
    inputs = given(lengths, record_selections=True)
    full = model(inputs)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    done = [0, 0, 0]
    cache = Cache(3)
    hidden, routes, kept = (torch.zeros_like(t) for t in (full.hidden_TD, full.routes_TLK, full.selections_TAS))
    with torch.no_grad():
        while any(d < n for d, n in zip(done, lengths, strict=True)):
            counts = [min(11 if d < 20 else 1, n - d) for d, n in zip(done, lengths, strict=True)]
            at = torch.cat([torch.arange(c) + e - n + d for c, e, n, d in zip(counts, ends, lengths, done, strict=True)])
            given_now = ForwardInput(
                inputs.tokens_T[at],
                inputs.positions_T[at],
                CachedLayout(cache, counts),
                routes_TLK=full.routes_TLK[at],
                selections_TAS=full.selections_TAS[at] if replayed else None,
                record_selections=True,
            )
            out = model(given_now)
            hidden[at], routes[at], kept[at] = out.hidden_TD, out.routes_TLK, out.selections_TAS
            done = [d + c for d, c in zip(done, counts, strict=True)]
    flipped = flips_before(kept, full.selections_TAS, lengths)
    assert torch.equal(routes, full.routes_TLK)
    assert flipped.float().mean() <= (0 if replayed or dtype == torch.float64 else 0.2)
    difference = (hidden - full.hidden_TD).abs()[~flipped].max()
    assert difference < (1e-12 if dtype == torch.float64 else 2e-5), difference
    assert set(cache.rows) == {(layer, name) for layer, name, _ in model.cache_spec()}
    assert all(cache.rows[layer, name].shape[2:] == width for layer, name, width in model.cache_spec())


class Types(TorchDispatchMode):
    """The floating types of all tensors made."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex()):
                self.seen.add(t.dtype)
        return out


def loss_of(model, inputs, out):
    labels = inputs.tokens_T.roll(-1)
    logprob, entropy = logprobs(out.hidden_TD, model.lm_head_weight, labels, 0.7, chunk=50)
    return (logprob * torch.linspace(-1, 1, len(logprob))).sum() + entropy.sum()


def test_float64_runs_are_float64():
    model = make(dtype=torch.float64)
    inputs = given()
    with Types() as types:
        out = model(inputs)
        logprob, entropy = logprobs(out.hidden_TD, model.lm_head_weight, inputs.tokens_T, 1.0, chunk=50)
        (logprob.sum() + entropy.sum()).backward()
    assert types.seen == {torch.float64, torch.complex128}


def test_bfloat16_keeps_the_wide_parts_wide():
    model = make(dtype=torch.bfloat16)
    with torch.no_grad(), Types() as types:
        out = model(given())
    assert torch.float32 in types.seen and out.hidden_TD.dtype == torch.bfloat16
    for name in ("mlp.gate.e_score_correction_bias", "self_attn.indexer.weights_proj.weight"):
        assert model.state_dict()[f"model.layers.2.{name}"].dtype == torch.float32


def gradients(model, inputs):
    model.zero_grad()
    out = model(inputs)
    loss_of(model, inputs, out).backward()
    return out, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_replayed_experts_are_used_and_the_router_learns():
    model = make(dtype=torch.float64)
    own = model(given()).routes_TLK
    recorded = (own + 1) % 16
    routed = torch.rand(len(own)) < 0.7
    out, grads = gradients(model, given(routes_TLK=recorded.to(torch.uint8), routed_T=routed))
    assert torch.equal(out.routes_TLK[routed], recorded[routed])
    assert not torch.equal(out.routes_TLK[~routed], recorded[~routed])
    assert all(grads[f"model.layers.{i}.mlp.gate.weight"].abs().sum() > 0 for i in (1, 2, 3))
    assert not any("indexer" in name for name in grads), "the indexer is frozen"
    assert len(grads) == sum("indexer" not in n for n, _ in model.named_parameters())
    with pytest.raises(RouteError):
        model(given(routes_TLK=recorded + 1, routed_T=routed))


def test_padding_is_not_counted_and_changes_nothing():
    model = make(dtype=torch.float64)
    lengths = [40, 12, 30]
    plain = model(given(lengths))
    padded = given([*lengths, 50], padding_T=torch.arange(132) >= 82)
    padded.tokens_T[82:] = 0
    out = model(padded)
    torch.testing.assert_close(out.hidden_TD[:82], plain.hidden_TD)
    assert torch.equal(out.expert_counts_LE, plain.expert_counts_LE)
    assert plain.expert_counts_LE.sum(-1).tolist() == [82 * 4] * 3
    load = torch.bincount(out.routes_TLK[82:, 0].flatten(), minlength=16)
    assert load.max() - load.min() <= 1


def test_gradients_do_not_depend_on_packing():
    model = make(dtype=torch.float64)
    inputs = given()
    weights = torch.randn(len(inputs.tokens_T), 128, dtype=torch.float64)
    (model(inputs).hidden_TD * weights).sum().backward()
    packed = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    at = 0
    for n in LENGTHS:
        piece = slice(at, at + n)
        alone = ForwardInput(inputs.tokens_T[piece], torch.arange(n), PackedLayout([n]))
        (model(alone).hidden_TD * weights[piece]).sum().backward()
        at += n
    apart = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    torch.testing.assert_close(packed, apart, rtol=1e-9, atol=1e-11)


def test_replayed_selections_are_used():
    model = make()
    inputs = given([60, 30], record_selections=True)
    own = model(inputs)
    first = own.selections_TAS.clone()
    first[20:59] = torch.arange(16, dtype=torch.int32)  # the first keys instead of the best
    out = model(replace(inputs, selections_TAS=first))
    assert torch.equal(out.selections_TAS, first)
    assert not torch.allclose(out.hidden_TD[20:59], own.hidden_TD[20:59], atol=1e-3)
    torch.testing.assert_close(out.hidden_TD[60:], own.hidden_TD[60:], rtol=0, atol=1e-5)
    assert selection_flips(own.selections_TAS, first)[20:59].any(-1).sum() > 30
    first[20:59] = -1
    torch.testing.assert_close(model(replace(inputs, selections_TAS=first)).hidden_TD, own.hidden_TD, rtol=0, atol=1e-5)


def test_a_layer_without_an_indexer_uses_the_selection_before_it():
    """Layers 0 and 2 are full, 1 and 3 shared: replaying layer 2's selection moves layer 3's, layer 0's stays with layer 1."""
    model = make(CONFIG | {"indexer_types": ["full", "shared", "full", "shared"]})
    masks = {}
    for i, block in enumerate(model.layers):
        block.register_forward_hook(lambda m, args, out, i=i: masks.__setitem__(i, out.selection.kept[0]))
    inputs = given([60], record_selections=True)
    model(inputs)
    assert torch.equal(masks[0], masks[1]) and torch.equal(masks[2], masks[3])
    assert not torch.equal(masks[0], masks[2])
    names = {n.split(".")[2] for n, _ in model.named_parameters() if "indexer" in n}
    assert names == {"0", "2"}
    assert [(layer, name) for layer, name, _ in model.cache_spec()] == [
        (0, "kv"),
        (0, "index"),
        (1, "kv"),
        (2, "kv"),
        (2, "index"),
        (3, "kv"),
    ]


@pytest.mark.parametrize("replay", [False, True])
def test_attention_by_index_and_in_pieces_changes_nothing(replay, monkeypatch):
    """Documents cut into pieces of queries, keys attended to by index: outputs, selections, gradients."""
    model = make(CONFIG, dtype=torch.float64)
    inputs = given([60, 3, 33], record_selections=True)
    if replay:
        recorded = make(CONFIG, dtype=torch.float64, seed=1)(inputs).selections_TAS
        recorded[::7] = -1
        inputs = replace(inputs, selections_TAS=recorded)
    plain = model(inputs)
    expected = torch.autograd.grad(plain.hidden_TD.square().sum(), list(model.parameters()), allow_unused=True)
    monkeypatch.setattr(layout, "BOUND", 300)
    monkeypatch.setattr(dsa, "SPARSE", 0)
    cut = model(replace(inputs, layout=PackedLayout([60, 3, 33])))
    torch.testing.assert_close(cut.hidden_TD, plain.hidden_TD, rtol=0, atol=1e-12)
    assert torch.equal(cut.selections_TAS, plain.selections_TAS)
    got = torch.autograd.grad(cut.hidden_TD.square().sum(), list(model.parameters()), allow_unused=True)
    for a, b in zip(got, expected, strict=True):
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
