"""Clean up after a supervisor, whatever ends it: a process of its own that waits for the supervisor's end of a pipe to close.

`python -I -S guard.py MARK PATH…` reads process group ids, one a line; at end of file it kills those groups and every process
that carries MARK in its environment, then deletes the paths. Standard library only: it starts in some 20 ms and stays small.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

MARK = "PRL_RUN"
"""The environment variable that marks every process of a run: `RunDir.mark`."""


def strays(mark: str, groups: Iterable[int] = ()) -> list[int]:
    """Living processes of the given process groups or with `PRL_RUN=mark` in their environment; never this one.

    A zombie lives as long as another of its threads: until then its ports are open.
    """
    wanted, entry, found = set(groups), f"{MARK}={mark}".encode(), []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            status = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()  # proc(5), from field 3 on
            state, group, threads = status[0], status[2], int(status[17])
            if state in "ZX" and threads <= 1:
                continue
            if int(group) in wanted or entry in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                found.append(int(name))
        except OSError:
            continue  # gone meanwhile, or somebody else's
    return found


def of_copies(mark: str) -> list[int]:
    """Processes that another folder with the same id started: a copy of the marked run's, or what it is a copy of."""
    own, run, found = f"{MARK}={mark}".encode(), f"{MARK}={mark.partition('.')[0]}.".encode(), []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            entries = Path("/proc", name, "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # gone meanwhile, or somebody else's
        if any(e.startswith(run) and e != own for e in entries):
            found.append(int(name))
    return found


def state(pid: int) -> str:
    """A process's state, a letter of proc(5); X where it is gone."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def sweep(mark: str, groups: Iterable[int] = (), timeout_s: float = 5.0) -> list[int]:
    """Kill strays until there are none; those that would not die within `timeout_s` are returned."""
    deadline = time.monotonic() + timeout_s
    while left := strays(mark, groups):
        if time.monotonic() > deadline:
            return left
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        time.sleep(0.01)
    return []


def main(mark: str, *paths: str) -> None:
    groups = [int(line) for line in sys.stdin]
    sweep(mark, groups)
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
