"""Listening sockets of a server: for clients, and rank 0's for the application of the launcher."""

import ipaddress
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from mlxdist.base.descriptors import MAX_DESCRIPTORS, raise_limit
from mlxdist.base.environment import Environment, format_address
from mlxdist.base.errors import InvalidArgument

__all__ = ["MAX_BODY", "MAX_REQUESTS", "SOCKET", "address_of", "is_local", "listen", "listen_for_application"]

MAX_BODY = 8 << 20  # bytes of a request
MAX_REQUESTS = 256  # in progress at a time
SOCKET = "serve"  # rank 0's: its name in the temporary directory of rank 0, which no other user can enter


def listen(host: str, port: int) -> socket.socket:
    """A TCP socket that listens. Raises InvalidArgument: nothing can listen at the address."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, backlog=2 * MAX_REQUESTS, dualstack_ipv6=both)
    except (OSError, OverflowError) as error:
        raise InvalidArgument(f"serve: cannot listen at {host}, port {port}: {error}") from None


def listen_for_application() -> socket.socket:
    """A Unix domain socket in this rank's temporary directory; where the launcher is on another host, its TCP socket.

    Raises:
        InvalidArgument: nothing can listen there.
    """
    raise_limit(MAX_DESCRIPTORS)  # each choice of each request has a connection
    environment = Environment.read()
    if environment.follower_fd is None:
        return _listen_in_directory()
    if not environment.secret:
        raise InvalidArgument("serve: MLXDIST_FOLLOWER_FD needs MLXDIST_SECRET; `mlxdist serve --hostfile` sets both")
    return _listen_at(environment.follower_fd)


def _listen_at(descriptor: int) -> socket.socket:
    try:
        listener = socket.socket(fileno=descriptor)
        listener.set_inheritable(False)
        listener.listen(2 * MAX_REQUESTS)
    except OSError as error:
        raise InvalidArgument(
            f"serve: descriptor {descriptor} (MLXDIST_FOLLOWER_FD) is not the launcher's socket: {error.strerror}; a "
            "program between `mlxdist serve` and this one has closed it: let it pass the descriptor on, or give "
            "--max-restarts 0"
        ) from None
    return listener


def _listen_in_directory() -> socket.socket:
    path = Path(os.environ["TMPDIR"], SOCKET)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
        listener.listen(2 * MAX_REQUESTS)
    except OSError as error:
        listener.close()
        raise InvalidArgument(f"serve: cannot listen at {path}: {error}; set TMPDIR to a short name") from None
    return listener


def address_of(listener: socket.socket, scheme: str = "http") -> str:
    """The URL of a TCP socket that listens."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{format_address(host, port)}"


def is_local(address: str) -> bool:
    """Whether a URL that `address_of` returns can be reached from this machine only."""
    return ipaddress.ip_address(urlsplit(address).hostname or "").is_loopback
