"""CURVE keys of a run, derived from its secret: who knows the secret has both pairs, anybody else has neither.

Both ends prove possession (ZeroMQ's CURVE, https://rfc.zeromq.org/spec/26/): the server admits the run's client key alone.
"""

from __future__ import annotations

import hashlib
import hmac

import zmq
import zmq.auth.thread
from zmq.utils import z85


def key_pair(secret: str, side: str) -> tuple[bytes, bytes]:
    """(public, secret) of `side`, "server" or "client", in Z85."""
    private = z85.encode(hashlib.blake2b(secret.encode(), digest_size=32, person=f"prl-{side}".encode()).digest())
    return zmq.curve_public(private), private


def serve(socket: zmq.Socket[bytes], secret: str) -> zmq.auth.thread.ThreadAuthenticator:
    """Make `socket` a CURVE server that admits the run's client key alone. Stop the result when the socket is closed."""
    admitted, _ = key_pair(secret, "client")

    class RunKey:
        def callback(self, domain: str, key: bytes) -> bool:
            return hmac.compare_digest(key, admitted)

    authenticator = zmq.auth.thread.ThreadAuthenticator(socket.context)
    authenticator.start()
    authenticator.configure_curve_callback("*", RunKey())
    socket.curve_publickey, socket.curve_secretkey = key_pair(secret, "server")
    socket.curve_server = True
    return authenticator


def join(socket: zmq.Socket[bytes], secret: str) -> None:
    """Make `socket` a CURVE client of the run's server."""
    socket.curve_serverkey, _ = key_pair(secret, "server")
    socket.curve_publickey, socket.curve_secretkey = key_pair(secret, "client")
