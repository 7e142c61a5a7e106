"""run.bitwise: trainer and engine give a token the same logprob to the last bit, whatever packing and schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from prl.config.named import SetupError
from prl.inference.api import GenerateRequest
from prl.inference.engine import Engine
from prl.kernels import lm_head, registry
from prl.layers import attention, dsa, layout
from prl.layers.layout import PackedLayout
from prl.models import precision as precisions
from prl.models.base import ForwardInput, Model
from prl.models.bitwise import fix_order
from prl.models.registry import build, init_weights
from prl.models.spec import read_spec

pytestmark = pytest.mark.skipif(registry.unavailable("cpu") is not None, reason=str(registry.unavailable("cpu")))

CPU, VOCABULARY, TEMPERATURE = torch.device("cpu"), 1100, 0.7
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,  # more than a slab of the LM head
    "hidden_size": 128,
    "intermediate_size": 144,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
    "initializer_range": 0.12,
}
_GLM: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": _COMMON | {"architectures": ["LlamaForCausalLM"], "head_dim": 24},
    "qwen3_moe": _COMMON | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "head_dim": 32},
    "glm4_moe": _COMMON
    | _GLM
    | {"architectures": ["Glm4MoeForCausalLM"], "head_dim": 20, "partial_rotary_factor": 0.5, "attention_bias": True},
    "glm_moe_dsa": _COMMON
    | _GLM
    | {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 12,  # six pairs: no whole vector
        "v_head_dim": 20,
        "index_n_heads": 6,
        "index_head_dim": 32,
        "index_topk": 24,
    },
}
PAIRS = [("bfloat16", "bf16"), ("float32", "bf16"), ("bfloat16", "fp8")]


def make(name: str, dtype: str = "bfloat16", precision: str = "bf16", seed: int = 0) -> Model:
    model = build(read_spec(MODELS[name]), dtype=getattr(torch, dtype))
    init_weights(model, seed)
    precisions.set_fp8(model, precisions.candidates(model) if precision == "fp8" else [])
    return model.eval()


def fixed(model: Model) -> Model:
    fix_order(model, CPU)
    return model


def engine(model: Model, **options: Any) -> Engine:
    return Engine(model, model.spec, bitwise=True, **({"kv_tokens": 2048, "max_batch": 16} | options))


def lines(rng: np.random.Generator) -> list[np.ndarray]:
    """Of many lengths; the last two share a prefix."""
    out = [rng.integers(0, VOCABULARY, n, dtype=np.int32) for n in (2, 3, 17, 41, 70)]
    return [*out, np.concatenate([out[-1][:40], rng.integers(0, VOCABULARY, 20, dtype=np.int32)])]


def packed(
    model: Model, rows: Sequence[Sequence[np.ndarray]], *, chunk: int = 1024, routes: Sequence[np.ndarray] | None = None
) -> list[np.ndarray]:
    """Each line's logprobs [T - 1] as the trainer has them, rows in turn. `routes` of all lines are replayed."""
    out, done = [], 0
    for row in rows:
        lengths = [len(t) for t in row]
        tokens = torch.from_numpy(np.concatenate(row)).long()
        positions = torch.cat([torch.arange(n) for n in lengths])
        replayed = None
        if routes is not None:
            replayed = torch.from_numpy(np.concatenate(routes[done : done + len(row)]))
            done += len(row)
        forward = model(ForwardInput(tokens, positions, PackedLayout(lengths), routes_TLK=replayed))
        labels = torch.where(positions.roll(-1) == 0, lm_head.IGNORE, tokens.roll(-1))
        scored, _ = lm_head.logprobs(forward.hidden_TD, model.lm_head_weight, labels, TEMPERATURE, chunk=chunk)
        out += [part[:-1].detach().numpy() for part in scored.split(lengths)]
    return out


