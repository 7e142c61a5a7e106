"""ASGI middleware of vLLM's server: every path but /health demands the run's secret."""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from prl.inference.vllm.settings import required
from prl.transport.run_dir import RunDir

Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

_BODY = json.dumps(
    {
        "error": {
            "message": "the Authorization header must be 'Bearer <secret>' with the run's secret (its file `secret`)",
            "type": "Unauthorized",
            "param": None,
            "code": 401,
        }
    }
).encode()


class Guard:
    def __init__(self, app: App):
        self._app = app
        self._expected = f"Bearer {RunDir(required().folder).secret}".encode()

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope["path"] == "/health"):
            return await self._app(scope, receive, send)
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) == 1 and hmac.compare_digest(given[0], self._expected):
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(_BODY)).encode())]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": _BODY})
