"""Reachability of other hosts: listens, connects, and reports the interface that leads there. Runs on that host."""

import contextlib
import errno
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mlxdist.cluster.facts.collect import collect_here, output_of
from mlxdist.cluster.facts.interfaces import default_interface
from mlxdist.runtime.rendezvous.authentication import Refused, accept, authenticate
from mlxdist.runtime.rendezvous.protocol import ProtocolError

__all__ = ["connect", "interface_kind", "listen", "mac_kind", "mac_speed", "route", "stop_listening"]

_NC = "/usr/bin/nc"
_CLASS = Path("/sys/class/net")
_INFINIBAND, _LOOPBACK, _POINT_TO_POINT = "32", "772", "65534"  # of /sys/class/net/*/type
_MAX_AT_ONCE = 32

_listening: list[socket.socket] = []


def listen() -> dict[str, Any]:
    """Listens on a free port of every interface until `stop_listening`, for clients that have the token."""
    stop_listening()
    token = secrets.token_hex(8)
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        server = socket.create_server(("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=64)
    except OSError:  # a kernel that knows IPv6, and has it switched off
        server = socket.create_server(("", 0), backlog=64)
    _listening.append(server)
    threading.Thread(target=_send_token, args=(server, token.encode()), daemon=True).start()
    return {"port": server.getsockname()[1], "token": token}


def stop_listening() -> None:
    while _listening:
        server = _listening.pop()
        with contextlib.suppress(OSError):  # wakes the thread that accepts
            server.shutdown(socket.SHUT_RDWR)
        server.close()


def _send_token(server: socket.socket, token: bytes) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        # At most a second: clients are served one by one, and a client that sends nothing must not block the others.
        with connection, contextlib.suppress(OSError, ProtocolError):
            accept(connection, {"doctor": token}, time.monotonic() + 1.0)


def connect(targets: Sequence[Mapping[str, Any]], seconds: float = 5.0) -> list[dict[str, Any]]:
    """The result of a connection to each target (address, port, token), and the interface that leads there."""
    with ThreadPoolExecutor(max(1, min(_MAX_AT_ONCE, len(targets)))) as threads:
        return list(threads.map(lambda target: _connect(target, seconds), targets))


def _connect(target: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    address, port = str(target["address"]), int(target["port"])
    found: dict[str, Any] = {"error": "", "text": "", "nc": None} | route(address)
    try:
        with socket.create_connection((address, port), seconds) as connection:
            authenticate(connection, target["token"].encode(), "doctor", b"", time.monotonic() + seconds)
    except (ProtocolError, Refused, ConnectionResetError):
        found |= {"error": "WRONG", "text": "another program responds at this address"}
    except TimeoutError:
        found |= {"error": "ETIMEDOUT", "text": f"no response within {seconds:g} s"}
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        found |= {"error": name, "text": f"errno {error.errno}, {error.strerror}"}
    if sys.platform == "darwin" and found["error"] in ("EHOSTUNREACH", "ETIMEDOUT"):
        found["nc"] = _nc_reaches(address, port, seconds)
    return found


def _nc_reaches(address: str, port: int, seconds: float) -> bool | None:
    """Whether Apple's nc connects, which needs no permission for the local network; None if nc cannot run."""
    command = [_NC, "-z", "-G", f"{seconds:.0f}", address, str(port)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds + 2, check=False)
        return not done.returncode
    except (OSError, subprocess.TimeoutExpired):
        return None


def route(address: str) -> dict[str, Any]:
    """The interface that leads to an address: its name, kind and speed in Mbit/s."""
    plain = address.partition("%")[0]
    if sys.platform == "darwin":
        family = ["-inet6"] if ":" in plain else []
        name = default_interface(output_of("route", "-n", "get", *family, plain))
        kind, speed = mac_kind(name, collect_here().ports), mac_speed(output_of("ifconfig", name)) if name else None
        return {"interface": name, "kind": kind, "speed": speed}
    name = default_interface(output_of("ip", "-json", "route", "get", plain))
    if not name:
        return {"interface": "", "kind": "", "speed": None}
    return {"interface": name, "kind": interface_kind(_CLASS / name), "speed": _speed(_CLASS / name)}


def mac_kind(name: str, ports: Mapping[str, str]) -> str:
    """The kind of an interface of a Mac. ``ports``: the result of `hardware_ports`."""
    port = next((port for port, interface in ports.items() if interface == name), "").lower()
    if name.startswith("lo"):
        return "loopback"
    if name.startswith(("utun", "ipsec", "ppp")):
        return "tunnel"
    if "bridge" in port or name.startswith("bridge"):
        return "bridge"
    kinds = {"wi-fi": "wifi", "airport": "wifi", "thunderbolt ethernet": "ethernet", "thunderbolt": "thunderbolt"}
    kinds |= {"ethernet": "ethernet", "lan": "ethernet"}
    return next((kind for word, kind in kinds.items() if word in port), "")


def mac_speed(text: str) -> int | None:
    """Mbit/s in the output of ``ifconfig en0``: ``media: autoselect (10Gbase-T <full-duplex>)``."""
    found = re.search(r"^\s*media: .*?\(?\b(\d+(?:\.\d+)?)(G?)base", text, re.MULTILINE)
    return int(float(found[1]) * (1000 if found[2] else 1)) if found else None


def interface_kind(directory: Path) -> str:
    """The kind of an interface of Linux. ``directory``: its directory in /sys/class/net."""
    kind = _line(directory / "type")
    driver = os.path.basename(os.path.realpath(directory / "device" / "driver"))
    if (directory / "wireless").exists() or (directory / "phy80211").exists():
        return "wifi"
    if "thunderbolt" in driver:
        return "thunderbolt"
    if (directory / "bridge").exists():
        return "bridge"
    if (directory / "tun_flags").exists() or kind == _POINT_TO_POINT:
        return "tunnel"
    named = {_LOOPBACK: "loopback", _INFINIBAND: "infiniband"}.get(kind)
    return named or ("ethernet" if (directory / "device").exists() else "virtual" if directory.exists() else "")


def _speed(directory: Path) -> int | None:
    text = _line(directory / "speed")
    return int(text) if text.isdecimal() and int(text) else None  # -1 where the driver does not know


def _line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # also where the interface is down
        return ""
