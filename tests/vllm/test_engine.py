"""Real vLLM under the one client: what it answers equals what the trainer's own model says, token by token."""

import asyncio
import time
from pathlib import Path

import aiohttp
import numpy as np
import orjson
import pytest

from prl.inference.api import EngineError, GenerateRequest, Generation
from prl.inference.client import Client
from tests.vllm.oracle import independent, mixed
from tests.vllm.rig import CONFIGS, VOCABULARY, Rig, logprobs, model_of, rig

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
EXACT = 2e-5
"""float32 logprobs of two implementations; 6e-6 is the most that was seen."""


def prompt(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.integers(0, VOCABULARY, n, dtype=np.int32)


def same_routes(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Whether the sets of experts are equal, per (token, layer)."""
    return (np.sort(a, -1) == np.sort(b, -1)).all(-1)


async def confirmed(client: Client, version: int) -> None:
    async with asyncio.timeout(20):
        while set((await client.versions()).values()) != {version}:
            await asyncio.sleep(0.01)


def check(rig: Rig, request: GenerateRequest, got: Generation) -> np.ndarray:
    """Of one version: lengths, logprobs and routes against the trainer's model. Returns which (row, layer) agree."""
    assert len(set(got.versions.tolist())) == 1
    tokens = np.concatenate([request.tokens, got.tokens])
    expected, routes = logprobs(rig.models[int(got.versions[0])], tokens, request.temperature)
    p = len(request.tokens)
    np.testing.assert_allclose(got.logprobs, expected[p:], atol=EXACT)
    assert got.routes is not None and got.routes.dtype == np.uint8
    agree = same_routes(got.routes, routes[request.routes_from : len(tokens) - 1])
    assert agree.shape == (len(tokens) - 1 - request.routes_from, len(rig.spec.moe_layers))
    return agree


async def answers(rig: Rig, client: Client, seed: int) -> None:
    """64 requests of many sizes at once."""
    rng = np.random.default_rng(seed)
    requests = [
        GenerateRequest(prompt(rng, int(rng.integers(1, 300))), int(rng.integers(1, 40)), seed=i, session=f"s{seed}-{i}")
        for i in range(60)
    ]
    requests += [
        GenerateRequest(prompt(rng, 20), 10, seed=0, temperature=t, session=f"t{seed}-{t}") for t in (0.5, 0.7, 1.3, 2.0)
    ]
    got = await asyncio.gather(*map(client.generate, requests))
    agree = np.concatenate([check(rig, r, g).ravel() for r, g in zip(requests, got, strict=True)])
    assert agree.mean() >= 0.999, f"{(~agree).sum()} of {agree.size}"
    assert all(len(g.tokens) == r.max_tokens and g.finish_reason == "length" for r, g in zip(requests, got, strict=True))


async def test_logprobs_and_routes_are_the_trainers_own(pair: Rig) -> None:
    async with pair.client(0, 1) as client:
        await answers(pair, client, 1)


async def test_qwen3_moe_too(tmp_path: Path) -> None:
    with rig(tmp_path, CONFIGS["qwen3_moe"]) as made:
        async with made.client() as client:
            await answers(made, client, 2)
            made.publish(model_of(CONFIGS["qwen3_moe"], 1))
            await confirmed(client, 1)
            await answers(made, client, 3)


async def test_truncated_distributions_and_stop_tokens(pair: Rig) -> None:
    rng = np.random.default_rng(2)
    async with pair.client(0) as client:
        free = await client.generate(GenerateRequest(prompt(rng, 10), 30, seed=4))
        stop = int(free.tokens[12])
        first = int(np.flatnonzero(free.tokens == stop)[0])
        request = GenerateRequest(prompt(np.random.default_rng(2), 10), 30, seed=4, stop_token_ids=(stop,))
        cut = await client.generate(request)
        assert cut.finish_reason == "stop" and cut.tokens.tolist() == free.tokens[: first + 1].tolist()
        check(pair, request, cut)
        top = await client.generate(GenerateRequest(prompt(rng, 10), 20, seed=1, top_k=2))
        tokens = np.concatenate([prompt(np.random.default_rng(2), 10), top.tokens])
        assert len(tokens) == 30 and (top.logprobs > np.log(0.5) - 5).all() and (np.exp(top.logprobs) > 0).all()
        one = await client.generate(GenerateRequest(prompt(rng, 10), 20, seed=1, top_k=1))
        np.testing.assert_allclose(one.logprobs, 0, atol=1e-6)


async def test_turns_send_their_own_routes_and_join_up(pair: Rig) -> None:
    """Rows of a long rollout, sent turn by turn, are those of one forward over all of it."""
    rng = np.random.default_rng(3)
    async with pair.client(0, 1) as client:
        tokens, rows, sampled = prompt(rng, 40), [], []
        for turn in range(20):
            start = sum(map(len, rows))
            request = GenerateRequest(tokens, 8, seed=turn, routes_from=start, session="turns")
            got = await client.generate(request)
            assert got.routes is not None and len(got.routes) == len(tokens) + 8 - 1 - start
            rows.append(got.routes)
            sampled.append((len(tokens), got))
            tokens = np.concatenate([tokens, got.tokens, prompt(rng, 5)])
        joined = np.concatenate(rows)
        version = int(sampled[0][1].versions[0])
        end = len(joined) + 1
        expected, routes = logprobs(pair.models[version], tokens[:end])
        assert same_routes(joined, routes[:-1]).mean() >= 0.999
        for at, got in sampled:
            np.testing.assert_allclose(got.logprobs, expected[at : at + 8], atol=EXACT)
        gauges = [await client.metrics(f"inference-{i}") for i in range(2)]
        assert sum(g["prefix_hits"] for g in gauges) > 0, "later turns read the cache of earlier ones"


async def test_a_chunked_prompt_with_a_seed(pair: Rig) -> None:
    """Prompts beyond a step's budget of tokens, which end an unpatched engine."""
    rng = np.random.default_rng(4)
    requests = [GenerateRequest(prompt(rng, 500), 4, seed=i, session=f"c{i}") for i in range(24)]
    async with pair.client(0) as client:
        got = await asyncio.gather(*map(client.generate, requests))
        for r, g in zip(requests, got, strict=True):
            check(pair, r, g)
        again = await client.generate(GenerateRequest(requests[5].tokens, 4, seed=5))
        assert again.tokens.tolist() == got[5].tokens.tolist(), "the noise does not depend on who shared the batch"


async def test_labels_are_exact_under_updates(pair: Rig, tmp_path: Path) -> None:
    """32 streams over two replicas, versions 200 ms apart: each token's logprob is that of its label's model, over the
    cache that was there; one token before or after a switch is not another's."""
    rng = np.random.default_rng(5)
    first = max(pair.models)
    async with pair.client(0, 1) as client:
        requests = [GenerateRequest(prompt(rng, 12), 400, seed=i, session=f"l{first}-{i}") for i in range(32)]
        running = [asyncio.ensure_future(client.generate(r)) for r in requests]
        await asyncio.sleep(0.5)
        models = [model_of(CONFIGS["glm4_moe"], 100 + i) for i in range(4)]
        for model in models:
            pair.publish(model)
            await asyncio.sleep(0.2)
        got = await asyncio.gather(*running)
        await confirmed(client, first + 4)
    both = {v: independent(m, tmp_path / f"m{v}") for v, m in pair.models.items() if v >= first}
    switches, worst = 0, 0.0
    for r, g in zip(requests, got, strict=True):
        tokens = np.concatenate([r.tokens, g.tokens])
        assert len(g.tokens) == 400 and (np.diff(g.versions) >= 0).all()
        worst = max(worst, float(np.abs(mixed(both, tokens, len(r.tokens), g.versions) - g.logprobs).max()))
        at = np.flatnonzero(np.diff(g.versions)) + 1
        switches += len(at)
        for early in (1, -1):
            moved = g.versions.copy()
            for i in at.tolist():
                moved[min(i, i - early) : max(i, i - early)] = g.versions[i] if early == 1 else g.versions[i - 1]
            wrong = np.abs(mixed(both, tokens, len(r.tokens), moved) - g.logprobs)
            assert not len(at) or wrong.max() > 1e-2, "a label one token off would be seen"
    assert worst < 1e-4, worst
    assert switches >= 32, f"{switches} switches of version in 32 streams"


async def test_a_new_rollout_reads_no_block_of_older_weights(pair: Rig) -> None:
    rng = np.random.default_rng(6)
    same = prompt(rng, 400)
    async with pair.client(0) as client:
        check(pair, GenerateRequest(same, 4), await client.generate(GenerateRequest(same, 4, session="old")))
        version = pair.publish(model_of(CONFIGS["glm4_moe"], 200)).version
        await confirmed(client, version)
        got = await client.generate(GenerateRequest(same, 4, session="new"))
        assert got.versions.tolist() == [version] * 4
        check(pair, GenerateRequest(same, 4), got)


async def test_updates_can_be_held(pair: Rig) -> None:
    async with pair.client(0) as client:
        version = await client.hold_updates("inference-0", 30)
        pair.publish(model_of(CONFIGS["glm4_moe"], 300))
        await asyncio.sleep(0.3)
        assert await client.versions() == {"inference-0": version}
        assert await client.release_updates("inference-0") is True
        await confirmed(client, version + 1)
        with pytest.raises(EngineError, match="400.*deadline_s"):
            await client.hold_updates("inference-0", -1)
    async with pair.client(0, 1) as client:
        await confirmed(client, version + 1)


async def test_pause_abort_and_resume(pair: Rig) -> None:
    rng = np.random.default_rng(7)
    async with pair.client(0) as client:
        await client.pause("inference-0", mode="keep")
        waiting = asyncio.ensure_future(client.generate(GenerateRequest(prompt(rng, 5), 5, request_id="waits")))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await client.resume("inference-0")
        assert len((await waiting).tokens) == 5
        endless = asyncio.ensure_future(client.generate(GenerateRequest(prompt(rng, 5), 1500, request_id="endless")))
        while (await client.metrics("inference-0"))["running"] == 0:
            await asyncio.sleep(0.01)
        await client.abort(["endless"])
        cut = await asyncio.wait_for(endless, 10)
        assert cut.finish_reason == "abort" and len(cut.tokens) < 1500


async def test_a_stream_has_all_parts(pair: Rig) -> None:
    rng = np.random.default_rng(8)
    request = GenerateRequest(prompt(rng, 9), 20, seed=3)
    async with pair.client(1) as client:
        parts = [part async for part in client.stream(request)]
    assert len(parts) > 3 and [p.finish_reason for p in parts[:-1]] == [""] * (len(parts) - 1)
    whole = parts[-1]
    whole.tokens = np.concatenate([p.tokens for p in parts])
    whole.logprobs = np.concatenate([p.logprobs for p in parts])
    assert check(pair, request, whole).mean() >= 0.999


async def test_what_vllm_refuses_is_named(pair: Rig) -> None:
    async with pair.client(0) as client:
        for request, words in (
            (GenerateRequest(np.zeros(2048, np.int32), 1), "maximum|context|length"),
            (GenerateRequest(np.array([1, VOCABULARY], np.int32), 4), "vocab"),
            (GenerateRequest(np.zeros(0, np.int32), 4), "token_ids|empty|at least"),
            (GenerateRequest(np.array([1], np.int32), 0), "max_tokens"),
            (GenerateRequest(np.array([1], np.int32), 4, temperature=-1.0), "temperature"),
        ):
            with pytest.raises(EngineError, match=f"inference-0.*400.*(?i:{words})"):
                await client.generate(request)
        assert len((await client.generate(GenerateRequest(np.array([1], np.int32), 4))).tokens) == 4, "it goes on"


async def test_every_route_but_health_demands_the_secret(pair: Rig) -> None:
    replica = pair.replica(0)
    async with aiohttp.ClientSession(replica.url) as http:
        async with http.get("/health") as response:
            assert response.status == 200
        routes = [line.split("Route: ")[1].split(", Methods: ") for line in whole_log(pair).splitlines() if "Route: " in line]
        asked = 0
        for path, methods in routes:
            if path == "/health":
                continue
            for method in methods.split(", "):
                async with http.request(method, path, headers={"Authorization": "Bearer no"}) as response:
                    assert response.status == 401, (method, path)
                    asked += 1
        assert asked > 20 and any(path == "/collective_rpc" for path, _ in routes)
    assert pair.run.secret not in whole_log(pair)


def whole_log(pair: Rig) -> str:
    return (pair.run / "logs" / "inference-0.log").read_text()


async def test_a_damaged_version_is_skipped(pair: Rig) -> None:
    version = pair.publish(model_of(CONFIGS["glm4_moe"], 400)).version
    async with pair.client(0, 1) as client:
        await confirmed(client, version)
        for i in range(2):
            await client.hold_updates(f"inference-{i}", 30)
        pair.publish(model_of(CONFIGS["glm4_moe"], 401))
        file = pair.store.root / f"v{version + 1}" / "weights-0.safetensors"
        damaged = bytearray(file.read_bytes())
        damaged[-1] ^= 1
        file.write_bytes(damaged)
        for i in range(2):
            await client.release_updates(f"inference-{i}")
        deadline = time.monotonic() + 10
        told: list[dict[str, object]] = []
        while len(told) < 2 and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
            records = map(orjson.loads, (pair.run / "metrics.jsonl").read_bytes().splitlines())
            told = [r for r in records if r.get("name") == "weight_update_failed"]
        assert {r["role"] for r in told} == {"inference-0", "inference-1"} and all("manifest says" in str(r) for r in told)
        assert set((await client.versions()).values()) == {version}
        request = GenerateRequest(np.array([1, 2, 3], np.int32), 8)
        check(pair, request, await client.generate(request))
        pair.publish(model_of(CONFIGS["glm4_moe"], 402))
        await confirmed(client, version + 2)
        check(pair, request, await client.generate(request))
