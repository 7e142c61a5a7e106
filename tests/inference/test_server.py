"""The server over real HTTP: vLLM's routes and fields, the secret, pausing, weight updates."""

import asyncio
import base64
import io
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch

from prl.config.schema import Transport
from prl.inference.api import EngineError, GenerateRequest
from prl.inference.driver import EngineStopped
from prl.inference.engine import Engine
from prl.inference.server import Server
from prl.transport.run_dir import RunDir
from prl.transport.weights import WeightStore
from tests.inference.serving import client_of, raw, serving
from tests.inference.test_engine import check, generate
from tests.inference.tiny import full_forward, make_model, requests

PATHS = [
    ("POST", "/inference/v1/generate"),
    ("POST", "/inference/v1/abort_requests"),
    ("POST", "/abort_requests"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/is_paused"),
    ("GET", "/weight_info"),
    ("GET", "/metrics"),
    ("POST", "/hold_updates"),
    ("POST", "/release_updates"),
    ("GET", "/nowhere"),
]
BODY = {"token_ids": [1, 2, 3, 4, 5], "sampling_params": {"max_tokens": 6, "seed": 1, "logprobs": 0}}


async def wait_for(condition: Any, timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def test_strangers_write_nothing_into_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as (server, replica):
        for data in (
            b"\xff" * 100,
            b"GET / HTTP/1.1\r\n\r\n",
            b"GET http://[x HTTP/1.1\r\n\r\n",
            b"GET / HTTP/1.1\r\nA: " + b"x" * 20000,
        ):
            reader, writer = await asyncio.open_connection(replica.host, replica.port)
            writer.write(data + b"\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.0 400 "), data[:30]
            writer.close()
        assert not caplog.records
        server.driver.pause = None  # type: ignore[method-assign, assignment]
        async with raw(replica) as http:
            assert (await http.post("/pause")).status == 500
        assert "TypeError" in caplog.text, "but what fails here does"


async def test_every_path_but_health_demands_the_secret() -> None:
    async with serving() as (server, replica):
        registered = {(r.method, r.resource.canonical) for r in server._runner.app.router.routes() if r.method != "HEAD"}
        assert registered - {("GET", "/health")} == set(PATHS) - {("GET", "/nowhere")}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "a-secret"}, {"Authorization": "Bearer ü"}):
            async with raw(replica, headers) as http:
                for method, path in PATHS:
                    async with http.request(method, path, json=BODY) as r:
                        assert r.status == 401, (path, headers)
                        assert "Authorization" in (await r.json())["error"]["message"]
                assert (await http.get("/health")).status == 200
        reader, writer = await asyncio.open_connection(replica.host, replica.port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 "), "nor do bytes that are no text"
        writer.close()
        assert not server.driver.paused and server.engine.counts["prompt"] == 0


async def test_the_answer_has_vllms_fields() -> None:
    model = make_model("glm_moe_dsa", dtype=torch.float64)  # one dense layer, two with experts
    async with serving(model, version=3) as (_, replica), raw(replica) as http:
        async with http.post("/inference/v1/generate", json=BODY | {"request_id": "mine", "model": "m"}) as r:
            body = await r.json()
        assert body["request_id"] == "mine"
        assert body["usage"] == {
            "prompt_tokens": 5,
            "completion_tokens": 6,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        (choice,) = body["choices"]
        assert choice["index"] == 0 and choice["finish_reason"] == "length"
        assert choice["weight_versions"] == [{"version": "3", "start": 0, "end": 6}]
        assert [c["token_id"] for c in choice["logprobs"]["content"]] == choice["token_ids"]
        routes = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
        assert routes.shape == (10, 3, 2) and routes.dtype == np.uint8 and not routes[:, 0].any()
        tokens = np.array(BODY["token_ids"] + choice["token_ids"])
        full = full_forward(model, tokens)
        assert full.routes is not None and (routes[:, 1:] == full.routes[:-1]).all()
        assert np.allclose([c["logprob"] for c in choice["logprobs"]["content"]], full.of(tokens, 5), atol=1e-6)

        later = BODY | {"sampling_params": {"max_tokens": 6, "seed": 1, "routed_experts_prompt_start": 4}}
        async with http.post("/inference/v1/generate", json=later) as r:
            (choice,) = (await r.json())["choices"]
        assert choice["logprobs"] is None
        assert (np.load(io.BytesIO(base64.b64decode(choice["routed_experts"]))) == routes[4:]).all()


async def test_a_stream_has_vllms_chunks() -> None:
    async with serving(stream_interval=4) as (_, replica), raw(replica) as http:
        async with http.post("/inference/v1/generate", json=BODY) as r:
            whole = (await r.json())["choices"][0]
        async with http.post("/inference/v1/generate", json=BODY | {"stream": True}) as r:
            assert r.headers["Content-Type"] == "text/event-stream"
            *events, last, rest = (await r.read()).split(b"\n\n")
        assert last == b"data: [DONE]" and rest == b""
        choices = [orjson.loads(e.removeprefix(b"data: "))["choices"][0] for e in events]
        assert [len(c["token_ids"]) for c in choices] == [4, 2]
        assert sum((c["token_ids"] for c in choices), []) == whole["token_ids"]
        assert choices[0]["finish_reason"] is choices[0]["routed_experts"] is choices[0]["weight_versions"] is None
        assert {k: choices[1][k] for k in ("finish_reason", "routed_experts", "weight_versions")} == {
            k: whole[k] for k in ("finish_reason", "routed_experts", "weight_versions")
        }


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"token_ids": None}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1, 99]}, "token_ids"),
        ({"token_ids": [1, -1]}, "token_ids"),
        ({"token_ids": [1, 2.5]}, "token_ids"),
        ({"token_ids": [2**70]}, "token_ids"),
        ({"tokenids": [1]}, "tokenids"),
        ({"priority": "high"}, "priority"),
        ({"sampling_params": None}, "sampling_params"),
        ({"sampling_params": {"max_tokens": "6"}}, "max_tokens"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"sampling_params": {"max_tokens": 10**6}}, "max_tokens"),
        ({"sampling_params": {"n": 2}}, "n"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"temperature": 1e999}}, ""),
        ({"sampling_params": {"top_p": 1.5}}, "top_p"),
        ({"sampling_params": {"top_k": -5}}, "top_k"),
        ({"sampling_params": {"logprobs": 5}}, "logprobs"),
        ({"sampling_params": {"ignore_eos": False}}, "ignore_eos"),
        ({"sampling_params": {"stop_token_ids": [2**70]}}, "stop_token_ids"),
        ({"sampling_params": {"stop_token_ids": [48]}}, "stop_token_ids"),
        ({"sampling_params": {"temperature": 1e-30}}, "temperature"),
        ({"sampling_params": {"routed_experts_prompt_start": 6}}, "routed_experts_prompt_start"),
    ],
)
async def test_malformed_requests_name_their_field(change: dict[str, Any], field: str) -> None:
    async with serving() as (server, replica), raw(replica) as http:
        body = {k: v for k, v in (BODY | change).items() if v is not None}
        async with http.post("/inference/v1/generate", json=body) as r:
            answer = await r.json()
        assert r.status == 400 and field in (answer["error"]["param"] or ""), answer
        assert not server.engine.running and not server._ids
        async with http.post("/inference/v1/generate", json=BODY) as r:
            assert r.status == 200, "the server goes on"


