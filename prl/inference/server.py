"""The embedded engine behind HTTP, with vLLM's routes and fields. Every path but /health demands the run's secret.

The event loop's thread answers requests; the engine lives in the driver's. What a step finished reaches the event loop in one
call.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import msgspec
import orjson
import torch
import uvloop
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from prl.config.named import SetupError
from prl.config.schema import RunConfig
from prl.inference.api import GenerateRequest
from prl.inference.driver import Driver, EngineStopped, Updater, UpdateUnderWay
from prl.inference.engine import Engine, Event, RequestError, no_generation
from prl.inference.start import start_of
from prl.inference.wire import FieldError, decode, read_request, write_choice
from prl.models import precision
from prl.models.base import Model
from prl.models.registry import build
from prl.models.spec import read_spec
from prl.monitor.metrics import Metrics
from prl.monitor.status import Status
from prl.transport import ports
from prl.transport.run_dir import RunDir
from prl.transport.weights import WeightStore

MAX_BODY = 64 << 20
REPORT_S = 2.0
ALIVE_S = 5.0
"""The role shows life only while its engine came round this lately."""


def _worth_a_line(record: logging.LogRecord) -> bool:
    """Not what a malformed request makes aiohttp say: anybody could fill the disk with it."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


log = logging.getLogger(__name__)
log.addFilter(_worth_a_line)


class AbortBody(msgspec.Struct, forbid_unknown_fields=True):
    request_ids: list[str] | None = None


class HoldBody(msgspec.Struct, forbid_unknown_fields=True):
    deadline_s: float


_abort_body, _hold_body = msgspec.json.Decoder(AbortBody), msgspec.json.Decoder(HoldBody)


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def _error(status: int, message: str, param: str | None = None) -> web.Response:
    """vLLM's error body."""
    kind = {400: "BadRequestError", 401: "Unauthorized", 409: "Conflict"}.get(status, "InternalServerError")
    return _json({"error": {"message": message, "type": kind, "param": param, "code": status}}, status)


