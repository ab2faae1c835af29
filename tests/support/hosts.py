"""Hosts on this machine: network namespaces with an Ethernet of their own, which nothing else is connected to.

Needs root, and ip and tc of iproute2. The tests that ask for hosts are skipped elsewhere, with the reason.
"""

import contextlib
import fcntl
import heapq
import json
import os
import random
import secrets
import select
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest

__all__ = ["DELAY_SECONDS", "LOSS", "PORT", "Host", "control_network", "several_hosts", "start_ranks", "two_hosts"]

DELAY_SECONDS = 0.002
LOSS = 0.01
PORT = 29517  # of rank 0: nothing else listens in the namespace
_NETWORK = "10.213.77"
_CONTROL = "10.213.78"
_MTU = 9000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


@dataclass(frozen=True)
class Host:
    namespace: str
    address: str
    interface: str

    def command(self, *words: object) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *map(str, words)]

    def received_bytes(self) -> int:
        return self._bytes("rx")

    def sent_bytes(self) -> int:
        return self._bytes("tx")

    def _bytes(self, way: str) -> int:
        show = ["ip", "-n", self.namespace, "-json", "-stats", "link", "show", self.interface]
        (link,) = json.loads(subprocess.run(show, capture_output=True, check=True, timeout=30).stdout)
        return link["stats64"][way]["bytes"]

    def pull_cable(self) -> None:
        _must(_ip("-n", self.namespace, "link", "set", self.interface, "down"))

    def plug_cable(self) -> None:
        _must(_ip("-n", self.namespace, "link", "set", self.interface, "up"))


@contextlib.contextmanager
def several_hosts(count: int, late: bool) -> Iterator[tuple[Host, ...]]:
    """``late``: every packet takes DELAY_SECONDS each way, and LOSS of them never arrive."""
    if reason := _why_impossible():
        pytest.skip(reason)
    switch, *names = [f"mlxdist-{os.getpid()}-{name}" for name in ("switch", *"abcdefgh"[:count])]
    hosts = tuple(Host(name, f"{_NETWORK}.{number}", "mlxdist0") for number, name in enumerate(names, 1))
    with contextlib.ExitStack() as undo:
        for namespace in (switch, *names):
            if error := _ip("netns", "add", namespace):
                pytest.skip(f"this machine allows no network namespaces: {error}")
            undo.callback(_ip, "netns", "delete", namespace)
        if not (late and _needs_relay(hosts[0])):
            _join_by_switch(switch, hosts)
            if late:
                _must(_delay_by_netem(hosts))
        else:
            undo.enter_context(_relay(hosts))
        for host in hosts:
            _must(_ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface))
            _must(_ip("-n", host.namespace, "link", "set", host.interface, "up", "mtu", str(_MTU)))
            _must(_ip("-n", host.namespace, "link", "set", "lo", "up"))
        yield hosts


def two_hosts(late: bool) -> contextlib.AbstractContextManager[tuple[Host, ...]]:
    return several_hosts(2, late)


@contextlib.contextmanager
def control_network(hosts: tuple[Host, ...]) -> Iterator[tuple[Host, ...]]:
    """Another cable between two hosts, for the rendezvous: they are in no common subnet there, so no data takes it."""
    interface = "control0"
    ends = [replace(host, address=f"{_CONTROL}.{n}", interface=interface) for n, host in enumerate(hosts, 1)]
    peer = ["peer", "name", interface, "netns", hosts[1].namespace]
    _must(_ip("-n", hosts[0].namespace, "link", "add", interface, "type", "veth", *peer))
    for end, other in zip(ends, reversed(ends)):
        _must(_ip("-n", end.namespace, "addr", "add", end.address, "peer", other.address, "dev", interface))
        end.plug_cable()
    yield tuple(ends)


def _why_impossible() -> str | None:
    if not shutil.which("ip") or not shutil.which("tc"):
        return "there is no ip or no tc: apt-get install iproute2"
    return "only root makes network namespaces" if os.geteuid() else None


def _call(*words: str) -> str:
    """The error, empty if there was none."""
    result = subprocess.run(words, capture_output=True, text=True, timeout=30)
    return result.stderr.strip() or f"exit status {result.returncode}" if result.returncode else ""


