"""The client against servers that answer, vanish, come back, or answer nonsense."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest
from aiohttp import web

from prl.inference.api import EngineError, GenerateRequest
from prl.inference.client import Client, Replica, run_replicas
from prl.inference.wire import write_npy
from prl.transport.run_dir import RunDir
from tests.inference.serving import SECRET, client_of, serving
from tests.inference.test_server import wait_for

SHORT = GenerateRequest(np.array([1, 2, 3], np.int32), 5, seed=1)
LONG = GenerateRequest(np.array([1, 2, 3], np.int32), 200, seed=1)


@asynccontextmanager
async def answering(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[Replica]:
    """A server of another make: `handler` answers generate."""

    async def weight_info(_: web.Request) -> web.Response:
        return web.json_response({"weight_version": "0"})

    app = web.Application()
    app.router.add_post("/inference/v1/generate", handler)
    app.router.add_get("/weight_info", weight_info)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield Replica("other", "127.0.0.1", runner.addresses[0][1])
    finally:
        await runner.cleanup()


async def test_import_without_torch() -> None:
    code = "import sys, prl.inference.client; assert 'torch' not in sys.modules"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await process.wait() == 0


async def test_parts_of_a_stream_are_the_whole() -> None:
    async with serving(stream_interval=3) as (_, replica), client_of(replica) as client:
        whole = await client.generate(SHORT)
        for _ in range(2):  # the connection is used again
            parts = [p async for p in client.stream(SHORT)]
            assert [len(p.tokens) for p in parts] == [3, 2] and [p.finish_reason for p in parts] == ["", "length"]
            assert np.concatenate([p.tokens for p in parts]).tolist() == whole.tokens.tolist()
            assert np.concatenate([p.logprobs for p in parts]).tolist() == whole.logprobs.tolist()
            assert parts[-1].versions.tolist() == whole.versions.tolist()
            assert parts[-1].routes is not None and (parts[-1].routes == whole.routes).all()


async def test_sessions_stay_where_they_are_and_new_ones_spread() -> None:
    async with (
        serving(name="a", version=4) as (_, a),
        serving(name="b", version=5) as (_, b),
        client_of(a, b) as client,
    ):
        first = await asyncio.gather(*(client.generate(GenerateRequest(SHORT.tokens, 30, session=f"s{i}")) for i in range(8)))
        assert {g.replica for g in first} == {"a", "b"}
        for i, g in enumerate(first):
            assert await client.salt(f"s{i}") == {"a": "4", "b": "5"}[g.replica]
        again = await asyncio.gather(*(client.generate(GenerateRequest(SHORT.tokens, 2, session=f"s{i}")) for i in range(8)))
        assert [g.replica for g in again] == [g.replica for g in first]
        assert await client.versions() == {"a": 4, "b": 5}


async def test_a_session_keeps_its_salt_over_an_update_and_changes_it_with_the_replica() -> None:
    async with serving(name="a", version=4) as (server, a), serving(name="b", version=9) as (_, b):
        there = [a]
        async with Client(lambda: there, SECRET, moe_layers=(0, 1, 2)) as client:
            await client.generate(GenerateRequest(SHORT.tokens, 2, session="s"))
            server.engine.version = 5
            await client.generate(GenerateRequest(SHORT.tokens, 2, session="s"))
            assert await client.salt("s") == "4" and await client.salt("new") == "5"
            there[:] = [b]
            assert await client.salt("s") == "9"


async def test_a_dead_replica_is_left_for_another() -> None:
    async with serving(name="a") as (server, a), serving(name="b") as (_, b), client_of(a, b) as client:
        running = asyncio.ensure_future(client.generate(GenerateRequest(LONG.tokens, 200, seed=1, session="s")))
        await wait_for(lambda: server.engine.running == 1)
        await server.close()
        got = await running
        assert got.replica == "b" and len(got.tokens) == 200 and client.retries == 1
        assert (await client.generate(GenerateRequest(SHORT.tokens, 2, session="s"))).replica == "b"
        assert list(await client.versions()) == ["b"]


async def test_a_replica_that_never_comes_is_named() -> None:
    gone = Replica("gone", "127.0.0.1", 1)
    async with client_of(gone, timeout_s=0.3) as client:
        with pytest.raises(EngineError, match=r"no replica answers within 0.3 s \(gone at http://127.0.0.1:1\)"):
            await client.generate(SHORT)
        assert await client.versions() == {}
        with pytest.raises(EngineError, match=r"gone \(http://127.0.0.1:1/metrics\): ClientConnectorError"):
            await client.metrics("gone")
        with pytest.raises(EngineError, match="no replica 'x'; there are gone"):
            await client.resume("x")


async def test_a_replica_that_dies_again_and_again_is_given_up_within_bounds() -> None:
    asked = []

    async def drop(request: web.Request) -> web.StreamResponse:
        asked.append((await request.json())["request_id"])
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async with answering(drop) as replica, client_of(replica, attempts=3) as client:
        with pytest.raises(EngineError, match="request 'mine' failed after 3 attempts: other .*ServerDisconnected"):
            await client.generate(GenerateRequest(SHORT.tokens, 5, request_id="mine"))
    assert asked == ["mine", "mine~1", "mine~2"]


async def test_no_answer_by_the_deadline() -> None:
    async def sleep(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(10)
        return web.Response()

    async with answering(sleep) as replica, client_of(replica, timeout_s=0.3) as client:
        with pytest.raises(EngineError, match="other .*generate.*: no answer by the deadline"):
            await client.generate(SHORT)


async def test_a_replica_that_is_no_longer_there_is_not_waited_for() -> None:
    """As a node without power: nothing comes, not even the connection's end."""
    asked = asyncio.Event()

    async def sleep(_: web.Request) -> web.StreamResponse:
        asked.set()
        await asyncio.sleep(100)
        return web.Response()

    async with answering(sleep) as lost, serving(name="b") as (_, b):
        there = [lost]
        async with Client(lambda: there, SECRET, timeout_s=60) as client:
            running = asyncio.ensure_future(client.generate(SHORT))
            await asyncio.wait_for(asked.wait(), 10)
            there[:] = [b]
            got = await asyncio.wait_for(running, 10)
        assert got.replica == "b" and client.retries == 1


