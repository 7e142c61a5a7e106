"""The engine against forwards without a cache, and its scheduling."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from prl.inference.api import GenerateRequest, Generation
from prl.inference.engine import Engine, RequestError
from prl.inference.kv_cache import CachedLayout, PagedCache
from prl.models.base import ForwardInput, Model
from tests.inference.tiny import VOCABULARY, full_forward, make_model, requests, run

Prompt = Callable[[int], np.ndarray]


def make_engine(model: Model, **kwargs: Any) -> Engine:
    return Engine(model, model.spec, **({"kv_tokens": 4096, "max_batch": 16} | kwargs))


def generate(engine: Engine, *given: GenerateRequest) -> dict[str, Generation]:
    for request in given:
        engine.add(request)
    return run(engine)


def check(model: Model, request: GenerateRequest, got: Generation, tolerance: float = 1e-5) -> None:
    """Logprobs and routes of every position equal a full forward's."""
    tokens = np.concatenate([request.tokens, got.tokens])
    full = full_forward(model, tokens, request.temperature)
    assert np.abs(full.of(tokens, len(request.tokens)) - got.logprobs).max() < tolerance
    if full.routes is not None:
        assert got.routes is not None
        assert (got.routes == full.routes[request.routes_from : -1]).all()


@pytest.mark.parametrize("name", ["qwen3_moe", "llama"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_batch_equals_one_by_one_and_a_full_forward(name: str, temperature: float, rng: np.random.Generator) -> None:
    model = make_model(name)
    given = requests(rng, 24, temperature=temperature)
    # Few rows and a small token budget: prompts come in chunks, requests come and go while others run.
    together = generate(make_engine(model, max_batch=7, max_prefill_tokens=24), *given)
    for r in given:
        alone = generate(make_engine(model, prefix_cache=False), r)[r.request_id]
        got = together[r.request_id]
        assert got.tokens.tolist() == alone.tokens.tolist()
        assert np.abs(got.logprobs - alone.logprobs).max() < 1e-5
        assert got.finish_reason == "length" and len(got.tokens) == r.max_tokens
        check(model, r, got)
    assert name == "llama" or together["r0"].routes.dtype == np.uint8  # type: ignore[union-attr]


def test_sparse_attention_through_the_cache_equals_a_full_forward(rng: np.random.Generator) -> None:
    """In float64, where no selection flips; sequences are longer than the indexer's top-k."""
    model = make_model("glm_moe_dsa", dtype=torch.float64)
    given = requests(rng, 10)
    got = generate(make_engine(model, max_batch=4, max_prefill_tokens=16, record_selections=True), *given)
    for r in given:
        check(model, r, got[r.request_id], 1e-6)
        selections = full_forward(model, np.concatenate([r.tokens, got[r.request_id].tokens])).selections
        assert selections is not None
        assert (np.sort(got[r.request_id].selections) == np.sort(selections[:-1])).all()  # type: ignore[arg-type]


def test_the_same_seed_gives_the_same_tokens_wherever_the_request_starts(prompt: Prompt) -> None:
    model = make_model()
    whole = GenerateRequest(prompt(10), 20, seed=5, request_id="whole")
    first = generate(make_engine(model), whole)["whole"].tokens
    later = GenerateRequest(np.concatenate([whole.tokens, first[:8]]), 12, seed=5, request_id="later")
    assert generate(make_engine(model), later)["later"].tokens.tolist() == first[8:].tolist()
    other = generate(make_engine(model), replace(whole, seed=6))["whole"].tokens
    assert other.tolist() != first.tolist()


class TestPrefixReuse:
    def test_cached_prompts_give_the_same_logprobs_and_their_routes(self, prompt: Prompt) -> None:
        model = make_model()
        engine = make_engine(model, block_size=4)
        tokens = prompt(30)
        a = GenerateRequest(tokens, 6, seed=1, request_id="a")
        b = GenerateRequest(tokens, 6, seed=2, request_id="b")
        first = generate(engine, a)["a"]
        assert engine.counts["prefix_hits"] == 0
        second = generate(engine, b)["b"]
        assert engine.counts["prefix_hits"] == 28
        check(model, a, first)
        check(model, b, second)

    def test_requests_of_one_step_share_the_blocks_that_it_fills(self, prompt: Prompt) -> None:
        model = make_model()
        engine = make_engine(model, block_size=4)
        tokens = prompt(30)
        given = [GenerateRequest(tokens, 5, seed=i, request_id=f"{i}") for i in range(8)]
        got = generate(engine, *given)
        assert engine.counts["prefix_hits"] == 7 * 28
        for r in given:
            check(model, r, got[r.request_id])

    def test_a_turn_boundary_gets_its_route(self, prompt: Prompt) -> None:
        """The second turn reuses the first one's blocks and brings the row of the first's last token, and only what is new."""
        model = make_model()
        engine = make_engine(model, block_size=4)
        one = GenerateRequest(prompt(11), 9, seed=1, request_id="1")
        first = generate(engine, one)["1"]
        before = np.concatenate([one.tokens, first.tokens])
        two = GenerateRequest(np.concatenate([before, prompt(5)]), 7, seed=1, routes_from=len(before) - 1, request_id="2")
        second = generate(engine, two)["2"]
        assert engine.counts["prefix_hits"] == (len(before) - 1) // 4 * 4, "blocks with completion tokens are reused too"
        assert first.routes is not None and second.routes is not None
        assert len(first.routes) + len(second.routes) == len(two.tokens) + 7 - 1
        check(model, two, second)
        whole = full_forward(model, np.concatenate([two.tokens, second.tokens])).routes
        assert whole is not None
        assert (np.concatenate([first.routes, second.routes]) == whole[:-1]).all()

    def test_another_salt_never_reads_older_blocks(self, prompt: Prompt) -> None:
        old, new = make_model(seed=0), make_model(seed=1)
        engine = make_engine(make_model(seed=0), block_size=4)
        tokens = prompt(30)
        generate(engine, GenerateRequest(tokens, 4, cache_salt="0", request_id="a"))
        engine.load_weights(1, new.state_dict())
        r = GenerateRequest(tokens, 4, cache_salt="1", request_id="b")
        check(new, r, generate(engine, r)["b"])
        assert engine.counts["prefix_hits"] == 0
        # A rollout that began under version 0 keeps its salt, and its old keys with it.
        kept = generate(engine, GenerateRequest(tokens, 4, cache_salt="0", request_id="c"))["c"]
        assert engine.counts["prefix_hits"] == 28
        assert kept.routes is not None
        assert (kept.routes[:28] == full_forward(old, tokens).routes[:28]).all()  # type: ignore[index]

    def test_off_and_reset(self, prompt: Prompt) -> None:
        tokens = prompt(30)
        for engine in (make_engine(make_model(), prefix_cache=False), make_engine(make_model())):
            generate(engine, GenerateRequest(tokens, 4, request_id="a"))
            engine.reset_prefix_cache()
            generate(engine, GenerateRequest(tokens, 4, request_id="b"))
            assert engine.counts["prefix_hits"] == 0


def mixed_forward(a: Model, b: Model, tokens: np.ndarray, switch: int) -> np.ndarray:
    """log-softmax [T, V] of tokens whose first `switch` were forwarded by a, the rest by b over a's keys."""
    cache = PagedCache(a.cache_spec(), 40, 8)
    table = np.arange(1, 41)[None]
    out = []
    for model, start, end in ((a, 0, switch), (b, switch, len(tokens))):
        layout = CachedLayout(cache, 8, np.array([start]), np.array([end - start]), table)
        with torch.inference_mode():
            t = torch.from_numpy(tokens[start:end].astype(np.int64))
            hidden = model(ForwardInput(t, torch.arange(start, end), layout)).hidden_TD
            out.append(torch.log_softmax(hidden @ model.lm_head_weight.T, -1).numpy())
    return np.concatenate(out)


def test_weights_change_in_flight_and_every_token_matches_its_label(rng: np.random.Generator) -> None:
    a, b = make_model(seed=0), make_model(seed=1)
    engine = make_engine(make_model(seed=0), max_prefill_tokens=16)
    given = [replace(r, max_tokens=20, cache_salt="0") for r in requests(rng, 12)]
    for r in given:
        engine.add(r)
    done = {e.request_id: e.generation for _ in range(11) for e in engine.step()}
    engine.load_weights(1, b.state_dict())
    done |= run(engine)
    assert sorted(done) == sorted(r.request_id for r in given), "a request was dropped"
    switched = 0
    for r in given:
        got = done[r.request_id]
        tokens = np.concatenate([r.tokens, got.tokens])
        p, old = len(r.tokens), int((got.versions == 0).sum())
        assert got.versions.tolist() == [0] * old + [1] * (20 - old)
        if old == 0:
            continue  # not admitted, or its prompt not done, before the update
        switched += old < 20
        expected = mixed_forward(a, b, tokens, p + old - 1) if old < 20 else full_forward(a, tokens).logprobs
        at = np.arange(p, p + 20)
        assert np.abs(expected[at - 1, tokens[at]] - got.logprobs).max() < 1e-5
        if old < 20:
            under_a = full_forward(a, tokens).of(tokens, p + old)
            assert np.abs(under_a - got.logprobs[old:]).max() > 0.1, "the two versions do not differ: this proves nothing"
    assert switched >= 5


def test_wrong_weights_change_nothing() -> None:
    engine = make_engine(make_model())
    state = dict(make_model(seed=1).state_dict())
    before = {k: v.clone() for k, v in engine.model.state_dict().items()}
    short = {k: v for k, v in state.items() if "lm_head" not in k}
    with pytest.raises(ValueError, match="weights of version 1: missing .*lm_head"):
        engine.load_weights(1, short)
    with pytest.raises(ValueError, match=r"lm_head.weight is \(3, 3\), not"):
        engine.load_weights(1, state | {"lm_head.weight": torch.zeros(3, 3)})
    assert engine.version == 0 and all(torch.equal(before[k], v) for k, v in engine.model.state_dict().items())


class TestScheduling:
    def test_priority_then_arrival(self, prompt: Prompt) -> None:
        engine = make_engine(make_model(), max_batch=1)
        for i, priority in enumerate((5, 5, -1, 0)):
            engine.add(GenerateRequest(prompt(4), 2, priority=priority, request_id=f"{i}"))
        assert list(run(engine)) == ["2", "3", "0", "1"]

    def test_more_than_the_cache_holds_waits_and_all_end(self, rng: np.random.Generator) -> None:
        model = make_model()
        engine = make_engine(model, kv_tokens=128, block_size=8, max_batch=16)
        given = requests(rng, 40)
        got = generate(engine, *given)
        assert len(got) == 40 and engine.pool.free == engine.pool.n_blocks
        for r in given:
            check(model, r, got[r.request_id])

    def test_what_can_never_fit_is_refused_by_name(self, prompt: Prompt) -> None:
        engine = make_engine(make_model(), kv_tokens=64)
        with pytest.raises(
            RequestError, match="max_tokens: 40 tokens and 30 new ones are more than a sequence may have, 64"
        ) as e:
            engine.add(GenerateRequest(prompt(40), 30))
        assert e.value.name == "max_tokens"
        whole = GenerateRequest(prompt(40), 24, request_id="a")
        assert len(generate(engine, whole)["a"].tokens) == 24

    @pytest.mark.parametrize(
        ("change", "name"),
        [
            ({"tokens": np.zeros(0, np.int32)}, "token_ids"),
            ({"tokens": np.array([VOCABULARY], np.int32)}, "token_ids"),
            ({"tokens": np.array([-1], np.int32)}, "token_ids"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"temperature": -0.1}, "temperature"),
            ({"temperature": float("nan")}, "temperature"),
            ({"top_p": 0.0}, "top_p"),
            ({"top_k": -2}, "top_k"),
            ({"routes_from": 5}, "routed_experts_prompt_start"),
        ],
    )
    def test_malformed_requests_are_refused_by_field(self, change: dict[str, Any], name: str, prompt: Prompt) -> None:
        with pytest.raises(RequestError) as e:
            make_engine(make_model()).add(replace(GenerateRequest(prompt(4), 4), **change))
        assert e.value.name == name

    def test_a_running_id_is_refused(self, prompt: Prompt) -> None:
        engine = make_engine(make_model())
        engine.add(GenerateRequest(prompt(4), 4, request_id="a"))
        with pytest.raises(RequestError, match="request_id: 'a' is running already"):
            engine.add(GenerateRequest(prompt(4), 4, request_id="a"))

    def test_held_requests_are_admitted_sorted_whatever_the_order_of_posting(self, rng: np.random.Generator) -> None:
        """Bit for bit, prefix reuse off: the engine's batches follow from the set of requests alone."""
        given = [replace(r, priority=i) for i, r in enumerate(requests(rng, 30))]
        model = make_model()
        results = []
        for order in (range(30), rng.permutation(30)):
            engine = make_engine(model, max_batch=8, prefix_cache=False)
            engine.held = True
            for i in order:
                engine.add(given[i])
            assert not engine.ready and engine.waiting == 30
            engine.held = False
            results.append(run(engine))
        for r in given:
            x, y = (got[r.request_id] for got in results)
            assert x.tokens.tolist() == y.tokens.tolist() and x.logprobs.tobytes() == y.logprobs.tobytes()

    def test_abort_gives_what_there_is(self, prompt: Prompt) -> None:
        model = make_model()
        engine = make_engine(model, max_batch=2)
        given = {i: GenerateRequest(prompt(12), 30, seed=ord(i), request_id=i) for i in "abcd"}
        for r in given.values():
            engine.add(r)
        for _ in range(5):
            engine.step()
        assert engine.abort(["a", "d", "nobody"]) == 2
        got = {e.request_id: e.generation for e in engine.step()}
        assert {i: g.finish_reason for i, g in got.items()} == {"a": "abort", "d": "abort"}
        assert len(got["a"].tokens) == 5 and not len(got["d"].tokens)
        check(model, given["a"], got["a"])
        assert {i: g.finish_reason for i, g in run(engine).items()} == {"b": "length", "c": "length"}
        assert engine.abort() == 0 and engine.pool.free == engine.pool.n_blocks

    def test_abort_within_a_chunked_prompt(self, prompt: Prompt) -> None:
        engine = make_engine(make_model(), max_prefill_tokens=8)
        engine.add(GenerateRequest(prompt(30), 4, request_id="a"))
        engine.step()
        engine.abort(["a"])
        (event,) = engine.step()
        assert event.generation.finish_reason == "abort" and not len(event.generation.tokens)
        assert engine.pool.free == engine.pool.n_blocks

    def test_stop_tokens(self, prompt: Prompt) -> None:
        model = make_model()
        r = GenerateRequest(prompt(4), 60, seed=3, request_id="a")
        free = generate(make_engine(model), r)["a"].tokens.tolist()
        stops = (free[7], free[20])
        got = generate(make_engine(model), replace(r, stop_token_ids=stops))["a"]
        first = min(free.index(s) for s in stops)
        assert got.tokens.tolist() == free[: first + 1] and got.finish_reason == "stop"

    def test_parts_of_a_stream(self, prompt: Prompt) -> None:
        engine = make_engine(make_model())
        engine.add(GenerateRequest(prompt(4), 10, seed=3, request_id="a"), stream_interval=4)
        parts = []
        while engine.ready:
            parts += [e.generation for e in engine.step()]
        assert [len(p.tokens) for p in parts] == [4, 4, 2]
        assert [p.finish_reason for p in parts] == ["", "", "length"]
        assert [p.routes is None for p in parts] == [True, True, False] and len(parts[-1].versions) == 10

    def test_a_logprob_that_is_not_finite_ends_its_request_with_an_error(self, prompt: Prompt) -> None:
        model = make_model()
        with torch.no_grad():
            model.lm_head_weight[3] = torch.nan
        engine = make_engine(model, version=7)
        engine.add(GenerateRequest(prompt(4), 10, request_id="a"))
        (event,) = engine.step()
        assert event.error == "the logprob of the token at position 4 is not finite, under weight version 7"
        assert not engine.ready and engine.pool.free == engine.pool.n_blocks

    def test_a_broken_sequence_does_not_reach_its_neighbours(self, prompt: Prompt) -> None:
        """Padded keys are zeros, never what another request left behind: NaN there would poison a whole row."""
        model = make_model()
        with torch.no_grad():
            model.get_parameter("model.embed_tokens.weight")[5] = torch.nan
        engine = make_engine(model, kv_tokens=96, prefix_cache=False)
        sick = GenerateRequest(np.full(40, 5, np.int32), 8, request_id="sick")
        engine.add(sick)
        engine.step()
        well = [GenerateRequest(np.full(n, 6, np.int32), 4, seed=n, request_id=f"{n}", top_k=1) for n in (3, 30)]
        for g in generate(engine, *well).values():
            assert np.isfinite(g.logprobs).all()

    def test_selections_are_capped_by_request(self, prompt: Prompt) -> None:
        engine = make_engine(make_model("glm_moe_dsa"), record_selections=True, selection_bytes=1000)
        with pytest.raises(RequestError, match="the selections of 16 tokens take 1536 bytes, the cap is 1000"):
            engine.add(GenerateRequest(prompt(10), 6))


@pytest.mark.parametrize("chunk", [0, 1, 7])
def test_score_equals_a_full_forward(chunk: int, prompt: Prompt) -> None:
    model = make_model()
    engine = make_engine(model, max_batch=3)
    lines = [prompt(n) for n in (1, 2, 17, 40, 33)]
    for tokens, s in zip(lines, engine.score(lines, temperature=0.8, chunk=chunk), strict=True):
        full = full_forward(model, tokens, 0.8)
        assert s.logprobs.dtype == np.float32 and s.logprobs[0] == 0 and len(s.logprobs) == len(tokens)
        assert np.abs(full.of(tokens, 1) - s.logprobs[1:]).max(initial=0) < 1e-5
        assert s.routes is not None and (s.routes == full.routes).all()
    assert engine.pool.free == engine.pool.n_blocks and not engine.ready
    longest = prompt(engine.capacity)
    assert len(engine.score([longest])[0].logprobs) == engine.capacity
    with pytest.raises(RequestError, match="token_ids"):
        engine.score([prompt(engine.capacity + 1)])


def test_score_needs_an_idle_engine(prompt: Prompt) -> None:
    engine = make_engine(make_model())
    engine.add(GenerateRequest(prompt(4), 4))
    with pytest.raises(RuntimeError, match="needs an idle engine"):
        engine.score([prompt(3)])


def test_the_head_is_float32_in_a_bfloat16_model_and_follows_its_weights() -> None:
    engine = make_engine(make_model(dtype=torch.bfloat16))
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    for version in (0, 1):
        new = make_model(seed=version)
        engine.load_weights(version, new.state_dict())
        exact = hidden.double() @ new.lm_head_weight.bfloat16().double().T
        with torch.no_grad():
            assert (engine._logits(hidden) - exact).abs().max() < 1e-5


def test_a_bfloat16_engine_stays_near_its_own_score(rng: np.random.Generator) -> None:
    model = make_model(dtype=torch.bfloat16)
    r = GenerateRequest(rng.integers(0, VOCABULARY, 9, dtype=np.int32), 12, seed=1, request_id="a")
    got = generate(make_engine(model), r)["a"]
    (s,) = make_engine(model).score([np.concatenate([r.tokens, got.tokens])], chunk=1)
    # bfloat16 rounds prompts in one piece otherwise than token by token; a wrong row would be off by whole nats.
    assert np.abs(s.logprobs[9:] - got.logprobs).max() < 0.3