async def test_bodies_that_are_no_requests() -> None:
    async with serving() as (_, replica), raw(replica) as http:
        for data in (b"", b"{", b"[]", b"\xff\xfe", b'{"token_ids": [1]'):
            assert (await http.post("/inference/v1/generate", data=data)).status == 400
        assert (await http.post("/hold_updates", json={"deadline_s": 0})).status == 400
        assert (await http.post("/hold_updates", json={})).status == 400
        assert (await http.post("/pause?mode=later")).status == 400
        assert (await http.post("/abort_requests", json={"request_ids": 5})).status == 400
        assert (await http.get("/inference/v1/generate")).status == 405


async def test_extreme_values_do_not_stop_the_engine() -> None:
    async with serving() as (server, replica), raw(replica) as http:
        for params in ({"top_k": 2**70}, {"seed": 2**200}, {"seed": -(2**70)}, {"top_p": 1e-300}, {"temperature": 1e5}):
            body = BODY | {"sampling_params": {"max_tokens": 3} | params, "priority": 2**80}
            async with http.post("/inference/v1/generate", json=body) as r:
                assert r.status == 200, (params, await r.text())
        assert not server.failure


async def test_many_at_once_equal_the_engine_alone(rng: np.random.Generator) -> None:
    model = make_model()
    given = requests(rng, 40)
    alone = generate(Engine(model, model.spec, max_batch=1, prefix_cache=False), *given)
    async with serving(model) as (_, replica), client_of(replica) as client:
        got = await asyncio.gather(*map(client.generate, given))
    for r, g in zip(given, got, strict=True):
        a = alone[r.request_id]
        assert g.tokens.tolist() == a.tokens.tolist() and np.abs(g.logprobs - a.logprobs).max() < 1e-5
        assert g.routes is not None and (g.routes == a.routes).all() and g.routes.dtype == np.uint8
        assert g.replica == "inference-0" and g.versions.tolist() == [0] * r.max_tokens
        check(model, r, g)