def _ip(*words: str) -> str:
    return _call("ip", *words)


def _must(error: str) -> None:
    assert not error, error


def _join_by_switch(switch: str, hosts: tuple[Host, ...]) -> None:
    _must(_ip("-n", switch, "link", "add", "switch", "type", "bridge"))
    for number, host in enumerate(hosts):
        port = f"port{number}"
        ends = ["type", "veth", "peer", "name", host.interface, "netns", host.namespace]
        _must(_ip("-n", switch, "link", "add", port, *ends))
        _must(_ip("-n", switch, "link", "set", port, "master", "switch", "up", "mtu", str(_MTU)))
    _must(_ip("-n", switch, "link", "set", "switch", "up"))


def _delay_by_netem(hosts: tuple[Host, ...]) -> str:
    netem = ["root", "netem", "delay", f"{DELAY_SECONDS * 1000:g}ms", "loss", f"{LOSS:.0%}"]
    errors = [_call("tc", "-n", host.namespace, "qdisc", "add", "dev", host.interface, *netem) for host in hosts]
    return next(filter(None, errors), "")


def _needs_relay(host: Host) -> bool:
    """Whether this kernel is built without netem."""
    _must(_ip("-n", host.namespace, "link", "add", host.interface, "type", "veth", "peer", "name", "other"))
    error = _delay_by_netem((host,))
    _must(_ip("-n", host.namespace, "link", "delete", host.interface))
    return bool(error)


@contextlib.contextmanager
def _relay(hosts: tuple[Host, ...]) -> Iterator[None]:
    """What netem does, without it: each host has a tun device, and a thread carries the packets."""
    with contextlib.ExitStack() as undo:
        ends: dict[bytes, int] = {}
        for number, host in enumerate(hosts):
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            undo.callback(os.close, end)
            name = f"mlxd{os.getpid()}{number}"[:15]
            fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
            _must(_ip("link", "set", name, "netns", host.namespace, "name", host.interface))
            ends[socket.inet_aton(host.address)] = end
        stop, stopped = os.pipe()
        undo.callback(os.close, stop)
        thread = threading.Thread(target=_carry, args=(ends, stop))
        thread.start()
        try:
            yield
        finally:
            os.close(stopped)
            thread.join()


def _carry(ends: dict[bytes, int], stop: int) -> None:
    """Until the other end of ``stop`` is closed. ``ends``: by the address of the host."""
    generator = random.Random(1)
    waiting: list[tuple[float, int, int, bytes]] = []  # when, number, to, packet
    number = 0
    while True:
        wait = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([*ends.values(), stop], [], [], wait)
        if stop in ready:
            return
        for end in ready:
            # BlockingIOError: more than fits. OSError: the interface is down.
            with contextlib.suppress(BlockingIOError, OSError):
                packet = os.read(end, 65536)
                number += 1
                to = ends.get(packet[16:20])  # the destination in the header of IPv4
                if to is not None and generator.random() >= LOSS:
                    heapq.heappush(waiting, (time.monotonic() + DELAY_SECONDS, number, to, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, to, packet = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # a cable loses what does not fit
                os.write(to, packet)


@contextlib.contextmanager
def start_ranks(
    hosts: Sequence[Host],
    *command: object,
    variables: Mapping[str, str] = {},
    of_ranks: Sequence[Mapping[str, str]] | None = None,
) -> Iterator[list[subprocess.Popen]]:
    """A rank on each host, started by hand: its output is one stream. ``of_ranks``: more variables for each."""
    job = {
        "MLXDIST_WORLD_SIZE": str(len(hosts)),
        "MLXDIST_RENDEZVOUS": f"{hosts[0].address}:{PORT}",
        "MLXDIST_SECRET": secrets.token_hex(32),
    } | dict(variables)
    started = [
        subprocess.Popen(
            host.command(*command),
            env=os.environ | job | {"MLXDIST_RANK": str(rank)} | dict(of_ranks[rank] if of_ranks else {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, host in enumerate(hosts)
    ]
    try:
        yield started
    finally:
        for rank in started:
            rank.kill()
            rank.wait()
            rank.stdout.close()
