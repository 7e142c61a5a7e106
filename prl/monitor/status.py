"""What a role does and what it waits for, for anyone to see: one small JSON file a role, renewed at least once a second."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson

from prl.monitor.metrics import Metrics


def node_name() -> str:
    """This machine's, as Slurm calls it where it runs this process."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


class Status:
    """`phase`, `step`, `waits_for` of one role; its file's `t` is also the heartbeat. Thread-safe."""

    def __init__(self, path: Path, role: str, metrics: Metrics | None = None):
        self.path, self.role, self.metrics = path, role, metrics
        begin = {"role": role, "host": node_name(), "pid": os.getpid(), "phase": "starting", "step": 0, "waits_for": ""}
        self._state: dict[str, Any] = begin
        self._lock = threading.Lock()
        self._written = 0.0
        self.set()

    def set(self, **values: Any) -> None:
        with self._lock:
            self._state.update(values)
            self._write()

    def beat(self) -> None:
        """Renew the file if it is older than a second; cheap enough for every loop."""
        if time.time() - self._written > 1.0:
            self.set()

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Name what the role waits for; the time is logged as a span "wait"."""
        t0 = time.time()
        self.set(waits_for=what)
        try:
            yield
        finally:
            self.set(waits_for="")
            if self.metrics is not None and time.time() - t0 > 0.001:
                self.metrics.log("span", name="wait", what=what, t0=t0, t1=time.time())

    @contextmanager
    def failing(self, *, but: type[Exception]) -> Iterator[None]:
        """Put on record when what is inside fails, before it is cleaned up and others fail for it. `but`: told by another."""
        try:
            yield
        except Exception as e:
            if not isinstance(e, but):
                with suppress(OSError):  # what failed is what is to be told, not that this cannot be written either
                    self.set(failed=time.time())
            raise

    def _write(self) -> None:
        self._written = time.time()
        temporary = self.path.with_suffix(f".{threading.get_ident()}.tmp")
        try:
            temporary.write_bytes(orjson.dumps({**self._state, "t": self._written}))
            temporary.replace(self.path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