class TestPause:
    async def test_wait_drains_and_queues(self, rng: np.random.Generator) -> None:
        async with serving(max_batch=4) as (server, replica), client_of(replica) as client:
            long = [replace(r, max_tokens=100, request_id="") for r in requests(rng, 3)]
            running = [asyncio.ensure_future(client.generate(r)) for r in long]
            await wait_for(lambda: server.engine.running == 3)
            paused = asyncio.ensure_future(client.pause("inference-0"))
            await wait_for(lambda: server.driver.paused)
            late = asyncio.ensure_future(client.generate(GenerateRequest(long[0].tokens, 3)))
            await paused
            assert server.engine.running == 0 and [len((await r).tokens) for r in running] == [100] * 3
            await wait_for(lambda: server.engine.waiting == 1)
            assert (await client.metrics("inference-0"))["waiting"] == 1 and not late.done()
            await client.resume("inference-0")
            assert len((await late).tokens) == 3

    async def test_keep_freezes(self, rng: np.random.Generator) -> None:
        async with serving() as (server, replica), client_of(replica) as client:
            r = GenerateRequest(np.array([1, 2], np.int32), 150, seed=4)
            whole = await client.generate(r)
            running = asyncio.ensure_future(client.generate(r))
            await wait_for(lambda: server.engine.running == 1)
            await client.pause("inference-0", mode="keep")
            steps = server.engine.counts["steps"]
            await asyncio.sleep(0.05)
            assert server.engine.counts["steps"] == steps and not running.done()
            async with raw(replica) as http, http.get("/is_paused") as answer:
                assert await answer.json() == {"is_paused": True}
            await client.resume("inference-0")
            assert (await running).tokens.tolist() == whole.tokens.tolist()

    async def test_abort_is_vllms_default(self) -> None:
        async with serving() as (server, replica), client_of(replica) as client, raw(replica) as http:
            running = asyncio.ensure_future(client.generate(GenerateRequest(np.array([1, 2], np.int32), 200)))
            await wait_for(lambda: server.engine.counts["generated"] > 3)
            async with http.post("/pause") as r:
                assert await r.json() == {"status": "paused"}
            got = await running
            assert got.finish_reason == "abort" and 0 < len(got.tokens) < 200

    async def test_a_round_posted_in_any_order_is_the_same_bit_for_bit(self, rng: np.random.Generator) -> None:
        model = make_model()
        given = [replace(r, priority=i) for i, r in enumerate(requests(rng, 24))]
        results = []
        for order in (np.arange(24), rng.permutation(24)):
            async with serving(model, max_batch=8, prefix_cache=False) as (_, replica), client_of(replica) as client:
                await client.pause("inference-0")
                posted = [asyncio.ensure_future(client.generate(given[i])) for i in order]
                while (await client.metrics("inference-0"))["waiting"] < 24:
                    await asyncio.sleep(0.005)
                await client.resume("inference-0")
                got = await asyncio.gather(*posted)
                results.append({given[i].request_id: g for i, g in zip(order, got, strict=True)})
        for r in given:
            x, y = (got[r.request_id] for got in results)
            assert x.tokens.tolist() == y.tokens.tolist() and x.logprobs.tobytes() == y.logprobs.tobytes()


