"""The one client of every engine: token-in token-out over HTTP, replicas that may change, retries within bounds.

Free of torch. It speaks vLLM's routes; what only the embedded engine has is named so.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import aiohttp
import numpy as np
import orjson

from prl.inference.api import EngineError, GenerateRequest, Generation
from prl.inference.wire import read_choice, write_request
from prl.transport.run_dir import RunDir

T = TypeVar("T")

SESSIONS = 65536
"""Sessions remembered at once; the longest unused is forgotten, and its rollout would get a new salt."""
BACKOFF_S = 0.5
CONNECT_S = 10.0
CONTROL_S = 30.0
AWAY_S = 1.0
"""How often a request that waits for its answer looks whether its replica is still there."""
GENERATE = "/inference/v1/generate"
VLLM_ID = "generate-tokens-"
"""What vLLM calls a request of that route is this and the id that it was given; an id that nobody bears is no error."""
GAUGES = {
    "num_requests_running": "running",
    "num_requests_waiting": "waiting",
    "kv_cache_usage_perc": "kv_use",
    "prompt_tokens_total": "tokens_prompt",
    "generation_tokens_total": "tokens_generated",
    "prefix_cache_queries_total": "prefix_queries",
    "prefix_cache_hits_total": "prefix_hits",
}


@dataclass(frozen=True, slots=True)
class Replica:
    name: str
    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


def run_replicas(run: RunDir, count: int, *, period_s: float = 0.5) -> Callable[[], list[Replica]]:
    """The replicas that have announced themselves in the run; read anew every `period_s`, so a restarted one is found.

    Of the run's own there are `count`; others may come and go. They stand first, for the last one has the long work.
    """
    found: list[Replica] = []
    read_at = -period_s

    def replicas() -> list[Replica]:
        nonlocal found, read_at
        if (now := time.monotonic()) - read_at >= period_s or len(found) < count:
            read_at = now
            numbers = [int(p.stem.partition("-")[2]) for p in (run / "rendezvous").glob("inference-*.json")]
            numbers.sort(key=lambda number: (number < count, number))
            addresses = [(f"inference-{i}", run.address(f"inference-{i}")) for i in numbers]
            found = [Replica(name, a["host"], a["port"]) for name, a in addresses if a is not None]
        return found

    return replicas


class _Dead(Exception):
    """The replica did not answer; another may."""


class Client:
    """`async with Client(...) as client`. `addresses` is asked before every request, so replicas may come and go.

    moe_layers: the model's layers with experts; routes come back for these alone. timeout_s bounds every request, retries
    included; attempts bounds how often a request goes to a replica that turns out dead. An answer that has come is never
    asked for again; a streamed request is not repeated once its first part is there.
    """

    def __init__(
        self,
        addresses: Callable[[], list[Replica]],
        secret: str,
        *,
        moe_layers: Sequence[int] = (),
        timeout_s: float = 600.0,
        attempts: int = 4,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._addresses, self._moe_layers, self._timeout_s, self._attempts = addresses, tuple(moe_layers), timeout_s, attempts
        self._headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
        self._clock = clock
        self._http: aiohttp.ClientSession | None = None
        self._in_flight: dict[Replica, int] = {}
        self._avoid_until: dict[Replica, float] = {}
        self._confirmed: dict[Replica, int] = {}
        self._sessions: OrderedDict[str, tuple[Replica, str]] = OrderedDict()
        self._runs_at: dict[str, tuple[Replica, str]] = {}  # request id → where, and its id there
        self.retries = 0

    async def __aenter__(self) -> Client:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0)
        self._http = aiohttp.ClientSession(connector=connector, headers=self._headers, auto_decompress=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._http is not None:
            await self._http.close()

    # -- generation ----------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Generation:
        """The whole completion. Raises EngineError naming replica, route and what came."""

        async def attempt(replica: Replica, body: bytes, deadline: float) -> Generation:
            raw = await self._fetch(replica, "POST", GENERATE, deadline, body)
            return self._read(raw, request, replica, 0)

        t0 = self._clock()
        generation = await self._on_some_replica(request, attempt, stream=False)
        generation.timings["total_s"] = self._clock() - t0
        return generation

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Generation]:
        """Parts of a completion as they come; the last has a finish_reason, the routes, and the versions of the whole.

        Closing the iterator ends the request.
        """

        async def attempt(replica: Replica, body: bytes, deadline: float) -> tuple[Replica, Any, Generation]:
            chunks = self._chunks(replica, body, deadline)
            return replica, chunks, self._read(await anext(chunks), request, replica, 0)

        replica, chunks, part = await self._on_some_replica(request, attempt, stream=True)
        self._in_flight[replica] += 1
        total = 0
        try:
            while not part.finish_reason:
                total += len(part.tokens)
                yield part
                if (raw := await anext(chunks, None)) is None:
                    raise EngineError(f"{replica.name} ({replica.url}{GENERATE}): [DONE] without a finish_reason")
                part = self._read(raw, request, replica, total)
            with suppress(_Dead):  # all has come; to read on to the end keeps the connection
                await anext(chunks, None)
            yield part
        except _Dead as e:
            raise EngineError(f"after {total} tokens: {e}") from e
        finally:
            self._in_flight[replica] -= 1
            await chunks.aclose()

    async def salt(self, session: str) -> str:
        """The prefix-cache salt that this session's requests carry: a rollout's for life, unless it has to move."""
        return (await self._place(session, self._clock() + self._timeout_s))[1]

    def forget(self, session: str) -> None:
        """The rollout is over."""
        self._sessions.pop(session, None)

    async def _on_some_replica(
        self, request: GenerateRequest, attempt: Callable[[Replica, bytes, float], Coroutine[Any, Any, T]], *, stream: bool
    ) -> T:
        """Try one replica after the other until one answers; what failed before is named in the error."""
        deadline = self._clock() + self._timeout_s
        failures: list[str] = []
        base = request.request_id or secrets.token_hex(8)
        while len(failures) < self._attempts:
            try:
                replica, salt = await self._place(request.session, deadline)
            except EngineError as e:
                raise EngineError("; ".join([*failures, str(e)])) from None
            # An attempt has an id of its own: the replica may not have noticed yet that the one before is gone.
            request_id = f"{base}~{len(failures)}" if failures else base
            body = write_request(request, request_id=request_id, cache_salt=request.cache_salt or salt, stream=stream)
            self._in_flight[replica] = self._in_flight.get(replica, 0) + 1
            self._runs_at[base] = (replica, request_id)
            try:
                return await self._while_there(replica, attempt(replica, body, deadline))
            except _Dead as e:
                failures.append(str(e))
                self.retries += 1
                self._avoid_until[replica] = self._clock() + BACKOFF_S
            finally:
                self._in_flight[replica] -= 1
                self._runs_at.pop(base, None)
        raise EngineError(f"request {base!r} failed after {len(failures)} attempts: " + "; ".join(failures))

    async def _while_there(self, replica: Replica, answer: Coroutine[Any, Any, T]) -> T:
        """The answer. _Dead once the replica is no longer among the addresses: from a node without power nothing ever comes."""
        task = asyncio.create_task(answer)
        try:
            while not (await asyncio.wait({task}, timeout=AWAY_S))[0]:
                if replica not in self._addresses():
                    raise _Dead(f"{replica.name} ({replica.url}): no longer among the replicas")
            return task.result()
        finally:
            task.cancel()  # of no effect where it is done

    def _read(self, raw: bytes, request: GenerateRequest, replica: Replica, before: int) -> Generation:
        """Decode and check one answer or chunk; `before` tokens of the completion came in earlier chunks."""
        where = f"{replica.name} ({replica.url}{GENERATE})"
        try:
            body = orjson.loads(raw)
            if "error" in body:
                raise EngineError(f"{where}: {body['error'].get('message', body['error'])}")
            part = read_choice(body["choices"][0], self._moe_layers, replica.name)
        except (KeyError, TypeError, ValueError, IndexError) as e:
            raise EngineError(
                f"{where}: expected vLLM's generate response, found {raw[:200]!r}: {type(e).__name__}: {e}"
            ) from e
        n = before + len(part.tokens)
        if len(part.logprobs) != len(part.tokens):
            raise EngineError(f"{where}: {len(part.logprobs)} logprobs for {len(part.tokens)} tokens")
        if not np.isfinite(part.logprobs).all():
            raise EngineError(f"{where}: {np.count_nonzero(~np.isfinite(part.logprobs))} of {n} logprobs are not finite")
        if part.finish_reason:
            if len(part.versions) != n or (part.versions < 0).any():
                raise EngineError(f"{where}: weight_versions {part.versions.tolist()} do not cover the {n} tokens")
            rows = len(request.tokens) + n - 1 - request.routes_from
            if part.routes is not None and len(part.routes) != rows and part.finish_reason != "abort":
                raise EngineError(f"{where}: {len(part.routes)} rows of routed_experts, expected {rows}")
            if n:
                self._confirmed[replica] = max(self._confirmed.get(replica, -1), int(part.versions[-1]))
        return part

    async def _fetch(self, replica: Replica, method: str, path: str, deadline: float, body: bytes | None = None) -> bytes:
        """The body of an answer of status 200. _Dead where the replica is gone or going, else EngineError."""
        with self._named_errors(replica, path):
            async with self._request(replica, method, path, deadline, body) as response:
                raw = await response.read()
                self._check_status(response.status, raw)
                return raw

    async def _chunks(self, replica: Replica, body: bytes, deadline: float) -> AsyncGenerator[bytes]:
        """The data of each server-sent event, up to [DONE]. Raises as `_fetch` does."""
        with self._named_errors(replica, GENERATE):
            async with self._request(replica, "POST", GENERATE, deadline, body) as response:
                if response.status != 200:
                    self._check_status(response.status, await response.read())
                buffer, done = b"", False
                async for data in response.content.iter_any():
                    *events, buffer = (buffer + data).split(b"\n\n")
                    for event in events:
                        if event == b"data: [DONE]":
                            done = True
                        else:
                            yield event.removeprefix(b"data: ")
                if not done:
                    raise _Dead("the stream ended without [DONE]")

    def _request(
        self, replica: Replica, method: str, path: str, deadline: float, body: bytes | None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        if self._http is None:
            raise RuntimeError("Client: use it as `async with Client(...) as client`")
        timeout = aiohttp.ClientTimeout(total=max(deadline - self._clock(), 0.001), sock_connect=CONNECT_S)
        return self._http.request(method, replica.url + path, data=body, timeout=timeout)

    @staticmethod
    def _check_status(status: int, raw: bytes) -> None:
        if status >= 500:  # vLLM answers 500 to those who wait for an engine that dies
            raise _Dead(f"{status} {raw[:300]!r}")
        if status != 200:
            raise EngineError(f"{status} {raw[:300]!r}, expected 200")

    @contextmanager
    def _named_errors(self, replica: Replica, path: str) -> Iterator[None]:
        where = f"{replica.name} ({replica.url}{path})"
        try:
            yield
        except (_Dead, EngineError) as e:
            raise type(e)(f"{where}: {e}") from e.__cause__
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as e:  # a connection timeout is one of these
            raise _Dead(f"{where}: {type(e).__name__}: {e}") from e
        except TimeoutError as e:
            raise EngineError(
                f"{where}: no answer by the deadline of the call (the client's timeout is {self._timeout_s:g} s)"
            ) from e

    async def _place(self, session: str, deadline: float) -> tuple[Replica, str]:
        """The replica and the salt of a session. A new one goes where least is in flight."""
        while True:
            there = self._addresses()
            now = self._clock()
            live = [r for r in there if self._avoid_until.get(r, 0.0) <= now]
            placed = self._sessions.get(session)
            if placed is not None and placed[0] in live:
                self._sessions.move_to_end(session)
                return placed
            if live:
                replica = min(live, key=lambda r: (self._in_flight.get(r, 0), r.name))
                if (version := self._confirmed.get(replica)) is not None:
                    if session:
                        self._sessions[session] = (replica, str(version))
                        if len(self._sessions) > SESSIONS:
                            self._sessions.popitem(last=False)
                    return replica, str(version)
                try:
                    await self._version(replica, deadline)
                    continue  # others may have been placed meanwhile
                except _Dead:
                    self._avoid_until[replica] = self._clock() + BACKOFF_S
            if self._clock() >= deadline:
                names = ", ".join(f"{r.name} at {r.url}" for r in there) or "none has announced itself"
                raise EngineError(f"no replica answers within {self._timeout_s:g} s ({names})")
            await asyncio.sleep(0.02)

    # -- control -------------------------------------------------------------------------------------------------------

    async def versions(self) -> dict[str, int]:
        """The weight version that each replica says it has applied; one that does not answer is left out."""

        async def one(replica: Replica) -> tuple[str, int] | None:
            try:
                asked = self._version(replica, self._clock() + CONTROL_S)
                return replica.name, await self._while_there(replica, asked)
            except (_Dead, EngineError):
                return None

        return dict(v for v in await asyncio.gather(*map(one, self._addresses())) if v is not None)

    async def _version(self, replica: Replica, deadline: float) -> int:
        version = int(orjson.loads(await self._fetch(replica, "GET", "/weight_info", deadline))["weight_version"])
        self._confirmed[replica] = max(self._confirmed.get(replica, -1), version)
        return version

    async def pause(self, replica: Replica | str, *, mode: str = "wait", timeout_s: float | None = None) -> None:
        """New requests queue from now on; returns when the running ones have ended ("wait"), or at once: "keep" freezes
        them, "abort" ends them. The prefix cache stays."""
        await self._control(replica, f"/pause?mode={mode}&clear_cache=false", timeout_s or self._timeout_s)

    async def resume(self, replica: Replica | str) -> None:
        """Admit what has queued, by (priority, arrival)."""
        await self._control(replica, "/resume")

    async def hold_updates(self, replica: Replica | str, deadline_s: float) -> int:
        """Embedded engine: keep the weights as they are until `release_updates` or the deadline. Returns their version."""
        body = await self._control(replica, "/hold_updates", body={"deadline_s": deadline_s})
        return int(body["weight_version"])

    async def release_updates(self, replica: Replica | str) -> bool:
        """Whether the hold lasted until now: the weights have not changed since `hold_updates`."""
        return bool((await self._control(replica, "/release_updates"))["held"])

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests; their callers get what there is, with finish_reason abort."""
        where: dict[Replica, list[str]] = {}
        for request_id in request_ids:
            if (at := self._runs_at.get(request_id)) is not None:
                where.setdefault(at[0], []).extend((at[1], VLLM_ID + at[1]))
        path = "/inference/v1/abort_requests"
        await asyncio.gather(*(self._control(r, path, body={"request_ids": ids}) for r, ids in where.items()))

    async def metrics(self, replica: Replica | str) -> dict[str, float]:
        """running, waiting, kv_use, tokens_prompt, tokens_generated, prefix_queries, prefix_hits."""
        try:
            text = (await self._fetch(self._find(replica), "GET", "/metrics", self._clock() + CONTROL_S)).decode()
        except _Dead as e:
            raise EngineError(str(e)) from e
        out: dict[str, float] = {}
        for line in text.splitlines():
            name = line.partition("{")[0].removeprefix("vllm:")
            if name in GAUGES:
                out[GAUGES[name]] = out.get(GAUGES[name], 0.0) + float(line.rpartition(" ")[2])
        return out

    async def _control(
        self, replica: Replica | str, path: str, timeout_s: float = CONTROL_S, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        raw = orjson.dumps(body) if body is not None else None
        try:
            answer = await self._fetch(self._find(replica), "POST", path, self._clock() + timeout_s, raw)
            return orjson.loads(answer) if answer else {}  # vLLM's abort has nothing to say
        except _Dead as e:
            raise EngineError(str(e)) from e

    def _find(self, replica: Replica | str) -> Replica:
        if isinstance(replica, Replica):
            return replica
        there = self._addresses()
        for r in there:
            if r.name == replica:
                return r
        raise EngineError(f"no replica {replica!r}; there are {', '.join(r.name for r in there) or 'none'}")