class Server:
    """`await start()`, then requests are answered until `await close()`. The engine's thread lives in between."""

    def __init__(
        self,
        engine: Engine,
        secret: str,
        *,
        stream_interval: int = 32,
        store: WeightStore | None = None,
        poll_s: float = 0.02,
        metrics: Metrics | None = None,
        stall_s: float = 60.0,
    ):
        """`stall_s`: an engine that has not come round for so long is given up."""
        self.stall_s = stall_s
        self.engine, self.stream_interval = engine, stream_interval
        self.driver = Driver(engine, self._deliver, self._on_failure, metrics)
        self.updater = Updater(self.driver, store, self._on_failure, poll_s, metrics) if store is not None else None
        self.failure = ""
        self._expected = f"Bearer {secret}".encode()
        self._listeners: dict[str, Callable[[Event], None]] = {}  # by the engine's id
        self._ids: dict[str, str] = {}  # the caller's request id → the engine's
        self._numbers = itertools.count()
        self._loop: asyncio.AbstractEventLoop
        self._runner: web.AppRunner
        self._watch: asyncio.Task[None]

    async def start(self, host: str = "127.0.0.1", port: int = 0, *, listener: socket.socket | None = None) -> int:
        """Listen there or on a socket that does already, and run; returns the port."""
        self._loop = asyncio.get_running_loop()
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.post("/inference/v1/generate", self._generate),
                web.post("/inference/v1/abort_requests", self._abort),
                web.post("/abort_requests", self._abort),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
                web.get("/is_paused", self._is_paused),
                web.get("/weight_info", self._weight_info),
                web.get("/metrics", self._metrics),
                web.post("/hold_updates", self._hold_updates),
                web.post("/release_updates", self._release_updates),
            ]
        )
        # A client that goes away cancels its handler, which aborts the request.
        self._runner = web.AppRunner(app, logger=log, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        site: web.BaseSite
        if listener is None:
            site = web.TCPSite(self._runner, host, port, backlog=1024)
        else:
            site = web.SockSite(self._runner, listener, backlog=1024)
        await site.start()
        self.driver.start()
        self._watch = asyncio.create_task(self._give_up_when_stalled())
        if self.updater is not None:
            self.updater.start()
        return int(self._runner.addresses[0][1])

    async def close(self) -> None:
        self._watch.cancel()
        if self.updater is not None:
            self.updater.stop()
        self.driver.stop()
        self._give_up("the server stops")  # callers may go to another replica at once
        await self._runner.cleanup()
        await asyncio.to_thread(self.driver.join, 5.0)

    # -- between the threads -------------------------------------------------------------------------------------------

    def _deliver(self, events: list[Event]) -> None:
        self._loop.call_soon_threadsafe(self._hand_out, events)

    def _hand_out(self, events: Iterable[Event]) -> None:
        for event in events:
            if (listener := self._listeners.get(event.request_id)) is not None:
                listener(event)

    def _on_failure(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._give_up, f"the engine has stopped: {type(error).__name__}: {error}")

    def _give_up(self, failure: str) -> None:
        """Answer 503 from now on, to those who wait too."""
        self.failure = self.failure or failure
        nothing = no_generation(self.engine.name, "error")
        self._hand_out([Event(i, nothing, error=failure) for i in self._listeners])
        self.driver.refuse()

    async def _give_up_when_stalled(self) -> None:
        """The deadline of everything that waits for the engine."""
        while (silent_s := self.driver.silent_s) < self.stall_s:
            await asyncio.sleep(min(1.0, self.stall_s - silent_s))
        self._give_up(f"the engine hangs: its step has taken {silent_s:.0f} s")

    # -- HTTP ----------------------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")  # as it came: bytes of any kind
        if request.path != "/health" and not hmac.compare_digest(given, self._expected):
            return _error(401, "the Authorization header must be 'Bearer <secret>' with the run's secret (its file `secret`)")
        try:
            return await handler(request)
        except (FieldError, RequestError) as e:
            return _error(400, str(e), e.name)
        except EngineStopped as e:
            return _error(503, self.failure or str(e))
        except UpdateUnderWay as e:
            return _error(409, str(e))

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.failure else 200)

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        request, body = read_request(await http.read())
        self.engine.check(request)
        name = request.request_id
        if name in self._ids:
            raise RequestError("request_id", f"{name!r} is running already")
        if self.failure:
            return _error(503, self.failure)
        # The engine gets an id of its own, so that nothing of an aborted request can reach one that bears its name again.
        request.request_id = self._ids[name] = f"{next(self._numbers)}"
        respond = self._stream if body.stream else self._respond
        try:
            return await respond(http, request, name, body.sampling_params.logprobs is not None)
        except asyncio.CancelledError:
            self.driver.post(lambda engine: engine.abort([request.request_id]))
            raise
        finally:
            del self._ids[name]
            self._listeners.pop(request.request_id, None)

    async def _respond(self, http: web.Request, request: GenerateRequest, name: str, logprobs: bool) -> web.StreamResponse:
        done: asyncio.Future[Event] = self._loop.create_future()
        self._listeners[request.request_id] = lambda event: None if done.done() else done.set_result(event)
        self.driver.post(lambda engine: engine.add(request))
        event = await done
        if event.error:
            return _error(503 if self.failure else 500, event.error)
        return _json(self._body(event, name, logprobs, len(event.generation.tokens)))

    async def _stream(self, http: web.Request, request: GenerateRequest, name: str, logprobs: bool) -> web.StreamResponse:
        """Server-sent events: a chunk per `stream_interval` tokens, routes and weight versions on the last, then [DONE]."""
        queue: asyncio.Queue[Event] = asyncio.Queue()
        self._listeners[request.request_id] = queue.put_nowait
        self.driver.post(lambda engine: engine.add(request, stream_interval=self.stream_interval))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(http)
        total = 0
        while True:
            event = await queue.get()
            total += len(event.generation.tokens)
            if event.error:
                chunk: dict[str, Any] = {"error": {"message": event.error, "type": "InternalServerError", "code": 500}}
            else:
                chunk = self._body(event, name, logprobs, total)
            await response.write(b"data: " + orjson.dumps(chunk) + b"\n\n")
            if event.error or event.generation.finish_reason:
                await response.write(b"data: [DONE]\n\n")
                await response.write_eof()
                return response

    def _body(self, event: Event, name: str, logprobs: bool, completion: int) -> dict[str, Any]:
        spec = self.engine.spec
        choice = write_choice(event.generation, logprobs=logprobs, moe_layers=spec.moe_layers, n_layers=spec.n_layers)
        usage = {
            "prompt_tokens": event.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": event.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": event.cached_tokens},
        }
        return {"request_id": name, "output_mode": "tokens", "choices": [choice], "usage": usage}

    async def _abort(self, http: web.Request) -> web.Response:
        raw = await http.read()
        names = (decode(raw, _abort_body).request_ids if raw else None) or list(self._ids)
        ids = [self._ids[name] for name in names if name in self._ids]
        n = await asyncio.wrap_future(self.driver.call(lambda engine: engine.abort(ids)))
        return _json({"status": "aborted", "aborted": n})

    async def _pause(self, http: web.Request) -> web.Response:
        mode = http.query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            raise FieldError("mode", f"{mode!r}, expected abort, wait or keep")
        clear_cache = http.query.get("clear_cache", "true").lower()
        if clear_cache not in ("true", "false"):
            raise FieldError("clear_cache", f"{clear_cache!r}, expected true or false")
        await asyncio.wrap_future(self.driver.pause(mode, clear_cache == "true"))
        return _json({"status": "paused"})

    async def _resume(self, _: web.Request) -> web.Response:
        await asyncio.wrap_future(self.driver.resume())
        return _json({"status": "resumed"})

    async def _is_paused(self, _: web.Request) -> web.Response:
        return _json({"is_paused": self.driver.paused})

    async def _weight_info(self, _: web.Request) -> web.Response:
        return _json({"weight_version": str(self.engine.version)})

    async def _hold_updates(self, http: web.Request) -> web.Response:
        deadline_s = decode(await http.read(), _hold_body).deadline_s
        if not deadline_s > 0:
            raise FieldError("deadline_s", f"{deadline_s}, expected seconds above 0")
        version = await asyncio.to_thread(self.updater.hold, deadline_s) if self.updater else self.engine.version
        return _json({"weight_version": str(version)})

    async def _release_updates(self, _: web.Request) -> web.Response:
        held = await asyncio.to_thread(self.updater.release) if self.updater else True
        return _json({"held": held, "weight_version": str(self.engine.version)})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=prometheus(self.engine), content_type="text/plain")


