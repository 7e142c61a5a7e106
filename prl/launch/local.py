"""Executors start roles, watch and end them. `LocalExecutor` runs them as processes of this machine."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from prl.launch import guard
from prl.transport.run_dir import RunDir

_PR_SET_CHILD_SUBREAPER = 36
KILL_S = 5.0
_KEPT = frozenset(
    ["PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "TERM", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV"]
    + ["HF_HOME", "HF_HUB_OFFLINE", "TRITON_CACHE_DIR"]
)
_KEPT_PREFIXES = ("LC_", "PYTHON", "PRL_", "SLURM_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "TORCH", "XDG_", "MALLOC_")
_PRIVATE = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|JWT|COOKIE|(^|_)AUTH(_|$)", re.IGNORECASE)
"""In names of what is not for a role, whatever else is in them (SLURM_JWT, NVIDIA_API_KEY)."""
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "RAYON_NUM_THREADS")


@dataclass(frozen=True)
class RoleSpec:
    """One process of a run. `name` is unique in it, and names its log and its status file."""

    name: str
    command: tuple[str, ...]
    threads: int = 1
    env: Mapping[str, str] = field(default_factory=dict)


GONE = -signal.NSIG
"""The exit code of a role that is gone without a trace, as with its node."""


class Executor(Protocol):
    """Where roles run. A role is named by its spec; every method returns at once unless it says otherwise."""

    def start(self, specs: Sequence[RoleSpec]) -> None:
        """Start the roles. OSError where one cannot be started."""

    def poll(self) -> dict[str, int]:
        """Roles that ended since the last call, with their exit codes (negative: the signal that killed it, or GONE)."""

    def stopped(self) -> set[str]:
        """Roles that a signal has stopped (SIGSTOP, a debugger) and that have not ended."""

    def signal(self, names: Sequence[str], number: int) -> None:
        """Send a signal to roles; those that have ended are left out."""

    def end(self, names: Sequence[str]) -> None:
        """Kill these roles and forget them: `poll` does not tell of their ends. They may be started again at once."""

    def kill(self) -> list[str]:
        """End every process of the run, descendants too, within seconds. What would not die is described."""

    def log_tail(self, name: str, lines: int) -> list[str]:
        """The last lines that the role wrote since it was started."""

    def close(self) -> None:
        """`kill`, then remove what the executor put anywhere (temporary folders, shared memory)."""


class RunBusy(Exception):
    """Another supervisor (or the clean-up after one) holds the run."""


class RunLock:
    """One supervisor a folder: flock on its `lock`. The kernel frees it with its last holder, so it is never stale."""

    def __init__(self, run: RunDir, *, wait_s: float = 6.0):
        path = run / "lock"
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    holder = os.pread(self.fd, 20, 0).decode()
                    os.close(self.fd)
                    raise RunBusy(f"{path}: process {holder} runs this run; wait for it or end it") from None
                time.sleep(0.05)
            else:
                os.ftruncate(self.fd, 0)
                os.pwrite(self.fd, str(os.getpid()).encode(), 0)
                return

    def release(self) -> None:
        os.close(self.fd)


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and its control group's quota where there is one."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no control groups v2 here, or no quota ("max")
        return cores


def role_environment(base: Mapping[str, str], kept: Sequence[str], threads: int) -> dict[str, str]:
    """What a role inherits of `base`: names known to be needed and those in `kept`, no tokens or passwords; and its threads."""
    env = {
        k: v for k, v in base.items() if k in kept or k in _KEPT or (k.startswith(_KEPT_PREFIXES) and not _PRIVATE.search(k))
    }
    return {**env, **dict.fromkeys(_THREADS, str(threads)), "PYTHONUNBUFFERED": "1"}


def tail(path: Path, since: int, lines: int) -> list[str]:
    """The last lines of a file, of what stands in it after byte `since`."""
    if not path.exists():
        return []
    with path.open("rb") as f:
        f.seek(max(since, path.stat().st_size - (64 << 10)))
        return f.read().decode(errors="replace").splitlines()[-lines:]


class LocalExecutor:
    """Processes of this machine, each in its own session, writing to logs/<role>.log.

    Nothing outlives the executor: orphans of roles come to this process (subreaper) and are killed with the rest, and if this
    process is killed itself, its guard (prl.launch.guard) does the same, holding the run's lock until it is done. `cleanup`
    are folders to delete at the end.
    """

    def __init__(self, run: RunDir, lock: RunLock, *, keep_env: Sequence[str] = (), cleanup: Sequence[Path] = ()):
        self.run, self.keep_env = run, keep_env
        self._mark = run.mark
        if pids := guard.of_copies(self._mark):
            raise RunBusy(
                f"{run.root}: a folder that this one is a copy of, or that is a copy of it, runs (process {pids[0]}), and both "
                "would write the same weights; end that run first"
            )
        self._roles: dict[str, subprocess.Popen[bytes]] = {}
        self._log_from: dict[str, int] = {}
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._others = _children()
        guard.sweep(self._mark)  # an earlier life of the run may have been killed together with its guard
        # Short, since sockets in it have paths of at most 108 bytes.
        self._tmp = Path(tempfile.gettempdir()) / f"prl-{self._mark}"
        self._cleanup = (self._tmp, *cleanup)
        self._remove()
        self._tmp.mkdir(mode=0o700)
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, self._mark, *map(str, self._cleanup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # so that it does not keep the user's pipe open
            stderr=subprocess.DEVNULL,
            env=role_environment(os.environ, (), 1) | {guard.MARK: self._mark},
            start_new_session=True,
            pass_fds=[lock.fd],
        )

    def start(self, specs: Sequence[RoleSpec]) -> None:
        for spec in specs:
            log = self.run / "logs" / f"{spec.name}.log"
            env = role_environment(os.environ, self.keep_env, spec.threads)
            env |= {"TMPDIR": str(self._tmp), "PRL_SUPERVISOR": str(os.getpid()), guard.MARK: self._mark, **spec.env}
            with log.open("ab") as out:
                self._log_from[spec.name] = out.tell()
                role = subprocess.Popen(
                    spec.command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True
                )
            self._roles[spec.name] = role
            assert self._guard.stdin is not None
            self._guard.stdin.write(b"%d\n" % role.pid)
            self._guard.stdin.flush()

    def poll(self) -> dict[str, int]:
        ended = {}
        for name, role in list(self._roles.items()):
            # Not reaped yet, so that nobody else can get its process group id while the group is killed.
            if os.waitid(os.P_PID, role.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                _kill(role.pid, group=True)
                ended[name] = role.wait()
                del self._roles[name]
        if (code := self._guard.poll()) is not None:
            ended["guard"] = code
        return ended

    def stopped(self) -> set[str]:
        return {name for name, role in self._roles.items() if guard.state(role.pid) in "Tt"}

    def signal(self, names: Sequence[str], number: int) -> None:
        for name in names:
            if (role := self._roles.get(name)) is not None:
                role.send_signal(number)

    def end(self, names: Sequence[str]) -> None:
        for name in names:
            if (role := self._roles.pop(name, None)) is not None:
                _kill(role.pid, group=True)
                role.wait()

    def kill(self) -> list[str]:
        deadline = time.monotonic() + KILL_S
        for role in self._roles.values():
            _kill(role.pid, group=True)
        # What left its group comes to this process when its parent dies, and then so do its own children.
        while left := _children() - self._others - {self._guard.pid}:
            if time.monotonic() > deadline:
                return [f"process {pid}" for pid in sorted(left)]
            for role in self._roles.values():
                role.poll()
            for pid in left - {role.pid for role in self._roles.values()}:
                _kill(pid)
                os.waitpid(pid, os.WNOHANG)
            time.sleep(0.005)
        self._roles.clear()
        return []

    def log_tail(self, name: str, lines: int) -> list[str]:
        return tail(self.run / "logs" / f"{name}.log", self._log_from.get(name, 0), lines)

    def close(self) -> None:
        self.kill()
        self._remove()
        assert self._guard.stdin is not None
        with suppress(BrokenPipeError):
            self._guard.stdin.close()
        self._guard.wait(10)

    def _remove(self) -> None:
        for path in self._cleanup:
            shutil.rmtree(path, ignore_errors=True)


def _kill(pid: int, *, group: bool = False) -> None:
    with suppress(ProcessLookupError):
        (os.killpg if group else os.kill)(pid, signal.SIGKILL)


def _children() -> set[int]:
    """Processes whose parent is this one."""
    return {int(p) for task in Path("/proc/self/task").iterdir() for p in (task / "children").read_text().split()}
