"""The socket where rank 0 listens for the others: the launcher opens the first, and rank 0 that of another epoch."""

import socket

__all__ = ["listen_for_ranks"]


def listen_for_ranks(interface: str, port: int, size: int) -> socket.socket:
    """Opens a socket that ``size`` ranks can connect to at once. Raises OSError.

    ``interface``: an address, or empty for all addresses, also of IPv6. ``port``: 0 for any free one.
    """
    both = not interface and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in interface else socket.AF_INET
    return socket.create_server((interface, port), family=family, backlog=max(128, size), dualstack_ipv6=both)
