"""What another user tries from a job of their own, on every node at once: `srun python intruder.py WHAT.json`.

WHAT: `ports` (host, port, kind) that the run's roles listen on, `paths` of the run, its `user`, Slurm's `spool`. On standard
output goes one line: {"node", "got": what should have been refused, "seen": all that could be read of processes and sockets,
"store": the names in c10d's store}.
"""

from __future__ import annotations

import glob
import http.client
import json
import os
import random
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq

ROUTES = ["/inference/v1/generate", "/inference/v1/abort_requests", "/abort_requests", "/pause", "/resume", "/is_paused"]
ROUTES += ["/weight_info", "/metrics", "/hold_updates", "/release_updates"]
OTHERS = ["/", "/collective_rpc", "/v1/completions", "/docs", "/openapi.json", "/health/", "/health/../pause", "//health"]
OTHERS += ["/health%2f..%2fpause", "/health;/pause", "/HEALTH", "/pause?/health", "http://x/pause", "/pause%00/health"]
GUESSES = [{}, *({"Authorization": f"{words}"} for words in ("Bearer ", f"Bearer {'0' * 64}", "Basic Og==", "Bearer\t*"))]
GUESSES += [{"X-HTTP-Method-Override": "GET", "X-Original-URL": "/health", "X-Forwarded-For": "127.0.0.1"}]
got: list[str] = []


def over_http(host: str, port: int) -> None:
    for path in ROUTES + OTHERS:
        for method in ("GET", "POST", "PUT", "HEAD", "OPTIONS"):
            for headers in GUESSES:
                connection = http.client.HTTPConnection(host, port, timeout=10)
                with suppress(http.client.HTTPException):
                    connection.request(method, path, body=b"{}", headers=headers)
                    status = connection.getresponse().status
                    if status != 401 and (path in ROUTES or status not in (400, 404, 405)):
                        got.append(f"{method} {host}:{port}{path} {headers}: {status}")
                connection.close()
    connection = http.client.HTTPConnection(host, port, timeout=10)
    connection.request("GET", "/health")
    if (answer := connection.getresponse()).status != 200 or answer.read():
        got.append(f"/health of {host}:{port} said {answer.status}, or more than that")


def over_zeromq(ports: list[list[Any]]) -> None:
    context, sockets = zmq.Context(), {}
    for host, port, kind in ports:
        for how in ("null", "plain", "curve"):
            s = context.socket(zmq.DEALER)
            s.linger = 0
            if how == "plain":
                s.plain_username, s.plain_password = b"prl", b"prl"
            if how == "curve":
                s.curve_publickey, s.curve_secretkey = zmq.curve_keypair()
                s.curve_serverkey, _ = zmq.curve_keypair()
            sockets[s] = f"{kind} at {host}:{port} answers ZeroMQ ({how})"
            s.connect(f"tcp://{host}:{port}")
            s.send_multipart([b"", b"want"])
    poller = zmq.Poller()
    for s in sockets:
        poller.register(s, zmq.POLLIN)
    got.extend(sockets[s] for s, _ in poller.poll(500))
    context.destroy(0)


def with_garbage(host: str, port: int) -> None:
    """Nothing of a run may end by it. Numbers are what gloo's ranks greet each other with."""
    for data in (os.urandom(100), *(struct.pack("<q", i) for i in range(4)), b"\xff" * 70_000):
        with suppress(OSError), socket.create_connection((host, port), timeout=2) as s:
            s.sendall(data)


def instead_of(host: str, port: int) -> None:
    """Listen where the run does, to be sent what is meant for it."""
    with suppress(OSError), socket.socket() as s:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            s.setsockopt(socket.SOL_SOCKET, option, 1)
        s.bind((host, port))
        s.listen()
        got.append(f"listens on {host}:{port} beside the run")


def names_in_store(host: str, port: int) -> list[str]:
    from torch.distributed import TCPStore

    return TCPStore(host, port, is_master=False, wait_for_workers=False).list_keys()


def files(paths: list[str]) -> None:
    mine = os.getuid()
    for path in [*paths, *glob.glob("/dev/shm/*")]:
        for what, flags in (("read", os.O_RDONLY), ("write", os.O_WRONLY | os.O_APPEND), ("list", os.O_DIRECTORY)):
            with suppress(OSError):
                fd = os.open(path, flags)
                if os.fstat(fd).st_uid != mine:
                    got.append(f"{what} {path}")
                os.close(fd)
        for what, call in (("made a file in", lambda p: Path(p, "x").touch()), ("chmod", lambda p: os.chmod(p, 0o777))):
            with suppress(OSError):
                call(path)
                got.append(f"{what} {path}")
        with suppress(OSError):
            os.rename(path, f"{path}.gone")
            got.append(f"renamed {path}")


def processes(user: int) -> Iterator[str]:
    """What /proc tells of all processes; of the run's it must be no more than `ps` shows."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            for name in ("cmdline", "status", "environ", "maps", "mem", "stack", "auxv", "fd", "cwd", "root"):
                path = folder / name
                with suppress(OSError):
                    if name in ("fd", "cwd", "root"):
                        text = " ".join(map(str, path.iterdir())) if name == "fd" else os.readlink(path)
                    elif name == "mem":
                        path.open("rb").close()
                        text = ""
                    else:
                        text = path.read_bytes().decode(errors="replace")
                    if folder.stat().st_uid == user and name not in ("cmdline", "status"):
                        got.append(f"{path} of {(folder / 'cmdline').read_bytes()[:200]!r}")
                    yield text
            if folder.stat().st_uid == user:
                with suppress(OSError):
                    os.kill(int(folder.name), 0)
                    got.append(f"may signal {folder.name}")


def unix_sockets(spool: str) -> str:
    """All but slurmd's, whose steps ask for munge."""
    text = Path("/proc/net/unix").read_text()
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and int(fields[3], 16) & 0x10000 and not fields[7].startswith(spool):
            with suppress(OSError), socket.socket(socket.AF_UNIX, int(fields[4], 16)) as s:
                s.settimeout(1)
                s.connect(fields[7].replace("@", "\0", 1) if fields[7].startswith("@") else fields[7])
                got.append(f"unix socket {fields[7]}")
    return text


def main(what: str) -> None:
    given = json.loads(Path(what).read_text())
    ports = given["ports"]
    random.shuffle(ports)  # the nodes come in different orders
    for host, port, kind in ports:
        if kind == "inference":
            over_http(host, port)
    over_zeromq([port for port in ports if port[2] != "inference"])  # libzmq takes "HTTP/1.1 400" for a message of ZMTP 1.0
    for host, port, _ in ports:
        with_garbage(host, port)
        instead_of(host, port)
    files(given["paths"])
    seen = [
        *processes(given["user"]),
        unix_sockets(given["spool"]),
        *(p.read_text() for p in map(Path, ("/proc/net/tcp", "/proc/net/udp"))),
    ]
    store: list[str] = []
    if os.environ["SLURM_PROCID"] == "0":
        store = [name for host, port, kind in ports if kind == "store" for name in names_in_store(host, port)]
    print(json.dumps({"node": socket.gethostname(), "got": got, "seen": "\n".join(seen), "store": store}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
