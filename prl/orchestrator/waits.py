"""What the orchestrator waits for: shown in its status, logged as a span when it changes, and bounded."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

from prl.monitor.status import Status


class Waits:
    """`on` names the wait, `moved` says that something happened; `check` raises TimeoutError after `timeout_s` without that."""

    def __init__(self, status: Status, timeout_s: float, *, clock: Callable[[], float] = time.monotonic):
        self._status, self._timeout_s, self._clock = status, timeout_s, clock
        self._what = ""
        self._span = ExitStack()
        self._moved = clock()

    def on(self, what: str) -> None:
        if what != self._what:
            self.off()
            self._what = what
            self._span.enter_context(self._status.waiting(what))

    def off(self) -> None:
        self._span.close()
        self._what = ""

    def moved(self) -> None:
        self._moved = self._clock()

    def check(self) -> None:
        if self._clock() - self._moved > self._timeout_s:
            raise TimeoutError(
                f"the orchestrator waited {self._timeout_s:g} s for {self._what}, and nothing happened meanwhile"
            )
