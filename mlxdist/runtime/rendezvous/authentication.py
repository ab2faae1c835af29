"""Rendezvous authentication: both ends of a connection prove that they have the job's secret, and do not send it.

    client -> server   KNOCK      nonce, proof
    server -> client   CHALLENGE  magic, nonce
    client -> server   HELLO      nonce, proof, JSON
    server -> client   WELCOME    proof, JSON
                   or  REFUSED    text

A proof is HMAC-SHA256 over a label, both nonces and the JSON that goes with it. So neither side can be replayed or
reflected, and HELLO cannot be altered. KNOCK proves less, since it has no nonce of the server: it only keeps a
connection from being evicted by unauthenticated ones. The server checks a proof before it parses what comes with it.
"""

import errno
import hashlib
import hmac
import os
import socket
import time
from collections.abc import Mapping

from mlxdist.base.validation import printable

from .protocol import MAGIC, Framing, Kind, ProtocolError

__all__ = [
    "ClientHandshake",
    "Refused",
    "ServerHandshake",
    "accept",
    "authenticate",
    "observer_secret",
    "proof",
    "read_frame",
]

NONCE_BYTES = 32
PROOF_BYTES = 32


class Refused(Exception):
    """The server has refused the client, for the reason in the text. The server has proven nothing by then."""


def proof(secret: bytes, label: str, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"".join((MAGIC, label.encode(), *parts)), hashlib.sha256)


def observer_secret(secret: bytes) -> bytes:
    """The secret that observers prove to have. It follows from the job's secret, which does not follow from it."""
    return proof(secret, "secret of observers")


class _Handshake:
    secret = server_nonce = client_nonce = b""

    def session_keys(self) -> tuple[bytes, bytes]:
        """The keys of the frames' tags: to the server, and from the server."""
        labels = ("frames to rank 0", "frames from rank 0")
        to_server, from_server = (proof(self.secret, label, self.server_nonce, self.client_nonce) for label in labels)
        return to_server, from_server


class ClientHandshake(_Handshake):
    def __init__(self, secret: bytes, role: str) -> None:
        """``role``: "rank" or another of the names that the server has a secret for."""
        self.secret = secret
        self._role = role
        self.client_nonce = os.urandom(NONCE_BYTES)

    def knock(self) -> bytes:
        nonce = os.urandom(NONCE_BYTES)
        return nonce + proof(self.secret, "knock", nonce)

    def hello(self, challenge: bytes, greeting: bytes) -> bytes:
        if not challenge.startswith(MAGIC) or len(challenge) != len(MAGIC) + NONCE_BYTES:
            raise ProtocolError(f"{challenge[:32]!r}")
        self.server_nonce = challenge[len(MAGIC) :]
        return (
            self.client_nonce
            + proof(self.secret, self._role, self.server_nonce, self.client_nonce, greeting)
            + greeting
        )

    def verify(self, welcome: bytes) -> bytes:
        """The JSON of a WELCOME. Raises ProtocolError: its proof is wrong."""
        given, fields = welcome[:PROOF_BYTES], welcome[PROOF_BYTES:]
        if not hmac.compare_digest(given, proof(self.secret, "rank 0", self.client_nonce, self.server_nonce, fields)):
            raise ProtocolError("no proof that it knows MLXDIST_SECRET")
        return fields


class ServerHandshake(_Handshake):
    """``role`` is that of the client, once ``verify`` has accepted it."""

    def __init__(self, secrets: Mapping[str, bytes]) -> None:
        self._secrets = secrets  # by role
        self.role = ""
        self.server_nonce = os.urandom(NONCE_BYTES)

    def challenge(self) -> bytes:
        return MAGIC + self.server_nonce

    def is_knock(self, payload: bytes) -> bool:
        nonce = payload[:NONCE_BYTES]
        return any(
            hmac.compare_digest(payload, nonce + proof(secret, "knock", nonce)) for secret in self._secrets.values()
        )

    def verify(self, hello: bytes) -> bytes | None:
        """The JSON of a HELLO, or None: its proof is wrong."""
        if len(hello) < NONCE_BYTES + PROOF_BYTES:
            raise ProtocolError("something else than a rank's greeting")
        nonce, given = hello[:NONCE_BYTES], hello[NONCE_BYTES : NONCE_BYTES + PROOF_BYTES]
        greeting = hello[NONCE_BYTES + PROOF_BYTES :]
        for role, secret in self._secrets.items():
            if hmac.compare_digest(given, proof(secret, role, self.server_nonce, nonce, greeting)):
                self.role, self.secret, self.client_nonce = role, secret, nonce
                return greeting
        return None

    def welcome(self, fields: bytes) -> bytes:
        return proof(self.secret, "rank 0", self.client_nonce, self.server_nonce, fields) + fields


# With blocking sockets.


def authenticate(
    sock: socket.socket, secret: bytes, role: str, greeting: bytes, deadline: float
) -> tuple[Framing, bytes]:
    """The client's side: the framing of what follows, and the JSON of the server's WELCOME.

    Raises:
        OSError: the connection broke or the deadline passed.
        ProtocolError: the server does not have the secret, or is another program.
        Refused: the server has refused this client.
    """
    handshake, framing = ClientHandshake(secret, role), Framing()
    sock.sendall(framing.frame(Kind.KNOCK, handshake.knock()))
    kind, challenge = read_frame(sock, framing, deadline)
    if kind != Kind.CHALLENGE:
        raise ProtocolError(f"{challenge[:32]!r}")
    sock.sendall(framing.frame(Kind.HELLO, handshake.hello(challenge, greeting)))
    kind, response = read_frame(sock, framing, deadline)
    if kind == Kind.REFUSED:
        raise Refused(printable(response.decode(errors="replace")))
    fields = handshake.verify(response if kind == Kind.WELCOME else b"")
    to_server, from_server = handshake.session_keys()
    framing.secure(send_key=to_server, receive_key=from_server)
    return framing, fields


def accept(sock: socket.socket, secrets: Mapping[str, bytes], deadline: float) -> str | None:
    """The server's side, for a server that has nothing else to do: the client's role, None if it is refused.

    Raises OSError and ProtocolError as ``authenticate``.
    """
    handshake, framing = ServerHandshake(secrets), Framing()
    sock.sendall(framing.frame(Kind.CHALLENGE, handshake.challenge()))
    kind: int = Kind.KNOCK
    while kind == Kind.KNOCK:
        kind, payload = read_frame(sock, framing, deadline)
    if kind != Kind.HELLO or handshake.verify(payload) is None:
        sock.sendall(framing.frame(Kind.REFUSED, b"the secret is wrong"))
        return None
    sock.sendall(framing.frame(Kind.WELCOME, handshake.welcome(b"{}")))
    return handshake.role


def read_frame(sock: socket.socket, framing: Framing, deadline: float) -> tuple[int, bytes]:
    """Reads a frame. Raises OSError: the connection broke or the deadline passed; ProtocolError as ``next_frame``."""
    while (frame := framing.next_frame()) is None:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        sock.settimeout(remaining)
        data = sock.recv(65536)
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "connection closed during the handshake")
        framing.feed(data)
    return frame
