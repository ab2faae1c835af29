"""Nodes with made-up devices: what ranks exchange to choose the links between them."""

import ipaddress

from hypothesis import strategies as st

from mlxdist.runtime.devices.device import GID_TYPES, Device, Gid
from mlxdist.runtime.devices.links import Link, choose
from mlxdist.runtime.devices.node_info import NodeInfo


def gid(index: int, address: str, type_: str = "RoCE v2", prefix: int | None = 24) -> Gid:
    """``address``: IPv4 or IPv6."""
    if ":" in address:
        return Gid(index, type_, ipaddress.IPv6Address(address).packed)
    return Gid(index, type_, b"\0" * 10 + b"\xff\xff" + ipaddress.IPv4Address(address).packed, prefix)


def device(name: str, *gids: Gid, state: str = "ACTIVE", provider: str = "ibverbs", error: str = "") -> Device:
    return Device(provider, name, error, state, gids, link_layer="Ethernet")


def soft(*addresses: str) -> list[Device]:
    gids = [Gid(0, "memory", b"\x07" * 16), *(gid(i, a, "TCP") for i, a in enumerate(addresses, 1))]
    return [device(name, *gids, provider="soft") for name in ("soft0", "soft1", "soft2", "soft3")]


def node(host: str, *devices: Device, address: str = "", tcp: tuple[str, ...] = (), missing: str = "") -> NodeInfo:
    return NodeInfo(host.encode(), host, address, (*devices, *soft(*tcp)), missing)


def by(name: str, index: int, provider: str = "ibverbs") -> tuple[Link, ...]:
    return (Link(provider, name, index),)


MEMORY = (Link("soft", "soft0", 0),)


def selected(nodes: list[NodeInfo], low: int = 0, high: int = 1, **options) -> tuple:
    """The links of two ranks to each other."""
    return choose(nodes, low, **options).links[high], choose(nodes, high, **options).links[low]


addresses = st.sampled_from(
    ["10.0.0.1", "10.0.0.2", "10.0.1.1", "10.0.1.2", "169.254.0.1", "169.254.3.4", "172.17.0.1", "127.0.0.1"]
    + ["fe80::1", "fe80::2", "2001:db8::1", "2001:db8::2"]
)
tables = st.lists(
    st.tuples(addresses, st.sampled_from(GID_TYPES), st.sampled_from([None, 8, 16, 24, 30])),
    max_size=5,
    unique_by=lambda line: line[:2],
).map(lambda lines: tuple(gid(i * 3, *line) for i, line in enumerate(lines)))


@st.composite
def worlds(draw) -> list[NodeInfo]:
    hosts = []
    for name in "abc"[: draw(st.integers(1, 3))]:
        count = draw(st.integers(0, 5))
        states = st.sampled_from(["ACTIVE", "ACTIVE", "DOWN", "INIT"])
        devices = [device(f"{name}{i}", *draw(tables), state=draw(states)) for i in range(count)]
        number = ord(name) - ord("a") + 1
        hosts.append(node(name, *draw(st.permutations(devices)), address=f"10.7.0.{number}", tcp=(f"10.7.0.{number}",)))
    return draw(st.lists(st.sampled_from(hosts), min_size=2, max_size=5))
