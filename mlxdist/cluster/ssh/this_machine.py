"""Whether a host's name means this machine, which is then reached without ssh.

A Mac calls itself `Studio.local` and a hostfile calls it `studio`. Names alone prove little, as `studio.a.com` and
`studio.b.com` may be two machines: where a name has addresses, those decide.
"""

import functools
import ipaddress
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable

__all__ = ["is_this_machine", "look_up"]

_LOOKUP_SECONDS = 1.0  # names that only ssh knows (ssh_config) may keep a resolver busy for many seconds
_COMMAND_SECONDS = 5.0
_OF_NO_MACHINE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}  # RFC 5737, RFC 3849


@functools.cache
def is_this_machine(name: str) -> bool:
    """``name``: as ssh takes it, a user before it or not."""
    host = name.rpartition("@")[2].lower().removesuffix(".")
    own = _own_names()
    if host in ("localhost", "127.0.0.1", "::1", *own):
        return True
    addresses = _addresses(host)
    if addresses:
        return all(_is_bound(family, address) for family, address in addresses)
    return any(_may_be_same(host, other) for other in own)


def look_up(names: Iterable[str]) -> None:
    """All at once, which fills the cache of `is_this_machine`: alone, each may take a second."""
    threads = [threading.Thread(target=is_this_machine, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@functools.cache
def _own_names() -> frozenset[str]:
    names = {socket.gethostname().lower()}
    if sys.platform == "darwin" and (bonjour := _local_host_name()):
        names |= {bonjour, f"{bonjour}.local"}
    return frozenset(names)


def _local_host_name() -> str:
    """By which other Macs find this one; gethostname() may be a name that a router gave."""
    command = ["scutil", "--get", "LocalHostName"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMMAND_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace").strip().lower()


def _may_be_same(host: str, own: str) -> bool:
    """Of a name without an address, which may be another machine's in ssh_config, or of a resolver that was late."""
    (label, _, domain), own_label = host.partition("."), own.partition(".")[0]
    return label == own_label and domain in ("", "local")


def _addresses(host: str) -> list[tuple[socket.AddressFamily, tuple]]:
    """Families and socket addresses; none where the resolver knows none in time."""
    found: list[tuple[socket.AddressFamily, tuple]] = []

    def look_up() -> None:
        try:
            addresses = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
        except (OSError, UnicodeError):
            return
        found.extend((family, address) for family, _, _, _, address in addresses)

    thread = threading.Thread(target=look_up, name="mlxdist names", daemon=True)
    thread.start()
    thread.join(_LOOKUP_SECONDS)
    return list(found)


def _is_bound(family: socket.AddressFamily, address: tuple) -> bool:
    """Whether an interface of this machine has the address: the system binds sockets to no other one.

    Linux can be set to bind any (ip_nonlocal_bind), which shows at an address that no machine has.
    """
    ip = ipaddress.ip_address(address[0].partition("%")[0])
    if ip.is_unspecified or ip.is_multicast:
        return False
    return _binds(family, address) and not _binds(family, (_OF_NO_MACHINE[family], 0))


def _binds(family: int, address: tuple) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.bind(address)
    except OSError:
        return False
    return True
