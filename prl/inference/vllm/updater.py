"""Weight versions of the run's store into one engine, while its requests run. Free of torch and vLLM.

An update: the workers read the version into host memory while the engine goes on; then a pause that keeps requests and their
cache, the swap, the new version's name, and on. A token is labelled by what the engine is called when it is sampled, and the
name changes only inside the pause, so labels are exact. New requests wait inside the engine during the pause.

Before the swap a failure leaves the engine as it was: it is reported, and the version skipped. From the swap on weights may be
half new, so a failure or a missed deadline ends the engine (`failed`), with the engine's own words; it is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

log = logging.getLogger(__name__)

STAGED_S = 0.01
"""How often the workers are asked whether they have read the version."""
UPDATE_WAIT_S = 20.0
"""`hold` waits no longer for the end of an update: less than a client waits for its answer, so that it is told why."""


class StageFailed(Exception):
    """The workers could not read a version; the engine has what it had."""


class UpdateUnderWay(RuntimeError):
    """A weight update has not ended in time."""


class Engine(Protocol):
    async def stage(self, version: int) -> None:
        """Have every worker read a version in the background."""

    async def staged(self) -> bool:
        """Whether all have. StageFailed where one cannot."""

    async def pause(self) -> None: ...

    async def swap(self, version: int) -> None:
        """What was staged becomes the weights, and `version` their name."""

    async def resume(self) -> None: ...


class Updater:
    def __init__(
        self,
        engine: Engine,
        versions: Callable[[], list[int]],
        failed: Callable[[str], None],
        *,
        poll_s: float,
        deadline_s: float,
        record: Callable[..., None],
        wait_s: float = UPDATE_WAIT_S,
    ):
        """`versions`: ids of the complete ones, oldest first. `record(kind, **values)` logs; `failed` ends the engine."""
        self._engine, self._versions, self._failed, self._record = engine, versions, failed, record
        self._poll_s, self._deadline_s, self._wait_s = poll_s, deadline_s, wait_s
        self._busy = asyncio.Lock()
        self._held_until = 0.0
        self.version = -1
        """Confirmed; −1 before the first."""

    @property
    def held(self) -> bool:
        return time.monotonic() < self._held_until

    async def hold(self, deadline_s: float) -> int:
        """Apply no version until `release` or the deadline; waits for the end of an update under way. Returns the version."""
        async with self._between_updates():
            self._held_until = time.monotonic() + deadline_s
            return self.version

    async def release(self) -> bool:
        """Whether updates were held until now, so that the version has not changed since `hold`."""
        async with self._between_updates():
            held, self._held_until = self.held, 0.0
            return held

    @contextlib.asynccontextmanager
    async def _between_updates(self) -> Any:
        try:
            await asyncio.wait_for(self._busy.acquire(), self._wait_s)
        except TimeoutError:
            raise UpdateUnderWay(
                f"the weight update that follows version {self.version} has not ended within {self._wait_s:g} s"
            ) from None
        try:
            yield
        finally:
            self._busy.release()

    async def run(self) -> None:
        """Until cancelled, or until the engine had to be ended."""
        refused = -1
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                versions = await asyncio.to_thread(self._versions)  # a shared filesystem may take its time
                if versions and versions[-1] > max(self.version, refused):
                    async with self._busy:
                        if not self.held:
                            refused = await self._try(versions[-1])
            except Exception as e:
                log.exception("no more weight updates")
                self._failed(f"{type(e).__name__}: {e}")
                return

    async def _try(self, version: int) -> int:
        """Update; the version if it was not applied, else −1. Raises where the engine cannot go on."""
        t0 = time.time()
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._engine.stage(version)
                while not await self._engine.staged():
                    await asyncio.sleep(STAGED_S)
        except (StageFailed, TimeoutError) as e:
            why = str(e) or f"not read within {self._deadline_s:g} s"
            log.error("weight version %d not applied: %s", version, why)
            self._record("event", name="weight_update_failed", version=version, error=why)
            return version
        loaded = time.time()
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._engine.pause()
                await self._engine.swap(version)
                await self._engine.resume()
        except TimeoutError:
            raise TimeoutError(f"weight version {version} was not swapped in within {self._deadline_s:g} s") from None
        self.version = version
        self._record("span", name="update", version=version, t0=t0, loaded=loaded, t1=time.time())
        return -1
