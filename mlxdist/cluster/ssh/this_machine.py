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
    """Whether ``name``, with or without a user in front, means this machine. The result is cached."""
    host = name.rpartition("@")[2].lower().removesuffix(".")
    own = _own_names()
    if host in ("localhost", "127.0.0.1", "::1", *own):
        return True
    addresses = _addresses(host)
    if addresses:
        return all(_is_bound(family, address) for family, address in addresses)
    return any(_may_be_same(host, other) for other in own)


def look_up(names: Iterable[str]) -> None:
    """Fills the cache of `is_this_machine` in parallel, because each name may take a second."""
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
    """The name by which other Macs find this one. A router may have assigned the one that gethostname() returns."""
    command = ["scutil", "--get", "LocalHostName"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMMAND_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace").strip().lower()


def _may_be_same(host: str, own: str) -> bool:
    """Whether a name without an address may be this machine's. The resolver may be late, or ssh_config defines it."""
    (label, _, domain), own_label = host.partition("."), own.partition(".")[0]
    return label == own_label and domain in ("", "local")


def _addresses(host: str) -> list[tuple[socket.AddressFamily, tuple]]:
    """Address families and socket addresses of a name; none where the resolver has none within its time limit."""
    found: list[tuple[socket.AddressFamily, tuple]] = []

    def look_up() -> None:
        try:
            addresses = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
        except (OSError, UnicodeError):
            return
        found.extend((family, address) for family, _, _, _, address in addresses)

    # getaddrinfo has no timeout, but a thread that waits in it can be left behind.
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
