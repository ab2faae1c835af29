"""Two hosts on this machine: network namespaces with an Ethernet of their own, which nothing else is connected to.

Needs root, and ip and tc of iproute2. The tests that ask for hosts are skipped elsewhere, with the reason.
"""

import contextlib
import fcntl
import heapq
import json
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

__all__ = ["DELAY_SECONDS", "LOSS", "Host", "two_hosts"]

DELAY_SECONDS = 0.002
LOSS = 0.01
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
        show = ["ip", "-n", self.namespace, "-json", "-stats", "link", "show", self.interface]
        (link,) = json.loads(subprocess.run(show, capture_output=True, check=True, timeout=30).stdout)
        return link["stats64"]["rx"]["bytes"]

    def pull_cable(self) -> None:
        _must(_ip("-n", self.namespace, "link", "set", self.interface, "down"))

    def plug_cable(self) -> None:
        _must(_ip("-n", self.namespace, "link", "set", self.interface, "up"))


@contextlib.contextmanager
def two_hosts(late: bool) -> Iterator[tuple[Host, Host]]:
    """``late``: every packet takes DELAY_SECONDS each way, and LOSS of them never arrive."""
    if reason := _why_impossible():
        pytest.skip(reason)
    names = [f"mlxdist-{os.getpid()}-{side}" for side in "ab"]
    hosts = tuple(Host(name, f"10.213.77.{number}", "mlxdist0") for number, name in enumerate(names, 1))
    with contextlib.ExitStack() as undo:
        for host in hosts:
            if error := _ip("netns", "add", host.namespace):
                pytest.skip(f"this machine allows no network namespaces: {error}")
            undo.callback(_ip, "netns", "delete", host.namespace)
        if not (late and _needs_relay(hosts)):
            _join_by_veth(hosts)
            if late:
                assert not _delay_by_netem(hosts)
        else:
            undo.enter_context(_relay(hosts))
        for host in hosts:
            _must(_ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface))
            _must(_ip("-n", host.namespace, "link", "set", host.interface, "up", "mtu", str(_MTU)))
            _must(_ip("-n", host.namespace, "link", "set", "lo", "up"))
        yield hosts


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


def _join_by_veth(hosts: tuple[Host, ...]) -> None:
    a, b = hosts
    ends = ["type", "veth", "peer", "name", b.interface, "netns", b.namespace]
    _must(_ip("link", "add", a.interface, "netns", a.namespace, *ends))


def _delay_by_netem(hosts: tuple[Host, ...]) -> str:
    netem = ["root", "netem", "delay", f"{DELAY_SECONDS * 1000:g}ms", "loss", f"{LOSS:.0%}"]
    errors = [_call("tc", "-n", host.namespace, "qdisc", "add", "dev", host.interface, *netem) for host in hosts]
    return next(filter(None, errors), "")


def _needs_relay(hosts: tuple[Host, ...]) -> bool:
    """Whether this kernel is built without netem."""
    _join_by_veth(hosts)
    error = _delay_by_netem(hosts)
    _must(_ip("-n", hosts[0].namespace, "link", "delete", hosts[0].interface))
    return bool(error)


@contextlib.contextmanager
def _relay(hosts: tuple[Host, ...]) -> Iterator[None]:
    """What netem does, without it: each host has a tun device, and a thread carries the packets."""
    with contextlib.ExitStack() as undo:
        ends = []
        for number, host in enumerate(hosts):
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            undo.callback(os.close, end)
            name = f"mlxd{os.getpid()}{number}"[:15]
            fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
            _must(_ip("link", "set", name, "netns", host.namespace, "name", host.interface))
            ends.append(end)
        stop, stopped = os.pipe()
        undo.callback(os.close, stop)
        thread = threading.Thread(target=_carry, args=(ends, stop))
        thread.start()
        try:
            yield
        finally:
            os.close(stopped)
            thread.join()


def _carry(ends: list[int], stop: int) -> None:
    """Until the other end of ``stop`` is closed."""
    generator = random.Random(1)
    waiting: list[tuple[float, int, int, bytes]] = []  # when, number, to, packet
    number = 0
    while True:
        wait = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([*ends, stop], [], [], wait)
        if stop in ready:
            return
        for end in ready:
            # None: more than fits. OSError: the interface is down.
            with contextlib.suppress(BlockingIOError, OSError):
                packet = os.read(end, 65536)
                number += 1
                if generator.random() >= LOSS:
                    to = ends[1 - ends.index(end)]
                    heapq.heappush(waiting, (time.monotonic() + DELAY_SECONDS, number, to, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, to, packet = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # a cable loses what does not fit
                os.write(to, packet)
