"""The folder of a run: where everything of it lies, its secret, and how its roles find each other."""

from __future__ import annotations

import hashlib
import os
import resource
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import orjson

from prl.monitor.metrics import Metrics
from prl.monitor.status import Status

SECRET_LENGTH = 64


def keep_private() -> None:
    """For every process of a run, first of all: what it and its children write is for its user alone whatever the user's umask,
    and none of them leaves its memory, which holds the secret, in a core file."""
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def exposed(path: Path, forbidden: int = 0o077) -> str:
    """How another user gets at a file or folder: it is theirs, or its mode has bits of `forbidden`. Empty where none does."""
    stat = path.stat()
    if stat.st_uid == os.geteuid() and not stat.st_mode & forbidden:
        return ""
    found = f"owner {stat.st_uid}, mode {stat.st_mode & 0o777:o}"
    return f"{path}: {found}; expected owner {os.geteuid()} and mode {0o777 & ~forbidden:o} at most"


class RunDir:
    """Paths below `root` (mode 0700): config.yaml, secret (0600), metrics.jsonl, status/, logs/, rendezvous/, checkpoints/,
    spool/, supervisor.json, versions.jsonl, ledger.jsonl, tasks.jsonl, precision.json, weights/, summary.json, report.html.
    """

    def __init__(self, root: Path | str):
        self.root = Path(root)

    def create(self) -> RunDir:
        """Make the folders and the secret where they are not there yet."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        if (owner := self.root.stat().st_uid) != os.geteuid():  # who could change its mode, and take the secret, at any time
            raise PermissionError(f"{self.root}: belongs to user {owner}, expected {os.geteuid()}; choose another run.name")
        self.root.chmod(0o700)  # it may have been there
        for name in ("status", "logs", "rendezvous", "checkpoints", "spool"):
            (self.root / name).mkdir(exist_ok=True, mode=0o700)
        if not self.secret_path.exists():
            fd = os.open(self.secret_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.write(fd, secrets.token_hex(SECRET_LENGTH // 2).encode())
            os.close(fd)
        return self

    def __truediv__(self, name: str) -> Path:
        return self.root / name

    @property
    def config_path(self) -> Path:
        return self.root / "config.yaml"

    @property
    def secret_path(self) -> Path:
        return self.root / "secret"

    @property
    def secret(self) -> str:
        if wrong := exposed(self.secret_path):
            raise PermissionError(f"{wrong}: others may know it; remove it to get a new one")
        secret = self.secret_path.read_text().strip()
        if len(secret) < SECRET_LENGTH:  # cut by a full disk or a lost write: too easy to guess
            raise OSError(f"{self.secret_path}: {len(secret)} characters, expected {SECRET_LENGTH}; remove it to get a new one")
        return secret

    @property
    def id(self) -> str:
        """The run's id on the wire: follows from the secret without telling it."""
        return hashlib.blake2b(self.secret.encode(), digest_size=8, person=b"prl-run-id").hexdigest()

    @property
    def mark(self) -> str:
        """What the run's processes on this machine carry (prl.launch.guard): its id, and which folder with it they are of."""
        stat = self.root.stat()
        return f"{self.id}.{hashlib.blake2b(b'%d %d' % (stat.st_dev, stat.st_ino), digest_size=4).hexdigest()}"

    def weights_path(self, where: Literal["filesystem", "shared_memory"]) -> Path:
        """The folder of published weight versions (`transport.weights`)."""
        return Path("/dev/shm") / f"prl-{self.id}" if where == "shared_memory" else self.root / "weights"

    def metrics(self, role: str) -> Metrics:
        return Metrics(self.root / "metrics.jsonl", role)

    def status(self, role: str, metrics: Metrics | None = None) -> Status:
        return Status(self.root / "status" / f"{role}.json", role, metrics)

    def read_status(self, role: str) -> dict[str, Any] | None:
        """A role's status (prl.monitor.status); None before its first."""
        path = self.root / "status" / f"{role}.json"
        return orjson.loads(path.read_bytes()) if path.exists() else None

    def record_supervisor(self, **state: Any) -> None:
        """supervisor.json: how the run stands (prl.launch.supervisor)."""
        self._write("supervisor.json", state)

    def read_supervisor(self) -> dict[str, Any] | None:
        """What the supervisor has said last; None before the first time, and of what is damaged."""
        try:
            state = orjson.loads((self.root / "supervisor.json").read_bytes())
        except (OSError, orjson.JSONDecodeError):
            return None
        return state if isinstance(state, dict) else None

    def stages(self) -> dict[str, dict[str, Any]]:
        """What was run so far: stage to {"wall_s": seconds over all lives of the run, "done"}."""
        path = self.root / "stages.json"
        try:
            stages = orjson.loads(path.read_bytes()) if path.exists() else {}
            return {name: {"wall_s": float(stage["wall_s"]), "done": bool(stage["done"])} for name, stage in stages.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise OSError(f"{path}: damaged: {e!r}; remove it, and every stage goes on from its last checkpoint") from e

    def record_stage(self, name: str, wall_s: float, *, done: bool) -> None:
        """Add `wall_s` to a stage."""
        stages = self.stages()
        before = stages.get(name, {"wall_s": 0.0})
        stages[name] = {"wall_s": before["wall_s"] + wall_s, "done": done}
        self._write("stages.json", stages)

    def record_precision(self, *, trainer: Sequence[str], engine: Sequence[str]) -> None:
        """precision.json: full names of the layers in FP8."""
        self._write("precision.json", {"trainer": list(trainer), "engine": list(engine)})

    def forget_roles(self, roles: Collection[str] | None = None) -> None:
        """Delete addresses and statuses of roles (all) that run no more."""
        for folder in ("rendezvous", "status"):
            for path in (self.root / folder).iterdir():
                if roles is None or path.stem in roles:
                    path.unlink(missing_ok=True)

    def _write(self, name: str, value: Any) -> None:
        """Write a JSON file whole."""
        path = self.root / name
        temporary = path.with_suffix(".tmp")
        try:
            temporary.write_bytes(orjson.dumps(value))
            temporary.replace(path)
        except OSError:  # a full disk: no empty file is left behind
            temporary.unlink(missing_ok=True)
            raise

    def announce(self, role: str, **address: Any) -> None:
        """Tell the other roles where this one listens: rendezvous/<role>.json, written whole."""
        self._write(f"rendezvous/{role}.json", {"pid": os.getpid(), "t": time.time(), **address})

    def address(self, role: str) -> dict[str, Any] | None:
        path = self.root / "rendezvous" / f"{role}.json"
        return orjson.loads(path.read_bytes()) if path.exists() else None

    def find(self, role: str, timeout_s: float, *, on_wait: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Wait for a role's address; TimeoutError names role and file. `on_wait` is called meanwhile (heartbeat)."""
        deadline = time.monotonic() + timeout_s
        while (address := self.address(role)) is None:
            on_wait()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{role} did not announce itself in {self.root / 'rendezvous'} within {timeout_s:g} s")
            time.sleep(0.02)
        return address
