"""Listening sockets of a server, and limits of its connections, for rank 0 and for the proxy, which has no mlx-lm."""

import ipaddress
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from mlxdist.base.environment import format_address
from mlxdist.base.errors import InvalidArgument

__all__ = [
    "MAX_BODY",
    "MAX_CONNECTIONS",
    "SOCKET",
    "SOCKET_SECONDS",
    "address_of",
    "is_local",
    "listen",
    "listen_for_proxy",
]

MAX_BODY = 8 << 20  # bytes of a request
MAX_CONNECTIONS = 256
SOCKET_SECONDS = 60.0  # that a client may take to send a part of its request, or to take a part of the answer
SOCKET = "http"  # rank 0's behind a proxy: its name in the temporary directory of rank 0, which no other user can enter


def listen(host: str, port: int) -> socket.socket:
    """A TCP socket that listens. Raises InvalidArgument: nothing can listen at the address."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, backlog=MAX_CONNECTIONS, dualstack_ipv6=both)
    except (OSError, OverflowError) as error:
        raise InvalidArgument(f"serve: cannot listen at {host}, port {port}: {error}") from None


def listen_for_proxy() -> socket.socket:
    """A Unix domain socket in this rank's temporary directory. Raises InvalidArgument: it cannot be made there."""
    path = Path(os.environ["TMPDIR"], SOCKET)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
        listener.listen(MAX_CONNECTIONS)
    except OSError as error:
        listener.close()
        raise InvalidArgument(f"serve: cannot listen at {path}: {error}; set TMPDIR to a short name") from None
    return listener


def address_of(listener: socket.socket) -> str:
    """The URL of a TCP socket that listens."""
    host, port = listener.getsockname()[:2]
    return f"http://{format_address(host, port)}"


def is_local(address: str) -> bool:
    """Whether a URL that `address_of` returns can be reached from this machine only."""
    return ipaddress.ip_address(urlsplit(address).hostname or "").is_loopback
