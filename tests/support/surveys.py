"""What hosts answer `mlxdist config`, made up: Macs with any cables between them."""

import itertools
from ipaddress import IPv4Interface

from fake_macs import FIXTURES, fixture

from mlxdist.cluster.facts.collect import HostFacts
from mlxdist.cluster.facts.interfaces import Interface
from mlxdist.cluster.facts.thunderbolt import Peer, Receptacle, read_receptacles

THUNDERBOLT = sorted(path.name for path in FIXTURES.glob("*.json"))


def mac(name, *cables, size=4, speed=80, **fields):
    """``cables``: (own port, other host, its port). Thunderbolt N is en(N + 1)."""
    plugged = {own: f"{other}-{port}" for own, other, port in cables}
    receptacles = tuple(
        Receptacle(
            str(port),
            speed if port in plugged else 120,
            port in plugged,
            f"en{port + 1}",
            f"{name}-{port}",
            (Peer(plugged[port], "Mac Studio"),) if port in plugged else (),
        )
        for port in range(1, size + 1)
    )
    interfaces = {f"Thunderbolt {port}": f"en{port + 1}" for port in range(1, size + 1)}
    start = {
        "sudo": True,
        "rdma_ctl": "enabled",
        "receptacles": receptacles,
        "ports": {"Ethernet": "en0", **interfaces},
        "rdma": {interface: f"rdma_{interface}" for interface in interfaces.values()},
        "interfaces": (Interface("en0", True, (IPv4Interface(f"192.168.1.{sum(name.encode())}/16"),)),)
        + tuple(Interface(interface) for interface in interfaces.values()),
        "default": "en0",
    }
    return HostFacts(name, "Darwin", **(start | fields))


def macs(count, pairs, **fields):
    """Hosts a, b, c ...; each new cable goes into the next free port."""
    ends = {host: [] for host in range(count)}
    for a, b in pairs:
        port_a, port_b = len(ends[a]) + 1, len(ends[b]) + 1
        ends[a].append((port_a, "abcdefgh"[b], port_b))
        ends[b].append((port_b, "abcdefgh"[a], port_a))
    return [mac("abcdefgh"[host], *ends[host], **fields) for host in range(count)]


def mesh(count):
    return list(itertools.combinations(range(count), 2))


def surveys_of(*files):
    interfaces = {f"Thunderbolt {port}": f"en{port + 1}" for port in range(1, 7)}
    return [
        mac("abcd"[i], receptacles=read_receptacles(fixture(file), interfaces), ports=interfaces)
        for i, file in enumerate(files)
    ]
