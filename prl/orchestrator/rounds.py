"""Deterministic generation: the requests of all live rollouts go to the engines together, so that what shares a batch follows
from the set of requests alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from prl.inference.api import EngineError, GenerateRequest, Generation
from prl.inference.client import Client, Replica

POLL_S = 0.005
Key = tuple[int, int]
"""(task's ordinal, index in its group). A rollout has one request at a time, so branch and turn need not be told apart."""


@dataclass(slots=True)
class _Waiting:
    key: Key
    request: GenerateRequest
    answer: asyncio.Future[Generation]


class RoundClient:
    """A barrier before the engines. A round starts once every live rollout either waits with a request or has ended.

    Each replica is paused, the requests are posted in the order of their keys with rising priorities, all replicas resume
    when all requests are queued there, and the next round starts when every answer has come.
    """

    def __init__(self, client: Client, replicas: Callable[[], list[Replica]], *, timeout_s: float):
        self._client, self._replicas, self._timeout_s = client, replicas, timeout_s
        self._live: set[str] = set()
        self._waiting: list[_Waiting] = []
        self._busy = False
        self.rounds = 0

    def join(self, rollout_id: str) -> None:
        """A rollout that will ask; call it for all of a round before any of them runs."""
        self._live.add(rollout_id)

    def leave(self, rollout_id: str) -> None:
        self._live.discard(rollout_id)
        self._start()

    async def generate(self, key: Key, request: GenerateRequest) -> Generation:
        waiting = _Waiting(key, request, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._start()
        return await waiting.answer

    def _start(self) -> None:
        if self._waiting and not self._busy and len(self._waiting) == len(self._live):
            self._busy = True
            ready, self._waiting = sorted(self._waiting, key=lambda w: w.key), []
            self._task = asyncio.ensure_future(self._run(ready))

    async def _run(self, ready: list[_Waiting]) -> None:
        posts: list[asyncio.Task[Generation]] = []
        answers: list[Generation | BaseException]
        replicas = self._replicas()
        try:
            await asyncio.gather(*(self._client.pause(r, mode="keep") for r in replicas))
            for priority, waiting in enumerate(ready):
                waiting.request.priority = priority
                posts.append(asyncio.ensure_future(self._client.generate(waiting.request)))
            await self._queued(replicas, posts)
            await asyncio.gather(*(self._client.resume(r) for r in replicas))
            answers = await asyncio.gather(*posts, return_exceptions=True)
        except Exception as e:
            for post in posts:
                post.cancel()
            with contextlib.suppress(EngineError):
                await asyncio.gather(*(self._client.resume(r) for r in replicas))
            answers = [e for _ in ready]
        self.rounds += 1
        self._busy = False
        for waiting, answer in zip(ready, answers, strict=True):
            if waiting.answer.done():  # its rollout was cancelled
                continue
            if isinstance(answer, BaseException):
                waiting.answer.set_exception(answer)
            else:
                waiting.answer.set_result(answer)

    async def _queued(self, replicas: list[Replica], posts: list[asyncio.Task[Generation]]) -> None:
        """Until the paused replicas hold every request that was not refused."""
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        while True:
            gauges = await asyncio.gather(*(self._client.metrics(r) for r in replicas))
            there, expected = sum(int(g["waiting"]) for g in gauges), sum(not p.done() for p in posts)
            if there >= expected:
                return
            if asyncio.get_running_loop().time() > deadline:
                raise EngineError(f"{there} of {expected} requests of a round are queued after {self._timeout_s:g} s")
            await asyncio.sleep(POLL_S)
