"""One node's answers to the doctor: `python -I -S probe.py`, with the standard library only.

Standard input brings one JSON object a line, {"do": name, …}; standard output takes one a question: what the function of that
name returns, or {"error": words}. The end of standard input is the probe's.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

held: dict[str, int] = {}
"""Locked files, open."""
listeners: list[socket.socket] = []
_SOFTWARE = """import json, prl, torch
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": torch.cuda.device_count()}))"""


def facts(folder: str) -> dict[str, Any]:
    """What is true of this node. Sizes in bytes, free; limits soft and hard, -1: none."""
    limits = {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}")) for name in ("nofile", "memlock", "nproc")}
    places = {"run": folder, "tmp": os.environ.get("TMPDIR", "/tmp"), "shm": "/dev/shm"}
    return {
        "python": platform.python_version(),
        "user": os.geteuid(),
        "cpus": len(os.sched_getaffinity(0)),
        "limits": {name: [-1 if v == resource.RLIM_INFINITY else v for v in pair] for name, pair in limits.items()},
        "free": {name: shutil.disk_usage(path).free for name, path in places.items() if os.path.isdir(path)},
        "gpus": gpus(),
        "containers": [name for name in ("apptainer", "singularity", "enroot", "podman") if shutil.which(name)],
    }


def gpus() -> list[list[str]]:
    """Name and driver of each GPU that nvidia-smi shows here."""
    if shutil.which("nvidia-smi") is None:
        return []
    words = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    told = subprocess.run(words, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)
    if told.returncode:
        raise OSError(f"nvidia-smi: exit code {told.returncode}: {told.stdout.strip() or told.stderr.strip()}")
    return [[word.strip() for word in line.split(",")] for line in told.stdout.splitlines()]


def software(python: str) -> dict[str, Any]:
    """What this node's own copy of the installation is."""
    return dict(json.loads(_run([python, "-c", _SOFTWARE]).splitlines()[-1]))


def clock() -> dict[str, Any]:
    return {"t": time.time()}


def write(path: str, text: str) -> dict[str, Any]:
    with open(path, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    return {}


def see(path: str, text: str, within_s: float) -> dict[str, Any]:
    """Seconds until the file says `text` here; None: not within the time."""
    began = time.monotonic()
    while time.monotonic() - began < within_s:
        try:
            if Path(path).read_text() == text:
                return {"s": time.monotonic() - began}
        except OSError:
            pass
        time.sleep(0.02)
    return {"s": None}


def create(path: str) -> dict[str, Any]:
    """Whether this node is the one that has made it."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return {"made": False}
    return {"made": True}


def lock(path: str) -> dict[str, Any]:
    """Whether this node has the lock now, which it keeps until `unlock`."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return {"got": False}
    held[path] = fd
    return {"got": True}


def unlock(path: str) -> dict[str, Any]:
    os.close(held.pop(path))
    return {}


def replace(path: str, seconds: float) -> dict[str, Any]:
    """Put a new file under an old name, over and over."""
    until, n = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        n += 1
        Path(f"{path}.tmp").write_text(f"{n % 10}" * 8192)
        os.replace(f"{path}.tmp", path)
        time.sleep(0.005)
    return {"n": n}


def reread(path: str, seconds: float) -> dict[str, Any]:
    """Read it meanwhile: how often in all, and how often it was not there, or not one of the files."""
    until, n, missing, torn = time.monotonic() + seconds, 0, 0, 0
    while time.monotonic() < until:
        n += 1
        try:
            text = Path(path).read_text()
            torn += len(text) != 8192 or text != text[0] * 8192
        except OSError:  # a stale handle too
            missing += 1
        time.sleep(0.002)
    return {"n": n, "missing": missing, "torn": torn}


def listen(host: str, ports: Sequence[int]) -> dict[str, Any]:
    """Take connections on the first port that is free."""
    for port in ports:
        try:
            listener = socket.create_server((host, port))
        except OSError as e:
            error = e
            continue
        listeners.append(listener)
        threading.Thread(target=_welcome, args=(listener,), daemon=True).start()
        return {"port": port}
    raise OSError(f"none of {len(ports)} ports from {min(ports)} on can be listened on at {host}: {error}")


def _welcome(listener: socket.socket) -> None:
    while True:
        peer, _ = listener.accept()
        peer.sendall(b"prl\n")
        peer.close()


def connect(host: str, port: int) -> dict[str, Any]:
    with socket.create_connection((host, port), timeout=5) as s:
        if s.recv(16) != b"prl\n":
            raise OSError(f"{host}:{port}: something else answers there")
    return {}


def collective(python: str, **spec: Any) -> dict[str, Any]:
    """One rank of a sum over all nodes."""
    _run([python, "-m", "prl.launch.slurm.collective", json.dumps(spec)], timeout_s=spec["timeout_s"] + 20)
    return {}


def _run(words: Sequence[str], timeout_s: float = 60) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise OSError((done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1])
    return done.stdout


QUESTIONS = {
    f.__name__: f
    for f in (facts, software, clock, write, see, create, lock, unlock, replace, reread, listen, connect, collective)
}


def main() -> None:
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = QUESTIONS[question.pop("do")](**question)
        except (OSError, ValueError, subprocess.TimeoutExpired) as e:
            answer = {"error": f"{type(e).__name__}: {e}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