async def test_a_stream_is_not_repeated_once_it_has_begun() -> None:
    async with serving(name="a", stream_interval=2) as (server, a), serving(name="b") as (other, b):
        there = [a]
        async with Client(lambda: there, SECRET, moe_layers=(0, 1, 2)) as client:
            stream = client.stream(LONG)
            await anext(stream)
            there.append(b)
            server.driver.stop()
            await server._runner.cleanup()
            with pytest.raises(EngineError, match="after [0-9]+ tokens: a "):
                async for _ in stream:
                    pass
            assert not other.engine.counts["prompt"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"choices": []}, "expected vLLM's generate response"),
        ({"choices": [{"token_ids": [1], "finish_reason": "stop"}]}, "KeyError: 'logprobs'"),
        (
            {"choices": [{"token_ids": [1, 2], "logprobs": {"content": [{"logprob": -1}]}, "finish_reason": "stop"}]},
            "1 logprobs for 2",
        ),
        (
            {"choices": [{"token_ids": [1], "logprobs": {"content": [{"logprob": -1}]}, "finish_reason": "stop"}]},
            "do not cover the 1",
        ),
        (
            {
                "choices": [
                    {
                        "token_ids": [1],
                        "logprobs": {"content": [{"logprob": -1}]},
                        "finish_reason": "stop",
                        "weight_versions": [{"version": "1", "start": 0, "end": 1}],
                        "routed_experts": write_npy(np.zeros((1, 3, 1), np.uint8)),
                    }
                ]
            },
            "1 rows of routed_experts, expected 3",
        ),
        (
            {"choices": [{"token_ids": [1], "logprobs": {"content": [{"logprob": None}]}, "finish_reason": "stop"}]},
            "1 of 1 logprobs are not finite",
        ),
        (
            {"choices": [{"routed_experts": "AAAA", "token_ids": [], "logprobs": None, "finish_reason": "stop"}]},
            "expected .npy bytes",
        ),
    ],
)
async def test_nonsense_is_named(answer: dict[str, object], message: str) -> None:
    async def reply(_: web.Request) -> web.StreamResponse:
        return web.json_response(answer)

    async with answering(reply) as replica, client_of(replica) as client:
        with pytest.raises(EngineError, match=message) as e:
            await client.generate(SHORT)
        assert str(e.value).startswith("other (http://127.0.0.1:")
        assert client.retries == 0


@pytest.mark.parametrize("status", [500, 502, 503])
async def test_a_replica_that_fails_is_left_for_another_within_bounds(status: int) -> None:
    async def reply(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "EngineDeadError"}}, status=status)

    async with answering(reply) as broken, serving(name="z") as (_, sound):
        async with client_of(broken, sound) as client:
            assert (await client.generate(SHORT)).replica == "z" and client.retries == 1
        async with client_of(broken, attempts=2) as client:
            with pytest.raises(EngineError, match=f"failed after 2 attempts: other .*{status} .*EngineDeadError"):
                await client.generate(SHORT)


async def test_refusals_are_told_at_once() -> None:
    async with serving() as (_, replica):
        async with client_of(replica) as client:
            with pytest.raises(EngineError, match=r"inference-0 .*generate\): 400 .*token 99 is outside"):
                await client.generate(GenerateRequest(np.array([99], np.int32), 5))
        async with Client(lambda: [replica], "wrong") as client:
            with pytest.raises(EngineError, match="401"):
                await client.generate(SHORT)


async def test_replicas_of_a_run_are_found_again_after_a_restart(tmp_path: object) -> None:
    run = RunDir(str(tmp_path)).create()
    replicas = run_replicas(run, 2, period_s=0.0)
    assert replicas() == []
    run.announce("inference-1", host="127.0.0.1", port=5)
    assert replicas() == [Replica("inference-1", "127.0.0.1", 5)]
    run.announce("inference-0", host="127.0.0.1", port=6)
    run.announce("inference-1", host="127.0.0.1", port=7)
    assert replicas() == [Replica("inference-0", "127.0.0.1", 6), Replica("inference-1", "127.0.0.1", 7)]
