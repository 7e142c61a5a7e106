"""The threads around an engine: `Driver` owns and steps it, `Updater` pulls weight versions for it.

What anybody else wants of the engine is a function that the driver runs between two steps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from prl.inference.engine import Engine, Event
from prl.monitor.metrics import Metrics
from prl.transport.weights import WeightStore, WeightStoreError

T = TypeVar("T")
log = logging.getLogger(__name__)

IDLE_SPAN_S = 0.05
UPDATE_WAIT_S = 20.0
"""The end of a weight update is waited for no longer: less than a client waits for its answer, so that it is told why."""


class EngineStopped(RuntimeError):
    """The engine is no more, so it will not do what was asked of it."""


class UpdateUnderWay(RuntimeError):
    """A weight update has not ended in time."""


class Driver(threading.Thread):
    """Owns the engine and steps it. `deliver` gets the events of a step, in this thread; `failed` an error that ended it.

    Futures have no deadline of their own: each ends with the engine, by `refuse`, and who watches `silent_s` calls that.
    """

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[list[Event]], None],
        failed: Callable[[BaseException], None],
        metrics: Metrics | None = None,
    ):
        super().__init__(name="engine", daemon=True)
        self.engine, self._deliver, self._failed, self._metrics = engine, deliver, failed, metrics
        self._commands: deque[tuple[Callable[[Engine], Any], Future[Any] | None]] = deque()
        self._wake, self._stop_asked, self._ended = threading.Event(), False, False
        self._drained: list[Future[None]] = []
        self._open: set[Future[Any]] = set()  # promised and not kept yet
        self._pulse = time.monotonic()
        self.paused = self.frozen = self._updating = False

    def post(self, function: Callable[[Engine], Any]) -> None:
        """Run `function(engine)` between two steps."""
        self._queue(function, None)

    @property
    def silent_s(self) -> float:
        """Seconds since the thread last came round: little when it is idle, more than a step only if one hangs."""
        return time.monotonic() - self._pulse

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """`post` with a future of the result."""
        future: Future[T] = self._promise()
        self._queue(function, future)
        return future

    def _queue(self, function: Callable[[Engine], Any], future: Future[Any] | None) -> None:
        self._commands.append((function, future))
        self._wake.set()
        if self._ended:
            self.refuse()

    def _promise(self) -> Future[Any]:
        future: Future[Any] = Future()
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    def refuse(self) -> None:
        """Nobody waits for ever for an engine that is no more: whatever was asked of it fails, now and from now on."""
        self._ended = True
        for future in self._open.copy():
            _settle(future, error=EngineStopped(f"{self.engine.name}: the engine has stopped"))

    def pause(self, mode: str, clear_cache: bool) -> Future[None]:
        """Admit nothing more. `abort` ends what there is, `keep` freezes it, `wait`: the future is done when it has ended."""
        done: Future[None] = self._promise()

        def apply(engine: Engine) -> None:
            self.paused = True
            self._hold()
            if mode == "abort":
                engine.abort()
            if mode == "keep":
                self.frozen = True
            elif clear_cache:
                engine.reset_prefix_cache()
            if mode == "wait":
                self._drained.append(done)
            else:
                _settle(done)

        self.post(apply)
        return done

    def resume(self) -> Future[None]:
        def apply(_: Engine) -> None:
            self.paused = self.frozen = False
            self._hold()

        return self.call(apply)

    def updating(self, on: bool) -> Future[None]:
        """Hold new requests back from the start of a weight update to its end."""

        def apply(_: Engine) -> None:
            self._updating = on
            self._hold()

        return self.call(apply)

    def _hold(self) -> None:
        self.engine.held = self.paused or self._updating

    def stop(self) -> None:
        self._stop_asked = True
        self._wake.set()

    def run(self) -> None:
        try:
            while not self._stop_asked:
                self._pulse = time.monotonic()
                self._wake.clear()
                self._run_commands()
                if self.engine.ready and not self.frozen:
                    if events := self.engine.step():
                        self._deliver(events)
                else:
                    self._wait()
                if self._drained and not self.engine.running:
                    for future in self._drained:
                        _settle(future)
                    self._drained.clear()
        except BaseException as e:
            log.exception("the engine has stopped")
            self._failed(e)
        finally:
            self.refuse()

    def _run_commands(self) -> None:
        while self._commands:
            function, future = self._commands.popleft()
            try:
                result = function(self.engine)
            except Exception as e:
                if future is None:
                    raise
                _settle(future, error=e)
            else:
                if future is not None:
                    _settle(future, result)

    def _wait(self) -> None:
        t0 = time.time()
        self._wake.wait(1.0)
        if self._metrics is not None and time.time() - t0 > IDLE_SPAN_S:
            what = "resume" if self.paused else "weights" if self._updating else "requests"
            self._metrics.log("span", name="wait", what=what, t0=t0, t1=time.time())


def _settle(future: Future[Any], result: Any = None, error: BaseException | None = None) -> None:
    """Unless it is settled: its caller may have gone away, or the engine may have been given up."""
    with suppress(InvalidStateError):
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


class Updater(threading.Thread):
    """Pulls the newest complete version whenever there is one, unless updates are held. `failed` as the driver's."""

    def __init__(
        self,
        driver: Driver,
        store: WeightStore,
        failed: Callable[[BaseException], None],
        poll_s: float,
        metrics: Metrics | None = None,
        wait_s: float = UPDATE_WAIT_S,
    ):
        super().__init__(name="weights", daemon=True)
        self._wait_s = wait_s
        self._driver, self._store, self._failed, self._poll_s, self._metrics = driver, store, failed, poll_s, metrics
        self._stop_asked, self._busy = threading.Event(), threading.Lock()
        self._held_until = 0.0

    def hold(self, deadline_s: float) -> int:
        """Apply no version until `release` or the deadline; waits for the end of an update under way. Returns the version."""
        with self._between_updates():
            self._held_until = time.monotonic() + deadline_s
            return self._driver.engine.version

    def release(self) -> bool:
        """Whether updates were held until now, so that the version has not changed since `hold`."""
        with self._between_updates():
            held, self._held_until = self.held, 0.0
            return held

    @contextmanager
    def _between_updates(self) -> Iterator[None]:
        if not self._busy.acquire(timeout=self._wait_s):
            engine = self._driver.engine
            raise UpdateUnderWay(
                f"{engine.name}: the weight update that follows version {engine.version} has not ended within "
                f"{self._wait_s:g} s; it reads {self._store.root}"
            )
        try:
            yield
        finally:
            self._busy.release()

    @property
    def held(self) -> bool:
        return time.monotonic() < self._held_until

    def stop(self) -> None:
        self._stop_asked.set()

    def run(self) -> None:
        refused = -1
        try:
            while not self._stop_asked.wait(self._poll_s):
                versions = self._store.versions()
                if versions and versions[-1] > max(self._driver.engine.version, refused):
                    with self._busy:
                        if not self.held:
                            refused = self._try(versions[-1])
        except BaseException as e:
            if not self._stop_asked.is_set():
                log.exception("no more weight updates")
                self._failed(e)

    def _try(self, version: int) -> int:
        """Update; the version if it could not be applied, else −1. The engine then goes on with what it has until the next."""
        try:
            self._update()
            return -1
        except (WeightStoreError, ValueError) as e:
            log.error("weight version %d not applied: %s", version, e)
            if self._metrics is not None:
                self._metrics.log("event", name="weight_update_failed", version=version, error=str(e))
            return version

    def _update(self) -> None:
        t0 = time.time()
        self._driver.updating(True).result()
        try:
            if (found := self._store.load_latest(self._driver.engine.version)) is None:
                return
            manifest, tensors = found
            t1 = time.time()
            self._driver.call(lambda engine: engine.load_weights(manifest.version, tensors)).result()
        finally:
            self._driver.updating(False).result()
        if self._metrics is not None:
            self._metrics.log(
                "span", name="update", version=manifest.version, step=manifest.step, t0=t0, loaded=t1, t1=time.time()
            )