class TestAbort:
    async def test_by_id_and_all(self, rng: np.random.Generator) -> None:
        async with serving(max_batch=2) as (server, replica), client_of(replica) as client:
            given = [GenerateRequest(np.array([1, 2], np.int32), 220, seed=i, request_id=f"r{i}") for i in range(4)]
            running = [asyncio.ensure_future(client.generate(r)) for r in given]
            await wait_for(lambda: server.engine.running == 2 and server.engine.waiting == 2)
            await client.abort(["r0", "r3", "unknown"])
            assert [(await running[i]).finish_reason for i in (0, 3)] == ["abort", "abort"]
            assert not len((await running[3]).tokens)
            async with raw(replica) as http, http.post("/inference/v1/abort_requests") as r:
                assert (await r.json()) == {"status": "aborted", "aborted": 2}
            assert [(await running[i]).finish_reason for i in (1, 2)] == ["abort", "abort"]

    async def test_a_caller_that_goes_away_frees_its_row(self) -> None:
        async with serving() as (server, replica), client_of(replica) as client:
            r = GenerateRequest(np.array([1, 2], np.int32), 220, request_id="same")
            gone = asyncio.ensure_future(client.generate(r))
            await wait_for(lambda: server.engine.running == 1)
            gone.cancel()
            await wait_for(lambda: server.engine.running == 0 and not server._ids)
            assert server.engine.finished["abort"] == 1
            assert len((await client.generate(replace(r, max_tokens=5))).tokens) == 5

    async def test_a_stream_that_is_left_frees_its_row(self) -> None:
        async with serving(stream_interval=2) as (server, replica), client_of(replica) as client:
            stream = client.stream(GenerateRequest(np.array([1, 2], np.int32), 220))
            part = await anext(stream)
            assert len(part.tokens) == 2 and not part.finish_reason
            await stream.aclose()  # type: ignore[attr-defined]
            await wait_for(lambda: server.engine.running == 0)


async def test_metrics_count(rng: np.random.Generator) -> None:
    async with serving() as (_, replica), client_of(replica) as client:
        given = requests(rng, 6)
        got = await asyncio.gather(*map(client.generate, given))
        metrics = await client.metrics(replica)
        assert metrics["tokens_generated"] == sum(len(g.tokens) for g in got)
        assert metrics["tokens_prompt"] == sum(len(r.tokens) for r in given)
        assert metrics["running"] == metrics["waiting"] == metrics["kv_use"] == 0
        async with raw(replica) as http, http.get("/metrics") as r:
            text = await r.text()
        assert 'vllm:request_success_total{model_name="inference-0",engine="0",finished_reason="length"} 6' in text


async def test_an_engine_that_fails_tells_every_caller() -> None:
    async with serving() as (server, replica), client_of(replica, attempts=2) as client:
        server.engine.held = True
        waiting = asyncio.ensure_future(client.generate(GenerateRequest(np.array([1], np.int32), 4)))
        await wait_for(lambda: server.engine.waiting == 1)

        def fail(_: Engine) -> None:
            raise MemoryError("no more")

        server.driver.post(fail)
        with pytest.raises(EngineError, match="503 .*the engine has stopped: MemoryError: no more"):
            await waiting
        async with raw(replica) as http:
            assert (await http.get("/health")).status == 503


async def hangs(server: Server) -> threading.Event:
    """The engine's next step does not end before the event is set."""
    go = threading.Event()
    server.engine.step = lambda: go.wait(30) and []  # type: ignore[method-assign, assignment, return-value]
    return go


