"""On which port a role listens.

In a Slurm job: one derived from the job and the role, below the ports that the kernel gives to outgoing connections, so that an
administrator can name the range and two runs on one node begin their search apart. Elsewhere one that the kernel chooses. It is
never agreed on beforehand: who binds it announces it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

FIRST, LAST = 20_000, 29_999
"""Above what services register, below the ephemeral range of Linux (32768)."""
TRIES = 200
Bound = TypeVar("Bound")
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def span() -> tuple[int, int]:
    """First and last port. Where a node's ephemeral range begins below 30000, the ports end before it."""
    try:
        ephemeral = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError):
        return FIRST, LAST
    last = min(LAST, ephemeral - 1)
    return (FIRST, last) if last - FIRST >= TRIES else (1024, last)


def ports(role: str) -> Iterator[int]:
    """Those to try, in order; 0 lets the kernel choose."""
    if (job := os.environ.get("SLURM_JOB_ID")) is None:
        return iter([0])
    first, last = span()
    count = last - first + 1
    start = int.from_bytes(hashlib.blake2b(f"{job}/{role}".encode(), digest_size=8).digest(), "big")
    return (first + (start + i) % count for i in range(min(TRIES, count)))


def bound(role: str, host: str, bind: Callable[[int], Bound]) -> Bound:
    """What `bind` makes of the first port that is free. OSError where none of them is."""
    for port in ports(role):
        try:
            return bind(port)
        except OSError as e:
            if e.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"{role}: none of its ports on {host} is free (tried {TRIES} from {FIRST} to {LAST})")


def listener(role: str, host: str) -> socket.socket:
    """A listening TCP socket."""
    return bound(role, host, lambda port: socket.create_server((host, port), backlog=1024))