def prometheus(engine: Engine) -> str:
    """The gauges and counters under vLLM's names, in Prometheus' text format."""
    s = engine.stats()
    label = f'{{model_name="{engine.name}",engine="0"}}'
    lines = []
    for name, kind, value in (
        ("num_requests_running", "gauge", s["running"]),
        ("num_requests_waiting", "gauge", s["waiting"]),
        ("kv_cache_usage_perc", "gauge", s["kv_use"]),
        ("prompt_tokens_total", "counter", s["prompt"]),
        ("generation_tokens_total", "counter", s["generated"]),
        ("prefix_cache_queries_total", "counter", s["prefix_queries"]),
        ("prefix_cache_hits_total", "counter", s["prefix_hits"]),
    ):
        lines += [f"# TYPE vllm:{name} {kind}", f"vllm:{name}{label} {value}"]
    lines.append("# TYPE vllm:request_success_total counter")
    lines += [
        f'vllm:request_success_total{{model_name="{engine.name}",engine="0",finished_reason="{reason}"}} {n}'
        for reason, n in s["finished"].items()
    ]
    return "\n".join(lines) + "\n"


def main(run: RunDir, config: RunConfig, index: int, stop: threading.Event) -> int:
    """The inference role: weights from the store, requests over HTTP, until `stop`."""
    name = f"inference-{index}"
    metrics = run.metrics(name)
    status = run.status(name, metrics)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    spec = read_spec(start_of(run, config))
    store = WeightStore(run, config.transport)
    with status.waiting("the first weight version"):
        while (found := store.load_latest()) is None:
            status.beat()
            if stop.wait(config.transport.poll_s):
                return 0
    manifest, tensors = found
    engine = engine_of(build(spec, dtype=getattr(torch, config.inference.dtype)), config, name)
    check_layers(engine.fp8, manifest.fp8)
    engine.load_weights(manifest.version, tensors)
    server = Server(
        engine,
        run.secret,
        stream_interval=config.inference.stream_interval,
        store=store,
        poll_s=config.transport.poll_s,
        metrics=metrics,
        stall_s=config.launch.heartbeat_timeout_s,
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(server, run, name, status, metrics, stop))


def engine_of(model: Model, config: RunConfig, name: str) -> Engine:
    """The engine as configured. In deterministic mode no request reads what another one left in the cache."""
    c = config.inference
    precision.hold_codes(model, precision.engine_layers(config, model))
    return Engine(
        model,
        model.spec,
        max_batch=c.max_batch,
        max_prefill_tokens=c.max_prefill_tokens,
        kv_tokens=c.kv_tokens,
        prefix_cache=c.prefix_cache and not config.run.deterministic,
        record_routes=c.record_routes,
        record_selections=c.record_selections,
        selection_bytes=c.selection_bytes,
        bitwise=config.run.bitwise,
        name=name,
    )


async def _serve(server: Server, run: RunDir, name: str, status: Status, metrics: Metrics, stop: threading.Event) -> int:
    host = os.environ.get("PRL_HOST", "127.0.0.1")
    run.announce(name, host=host, port=await server.start(listener=ports.listener(name, host)))
    before, t = server.engine.stats(), time.time()
    status.set(phase="serving", step=before["version"])
    while not stop.is_set() and not server.failure:
        await asyncio.sleep(0.2)
        stats, now = server.engine.stats(), time.time()
        if now - t >= REPORT_S and server.driver.silent_s < ALIVE_S:
            rate = {f"{k}_per_s": (stats[k] - before[k]) / (now - t) for k in ("generated", "forwarded", "steps")}
            metrics.log("engine", **stats, **rate)
            status.set(phase="serving", step=stats["version"], tokens_per_s=rate["generated_per_s"], running=stats["running"])
            before, t = stats, now
        if server.driver.silent_s < ALIVE_S:
            status.beat()
    metrics.log("engine", **server.engine.stats())
    failure = server.failure
    await server.close()
    return 1 if failure else 0


def check_layers(engine: Sequence[str], trainer: Sequence[str]) -> None:
    """SetupError where engine and trainer both compute in FP8, but not the same layers."""
    if engine and trainer and (apart := precision.differences(engine, trainer, ("this engine", "the trainer"))):
        raise SetupError(
            f"layers in FP8: {apart}; let inference.fp8_layers and trainer.fp8_layers name the same, or leave the first out"
        )