def equal(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> bool:
    return all(a.dtype == b.dtype == np.float32 and np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype, precision", PAIRS)
@pytest.mark.parametrize("name", MODELS)
def test_packings_and_schedules_change_no_bit(name: str, dtype: str, precision: str, rng: np.random.Generator) -> None:
    """With gradients as without, whole and cut documents, whole prompts, chunks and single tokens, alone and in a batch."""
    model, given = fixed(make(name, dtype, precision)), lines(rng)
    expected = packed(model, [[t] for t in given])
    with torch.no_grad():
        assert equal(packed(model, [given], chunk=5), expected)
        order = [5, 0, 2, 1, 4, 3]
        mixed = packed(model, [[given[i] for i in order[:3]], [given[i] for i in order[3:]]])
        assert equal(mixed, [expected[i] for i in order])
        with mock.patch.object(layout, "BOUND", 300), mock.patch.object(dsa, "SPARSE", 0):
            assert equal(packed(model, [given]), expected)
    served = engine(model)
    for lists, chunk in ((given, 0), (given, 7), (given, 1), (given[2:3], 1), (given[3:4], 0)):
        scored = served.score(lists, temperature=TEMPERATURE, chunk=chunk)
        of = {id(t): e for t, e in zip(given, expected, strict=True)}
        assert equal([s.logprobs[1:] for s in scored], [of[id(t)] for t in lists]), chunk


def test_without_it_they_differ(rng: np.random.Generator) -> None:
    model, given = make("qwen3_moe", "float32"), lines(rng)
    expected = packed(model, [[t] for t in given])
    plain = Engine(model, model.spec, kv_tokens=2048, max_batch=16)
    assert not equal([s.logprobs[1:] for s in plain.score(given, temperature=TEMPERATURE, chunk=1)], expected)


@pytest.mark.parametrize("name", ["qwen3_moe", "glm_moe_dsa"])
@pytest.mark.parametrize("replay", [False, True])
def test_tokens_after_updates_in_flight_are_the_trainers(name: str, replay: bool, rng: np.random.Generator) -> None:
    """Two replicas, requests that come and go, prefixes that hit, weights that change in between: each token of the last
    version that its sequence saw has the logprob of that version's trainer on the whole sequence."""
    models = [fixed(make(name, seed=seed)) for seed in range(3)]
    prefix = rng.integers(0, VOCABULARY, 24, dtype=np.int32)
    given = [
        GenerateRequest(
            tokens=np.concatenate([prefix[: 12 * (i % 3)], rng.integers(0, VOCABULARY, 1 + i, dtype=np.int32)]),
            max_tokens=int(rng.integers(4, 30)),
            temperature=TEMPERATURE,
            seed=i,
            request_id=f"r{i}",
            cache_salt="life",
        )
        for i in range(16)
    ]
    replicas = [engine(make(name, seed=0), max_batch=5, max_prefill_tokens=16, block_size=4, name=f"e{i}") for i in range(2)]
    for i, request in enumerate(given):
        replicas[i % 2].add(request)
    done = {}
    for replica, updates in zip(replicas, ({8: 1, 30: 2}, {5: 1, 40: 2}), strict=True):
        step = 0
        while replica.ready:
            if step in updates:
                replica.load_weights(updates[step], models[updates[step]].state_dict())
            for event in replica.step():
                done[event.request_id] = event.generation
            step += 1
        assert replica.version == 2 and replica.counts["recomputed"] > 0 and replica.counts["prefix_hits"] > 0
    seen = 0
    for request in given:
        g = done[request.request_id]
        version, tokens = int(g.versions[-1]), np.concatenate([request.tokens, g.tokens])
        assert g.routes is not None
        # The last token has no forward and so no row of its own: any does, since it is the first that no logprob depends on.
        routes = [np.concatenate([g.routes, g.routes[-1:]])] if replay else None
        (trained,) = packed(models[version], [[tokens]], routes=routes)
        own = g.versions == version
        assert np.array_equal(trained[len(request.tokens) - 1 :][own], g.logprobs[own])
        seen += own.sum()
    assert seen > 60 and any(len(set(g.versions.tolist())) > 1 for g in done.values())


def test_no_request_reads_keys_of_older_weights(rng: np.random.Generator) -> None:
    """With the same salt, as a rollout's later turns have it: hits of prefixes are of the present weights."""
    old, new = (fixed(make("qwen3_moe", seed=seed)) for seed in range(2))
    served = engine(make("qwen3_moe"), block_size=4)
    request = GenerateRequest(rng.integers(0, VOCABULARY, 24, dtype=np.int32), 5, TEMPERATURE, seed=1, request_id="r")
    hits = 0
    for model, version, more in ((old, 0, 0), (new, 1, 0), (new, 1, 20)):
        if served.version != version:
            served.load_weights(version, model.state_dict())
        served.add(request)
        while served.ready:
            for event in served.step():
                g = event.generation
        (trained,) = packed(model, [[np.concatenate([request.tokens, g.tokens])]])
        assert np.array_equal(trained[len(request.tokens) - 1 :], g.logprobs)
        hits += more
        assert served.counts["prefix_hits"] == hits


def test_gradients_are_those_of_the_usual_order(rng: np.random.Generator) -> None:
    for name in ("glm4_moe", "glm_moe_dsa"):
        given = lines(rng)[:5]
        grads = []
        for model in (make(name, "float32"), fixed(make(name, "float32"))):
            rows = torch.from_numpy(np.concatenate(given)).long()
            positions = torch.cat([torch.arange(len(t)) for t in given])
            out = model(ForwardInput(rows, positions, PackedLayout([len(t) for t in given])))
            scored, _ = lm_head.logprobs(out.hidden_TD, model.lm_head_weight, rows.roll(-1), 1.0, chunk=64)
            scored.sum().backward()
            grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        assert grads[0].keys() == grads[1].keys()
        for n, g in grads[0].items():
            assert (g - grads[1][n]).norm() < 1e-4 * g.norm(), (name, n)


def test_truncated_and_greedy_tokens_keep_their_own_logprobs(rng: np.random.Generator) -> None:
    """A token of a truncated distribution has the logprob of that one: the trainer never sees it."""
    model = make("llama", "float32")
    request = GenerateRequest(rng.integers(0, VOCABULARY, 9, dtype=np.int32), 6, 1.0, seed=3)
    kinds = {"plain": {}, "top_k": {"top_k": 3}, "top_p": {"top_p": 0.4}, "greedy": {"temperature": 0.0}}
    got: dict[bool, dict[str, Any]] = {}
    for bitwise in (False, True):
        served = Engine(model, model.spec, kv_tokens=512, bitwise=bitwise)
        for kind, options in kinds.items():
            served.add(replace(request, request_id=kind, **options))
        got[bitwise] = {}
        while served.ready:
            got[bitwise] |= {e.request_id: e.generation for e in served.step()}
    for kind in kinds:
        assert got[True][kind].tokens.tolist() == got[False][kind].tokens.tolist()
        assert np.abs(got[True][kind].logprobs - got[False][kind].logprobs).max() < 1e-4
    assert (got[True]["greedy"].logprobs == 0).all() and (
        got[True]["top_k"].logprobs >= got[True]["plain"].logprobs.min()
    ).all()


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda m: m.setenv("PRL_KERNELS", "reference"), r"run.bitwise: attention would run on reference, .* backend cpu"),
        (lambda m: m.setattr(registry, "unavailable", lambda b: "missing"), "attention would run on reference"),
    ],
)
def test_where_it_cannot_hold_it_is_refused(
    spoil: Callable[[pytest.MonkeyPatch], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make("llama")
    with monkeypatch.context() as m:
        spoil(m)
        registry._chosen.cache_clear()
        with pytest.raises(SetupError, match=message):
            engine(model)
    registry._chosen.cache_clear()
    with pytest.raises(SetupError, match=r"model.embed_tokens.weight is float64, .* expected bfloat16 or float32"):
        fix_order(make("llama", "float64"), CPU)
    with torch.device("meta"), pytest.raises(SetupError, match="hidden_size is 32768, expected less than 32768"):
        wide = MODELS["llama"] | {"hidden_size": 32768, "num_hidden_layers": 1}
        fix_order(build(read_spec(wide), dtype=torch.float32, device="meta"), CPU)
    assert not model.rope.in_order and model.layers[0].self_attn.core is attention.attend  # type: ignore[union-attr]
