"""`mlxdist config`: addresses of cables, and which address of an Ethernet is taken."""

from dataclasses import replace
from ipaddress import IPv4Interface, IPv4Network

import pytest
from surveys import macs, mesh

from mlxdist.base.errors import InvalidArgument
from mlxdist.cluster.facts.collect import HostFacts
from mlxdist.cluster.facts.interfaces import Interface
from mlxdist.cluster.setup.addresses import RANGE, assign_addresses
from mlxdist.cluster.setup.ethernet import choose_addresses
from mlxdist.cluster.topology.topology import build_topology


def with_links(machines, links):
    """The hosts after their interfaces have the addresses of the links."""
    found = []
    for host, machine in enumerate(machines):
        given = {link.cable.end(host).interface: link.address(host) for link in links if host in link.cable.pair}
        interfaces = [replace(i, addresses=(given[i.name],)) if i.name in given else i for i in machine.interfaces]
        found.append(replace(machine, interfaces=tuple(interfaces)))
    return found


def test_each_cable_has_a_subnet_of_its_own():
    machines = macs(4, mesh(4) + [(0, 1)])
    links = assign_addresses(machines, build_topology(machines))
    networks = [link.a.network for link in links]
    assert len(set(networks)) == 7 and all(n.prefixlen == 30 and n.subnet_of(RANGE) for n in networks)
    assert all(link.a.network == link.b.network and link.a != link.b for link in links)
    assert str(links[0].a) == "10.111.0.1/30" and str(links[0].b) == "10.111.0.2/30"


def test_what_is_there_is_kept():
    machines = macs(3, mesh(3))
    topology = build_topology(machines)
    links = assign_addresses(machines, topology)
    again = assign_addresses(with_links(machines, links), topology)
    assert [(link.a, link.b) for link in again] == [(link.a, link.b) for link in links]
    assert all(link.kept for link in again)
    # One end of the second cable has lost its address, and a third host came in between: nothing else moves.
    half = with_links(machines, links)
    lost = [replace(i, addresses=()) if i.name == "en2" else i for i in half[2].interfaces]
    half[2] = replace(half[2], interfaces=tuple(lost))
    repaired = assign_addresses(half, topology)
    assert [(link.a, link.b) for link in repaired] == [(link.a, link.b) for link in links]
    assert [link.kept for link in repaired] == [True, False, True]


def test_addresses_of_the_user_are_kept_and_others_are_not():
    machines = macs(2, [(0, 1)])

    def given(*addresses):
        return [
            replace(s, interfaces=(*s.interfaces[:1], Interface("en2", True, (IPv4Interface(address),))))
            for s, address in zip(machines, addresses)
        ]

    topology = build_topology(machines)
    (mine,) = assign_addresses(given("10.0.9.1/24", "10.0.9.7/24"), topology)
    assert mine.kept and str(mine.b) == "10.0.9.7/24"
    for useless in (
        ("169.254.3.4/16", "169.254.9.9/16"),  # macOS makes others at the next start
        ("10.0.9.1/24", "10.0.8.1/24"),
        ("10.0.9.1/24", "10.0.9.1/24"),
        ("192.168.1.200/16", "192.168.1.201/16"),  # the network that both are in otherwise
    ):
        (fresh,) = assign_addresses(given(*useless), topology)
        assert not fresh.kept and fresh.a.network.subnet_of(RANGE)


def test_subnets_that_are_taken_or_too_few():
    machines = macs(2, [(0, 1), (0, 1)])
    machines[1] = replace(
        machines[1], interfaces=(*machines[1].interfaces, Interface("en9", True, (IPv4Interface("10.111.0.200/24"),)))
    )
    topology = build_topology(machines)
    assert str(assign_addresses(machines, topology)[0].a) == "10.111.1.1/30"
    with pytest.raises(InvalidArgument, match="too few subnets"):
        assign_addresses(machines, topology, IPv4Network("10.9.0.0/30"))
    with pytest.raises(InvalidArgument, match="too few subnets"):
        assign_addresses(machines, topology, IPv4Network("10.9.0.0/31"))


def host(name, *interfaces, default="", wireless=()):
    listed = tuple(Interface(n, True, tuple(map(IPv4Interface, addresses))) for n, *addresses in interfaces)
    return HostFacts(name, "Linux", interfaces=listed, default=default, wireless=frozenset(wireless))


@pytest.mark.parametrize(
    ("machines", "addresses"),
    [
        # Wi-Fi is the default route of both, and they have a cable.
        (
            [
                host("a", ("en1", "192.168.1.5/24"), ("en0", "10.0.0.5/24"), default="en1", wireless=["en1"]),
                host("b", ("en1", "192.168.1.6/24"), ("en0", "10.0.0.6/24"), default="en1", wireless=["en1"]),
            ],
            ["10.0.0.5", "10.0.0.6"],
        ),
        # One has Wi-Fi alone: the network that both are in.
        (
            [
                host("a", ("en1", "192.168.1.5/24"), ("en0", "10.0.0.5/24"), default="en0", wireless=["en1"]),
                host("b", ("en1", "192.168.1.6/24"), default="en1", wireless=["en1"]),
            ],
            ["192.168.1.5", "192.168.1.6"],
        ),
        # One network, by cable and by Wi-Fi.
        (
            [
                host("a", ("en1", "10.0.0.9/24"), ("en0", "10.0.0.5/24"), default="en1", wireless=["en1"]),
                host("b", ("en0", "10.0.0.6/24"), default="en0"),
            ],
            ["10.0.0.5", "10.0.0.6"],
        ),
        # Two networks with all: that of the default route.
        (
            [
                host("a", ("eth0", "10.0.0.5/24"), ("eth1", "10.9.0.5/24"), default="eth1"),
                host("b", ("eth0", "10.0.0.6/24"), ("eth1", "10.9.0.6/24"), default="eth1"),
            ],
            ["10.9.0.5", "10.9.0.6"],
        ),
        # None with all: the default route of each. Tunnels, containers and self-assigned addresses never.
        (
            [
                host(
                    "a", ("docker0", "172.17.0.1/16"), ("eth0", "10.0.0.5/24"), ("eth1", "10.7.0.5/24"), default="eth1"
                ),
                host(
                    "b", ("docker0", "172.17.0.1/16"), ("utun3", "10.7.0.6/24"), ("eth0", "10.1.0.6/24"), default="eth0"
                ),
                host("c", ("lo", "127.0.0.1/8"), ("eth0", "169.254.1.1/16")),
            ],
            ["10.7.0.5", "10.1.0.6", None],
        ),
    ],
)
def test_addresses_of_the_network(machines, addresses):
    assert [choice and str(choice.address.ip) for choice in choose_addresses(machines)] == addresses