async def test_everybody_who_waits_for_a_hung_engine_is_told(tmp_path: Path) -> None:
    store = WeightStore(RunDir(tmp_path / "run").create(), Transport(weights="filesystem"))
    async with serving(store=store) as (server, replica), client_of(replica, attempts=1) as client:
        for _ in range(2):  # it comes round although it is idle
            pulse = server.driver._pulse
            await wait_for(lambda pulse=pulse: server.driver._pulse > pulse)
        go = await hangs(server)
        async with raw(replica) as http:
            body = BODY | {"stream": True, "request_id": "streamed"}
            stream = asyncio.ensure_future(http.post("/inference/v1/generate", json=body))
            whole = asyncio.ensure_future(client.generate(GenerateRequest(np.array([1], np.int32), 4)))
            await wait_for(lambda: server.driver.silent_s > 0.2)
            posts = [asyncio.ensure_future(http.post(p)) for p in ("/pause?mode=wait", "/pause", "/resume", "/abort_requests")]
            update = asyncio.ensure_future(asyncio.wrap_future(server.driver.updating(True)))
            await wait_for(lambda: len(server.driver._open) == 5)
            server.stall_s = 0.5
            async with asyncio.timeout(15):
                with pytest.raises(EngineError, match="the engine hangs"):
                    await whole
                assert "the engine hangs" in await (await stream).text()
                for post in posts:
                    answer = await post
                    assert answer.status == 503 and "the engine hangs" in await answer.text()
                with pytest.raises(EngineStopped):
                    await update
                assert (await http.get("/health")).status == 503
        go.set()


async def test_a_drain_ends_with_the_engine() -> None:
    async with serving() as (server, replica), raw(replica) as http:
        running = asyncio.ensure_future(
            http.post("/inference/v1/generate", json=BODY | {"sampling_params": {"max_tokens": 240}})
        )
        await wait_for(lambda: server.engine.running == 1)
        server.driver.frozen = True
        drain = asyncio.ensure_future(http.post("/pause?mode=wait"))
        await wait_for(lambda: server.driver._drained)

        def fail(_: Engine) -> None:
            raise MemoryError("no more")

        server.driver.post(fail)
        async with asyncio.timeout(5):
            assert (await drain).status == 503 and (await running).status == 503
            assert (await http.post("/resume")).status == 503, "asked after its end"


async def test_a_caller_that_leaves_a_pause_leaves_the_engine_alive() -> None:
    async with serving() as (server, replica), client_of(replica) as client, raw(replica) as http:
        whole = asyncio.ensure_future(client.generate(GenerateRequest(np.array([1, 2], np.int32), 200)))
        await wait_for(lambda: server.engine.running == 1)
        drain = asyncio.ensure_future(http.post("/pause?mode=wait"))
        await wait_for(lambda: server.driver._drained)
        drain.cancel()
        await wait_for(lambda: not server.driver._open)
        assert len((await whole).tokens) == 200
        await client.resume("inference-0")
        assert len((await client.generate(GenerateRequest(np.array([1], np.int32), 3))).tokens) == 3


