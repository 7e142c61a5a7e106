"""Replicas of other jobs: they announce themselves in a run's folder and may leave, or be lost, at any moment.

The run's supervisor neither starts nor ends them. It says who comes and goes, and withdraws the address of one that shows no
life, so that no request waits for it. One that lives after all finds its address gone and begins anew
(prl.launch.slurm.guests).
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from prl.transport.run_dir import RunDir

DIAL_S = 2.0
"""How often a guest is called, and how long a call may take."""


@dataclass
class _Guest:
    sign: float
    """The time in its status file: compared with itself alone, since nodes have clocks of their own."""
    written_at: float
    """When that was new here."""
    reached_at: float
    """When it last took a connection: storage may reach a node whose network is gone."""
    call: socket.socket | None = None
    called_at: float = -DIAL_S

    def dial(self, address: Mapping[str, Any], now: float) -> None:
        """Go on with a call, or begin one; returns at once."""
        if self.call is not None:
            if select.select([], [self.call], [], 0)[1]:
                if not self.call.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    self.reached_at = now
                self.hang_up()
            elif now - self.called_at > DIAL_S:
                self.hang_up()
        elif now - self.called_at > DIAL_S:
            self.call, self.called_at = socket.socket(), now
            self.call.setblocking(False)
            with suppress(OSError):  # no route
                self.call.connect_ex((address["host"], address["port"]))

    def hang_up(self) -> None:
        if self.call is not None:
            self.call.close()
            self.call = None


class Guests:
    """`silent_s` without a sign of life and a guest is given up."""

    def __init__(self, run: RunDir, silent_s: float, say: Callable[[str], None]):
        self.run, self.silent_s, self.say = run, silent_s, say
        self._guests: dict[str, _Guest] = {}

    def look(self, own: Collection[str], now: float) -> None:
        """`own` are the run's roles, `now` a monotonic time in seconds."""
        there = {path.stem for path in (self.run / "rendezvous").glob("inference-*.json")} - set(own)
        for name in sorted(self._guests.keys() - there):
            self._forget("leave", name, "has left")
        for name in sorted(there):
            address, status = self.run.address(name), self.run.read_status(name) or {}
            if address is None:  # it has left just now
                continue
            sign = float(status.get("t", 0.0))
            if (guest := self._guests.get(name)) is None:
                guest = self._guests[name] = _Guest(sign, now, now)
                self._tell("join", name, f"on {status.get('host', 'another node')} has joined")
            if guest.sign != sign:
                guest.sign, guest.written_at = sign, now
            guest.dial(address, now)
            for at, what in ((guest.written_at, "shows no sign of life"), (guest.reached_at, "takes no connection")):
                if now - at > self.silent_s:
                    self.run.forget_roles([name])
                    self._forget("give_up", name, f"{what} for {self.silent_s:g} s: the run goes on without it")
                    break

    def close(self) -> None:
        for guest in self._guests.values():
            guest.hang_up()

    def _forget(self, event: str, name: str, words: str) -> None:
        self._guests.pop(name).hang_up()
        self._tell(event, name, words)

    def _tell(self, event: str, name: str, words: str) -> None:
        self.say(f"{name} {words}")
        self.run.metrics("supervisor").log("event", name=event, of=name)
