"""Real servers on loopback around real engines, and clients of them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from prl.inference.client import Client, Replica
from prl.inference.engine import Engine
from prl.inference.server import Server
from prl.models.base import Model
from tests.inference.tiny import make_model

SECRET = "a-secret" * 8
HEADERS = {"Authorization": f"Bearer {SECRET}"}


@asynccontextmanager
async def serving(
    model: Model | None = None, name: str = "inference-0", **kwargs: Any
) -> AsyncIterator[tuple[Server, Replica]]:
    """Options of the server by their name, all others are the engine's."""
    model = model or make_model()
    of_server = {k: kwargs.pop(k) for k in ("stream_interval", "store", "poll_s", "metrics", "stall_s") if k in kwargs}
    engine = Engine(model, model.spec, name=name, **({"kv_tokens": 8192, "max_batch": 16} | kwargs))
    server = Server(engine, SECRET, **of_server)
    port = await server.start()
    try:
        yield server, Replica(name, "127.0.0.1", port)
    finally:
        await server.close()


def client_of(*replicas: Replica, model: Model | None = None, **kwargs: Any) -> Client:
    layers = (model.spec if model else make_model().spec).moe_layers
    return Client(lambda: list(replicas), SECRET, moe_layers=layers, **({"timeout_s": 20.0} | kwargs))


@asynccontextmanager
async def raw(replica: Replica, headers: dict[str, str] | None = None) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(replica.url, headers=HEADERS if headers is None else headers) as session:
        yield session