class TestUpdates:
    """With the real weight store; the models' outputs differ by whole nats."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> WeightStore:
        return WeightStore(RunDir(tmp_path / "run").create(), Transport(weights="filesystem"))

    async def test_requests_in_flight_go_on_under_the_new_version(self, store: WeightStore) -> None:
        a, b = make_model(seed=0), make_model(seed=1)
        async with serving(make_model(seed=0), store=store) as (server, replica), client_of(replica) as client:
            given = [GenerateRequest(np.array([1, 2, i], np.int32), 240, seed=i) for i in range(6)]
            running = [asyncio.ensure_future(client.generate(r)) for r in given]
            await wait_for(lambda: server.engine.counts["generated"] > 100)
            assert await client.versions() == {"inference-0": 0}
            store.publish(7, 1, b.state_dict().items())
            await wait_for(lambda: server.engine.version == 7)
            got = await asyncio.gather(*running)
            assert await client.versions() == {"inference-0": 7}
            for r, g in zip(given, got, strict=True):
                old = int((g.versions == 0).sum())
                assert len(g.tokens) == 240 and 0 < old < 240 and (np.diff(g.versions) >= 0).all()
                tokens = np.concatenate([r.tokens, g.tokens])
                under_a = np.abs(full_forward(a, tokens).of(tokens, 3) - g.logprobs)
                assert under_a[:old].max() < 1e-5 and under_a[old:].max() > 0.5
            fresh = GenerateRequest(np.array([1, 2, 0], np.int32), 8, session="new")
            check(b, fresh, await client.generate(fresh))
            assert await client.salt("new") == "7"

    async def test_new_requests_wait_for_the_confirmation(self, store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
        loading, go = asyncio.Event(), False
        loop = asyncio.get_running_loop()
        load = store.load_latest

        def slow(newer_than: int = -1) -> Any:
            loop.call_soon_threadsafe(loading.set)
            while not go:
                time.sleep(0.005)
            return load(newer_than)

        monkeypatch.setattr(store, "load_latest", slow)
        async with serving(store=store) as (server, replica), client_of(replica) as client:
            before = asyncio.ensure_future(client.generate(GenerateRequest(np.array([1], np.int32), 200)))
            await wait_for(lambda: server.engine.running == 1)
            store.publish(1, 1, make_model(seed=1).state_dict().items())
            await loading.wait()
            new = asyncio.ensure_future(client.generate(GenerateRequest(np.array([2], np.int32), 4)))
            assert set((await before).versions.tolist()) == {0}, "the running one ends while the update loads"
            await wait_for(lambda: server.engine.waiting == 1)
            go = True
            assert (await new).versions.tolist() == [1] * 4

    async def test_held_updates_wait_for_release_or_deadline(self, store: WeightStore) -> None:
        state = make_model(seed=1).state_dict()
        async with serving(store=store) as (server, replica), client_of(replica) as client:
            assert await client.hold_updates("inference-0", 30.0) == 0
            store.publish(1, 1, state.items())
            await asyncio.sleep(0.15)
            got = await client.generate(GenerateRequest(np.array([1], np.int32), 30))
            assert set(got.versions.tolist()) == {0}
            assert await client.release_updates("inference-0") is True
            await wait_for(lambda: server.engine.version == 1)

            assert await client.hold_updates("inference-0", 0.2) == 1
            store.publish(2, 2, state.items())
            await wait_for(lambda: server.engine.version == 2)
            assert await client.release_updates("inference-0") is False, "the deadline ended the hold"

    async def test_a_hold_does_not_wait_for_an_update_without_end(
        self, store: WeightStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loading, go = threading.Event(), threading.Event()
        load = store.load_latest

        def slow(newer_than: int = -1) -> Any:
            loading.set()
            go.wait(60)
            return load(newer_than)

        monkeypatch.setattr(store, "load_latest", slow)
        async with serving(store=store) as (server, replica), client_of(replica) as client:
            assert server.updater is not None
            server.updater._wait_s = 0.2
            store.publish(1, 1, make_model(seed=1).state_dict().items())
            await wait_for(loading.is_set)
            for ask in (client.hold_updates(replica, 30.0), client.release_updates(replica)):
                with pytest.raises(EngineError, match=r"409 .*update that follows version 0 has not ended within 0.2 s"):
                    await ask
            go.set()
            await wait_for(lambda: server.engine.version == 1)
            assert await client.hold_updates(replica, 30.0) == 1

    async def test_a_damaged_version_is_skipped_and_the_next_one_taken(self, store: WeightStore, tmp_path: Path) -> None:
        metrics = RunDir(tmp_path / "run").metrics("inference-0")
        async with serving(store=store, metrics=metrics) as (server, replica), client_of(replica) as client:
            store.publish(1, 1, [("strange", torch.zeros(3))])
            log = tmp_path / "run" / "metrics.jsonl"
            await wait_for(lambda: "weight_update_failed" in log.read_text())
            assert (await client.generate(GenerateRequest(np.array([1], np.int32), 3))).versions.tolist() == [0] * 3
            store.publish(2, 2, make_model(seed=1).state_dict().items())
            await wait_for(lambda: '"update"' in log.read_text())
            assert server.engine.version == 2
            lines = [orjson.loads(line) for line in log.read_text().splitlines()]
            (failed,) = [e for e in lines if e.get("name") == "weight_update_failed"]
            assert failed["version"] == 1 and "missing" in failed["error"]
            assert [e["version"] for e in lines if e.get("name") == "update"] == [2]
