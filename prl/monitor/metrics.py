"""metrics.jsonl: one JSON object a line, appended whole by every role of the host that runs trainer and orchestrator."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson


class Metrics:
    """Appends records {"t": epoch s, "role", "kind", ...}. One write call a record, so lines of several writers never mix.

    Kinds: "step" (one per optimizer step and role), "eval", "span" (what a role did or waited for, t0 to t1), "event",
    "sample" (a rollout's text for the report).
    """

    def __init__(self, path: Path, role: str):
        self.path, self.role = path, role
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def log(self, kind: str, **values: Any) -> None:
        record = {"t": time.time(), "role": self.role, "kind": kind, **values}
        line = orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY, default=str) + b"\n"
        try:
            os.write(self._fd, line)
        except OSError as e:
            raise OSError(e.errno, e.strerror, str(self.path)) from None

    @contextmanager
    def span(self, name: str, **values: Any) -> Iterator[None]:
        t0 = time.time()
        try:
            yield
        finally:
            self.log("span", name=name, t0=t0, t1=time.time(), **values)

    def close(self) -> None:
        os.close(self._fd)
