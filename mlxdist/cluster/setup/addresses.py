"""Addresses for the ends of cables. Each cable is a subnet of its own, so that the route to a peer is its cable."""

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Interface, IPv4Network

from mlxdist.base.errors import InvalidArgument

from ..facts.collect import HostFacts
from ..topology.topology import Cable, Topology

__all__ = ["RANGE", "Link", "assign_addresses"]

RANGE = IPv4Network("10.111.0.0/16")
_LINK = 30  # two addresses
_SELF_ASSIGNED = IPv4Network("169.254.0.0/16")  # another one after each restart


@dataclass(frozen=True)
class Link:
    """A cable and the addresses of its ends. ``kept``: both ends had these addresses before."""

    cable: Cable
    a: IPv4Interface
    b: IPv4Interface
    kept: bool = False

    def address(self, host: int) -> IPv4Interface:
        return self.a if self.cable.a.host == host else self.b


def assign_addresses(machines: Sequence[HostFacts], topology: Topology, within: IPv4Network = RANGE) -> list[Link]:
    """Makes a link for each cable that has interfaces. Addresses that fit are kept, so a second run changes nothing.
    Raises InvalidArgument: ``within`` has too few free subnets."""
    cables = [cable for cable in topology.cables if cable.a.interface and cable.b.interface]
    ends = {(end.host, end.interface) for cable in cables for end in (cable.a, cable.b)}
    taken = [
        address.network
        for host, machine in enumerate(machines)
        for interface in machine.interfaces
        if (host, interface.name) not in ends
        for address in interface.addresses
    ]
    kept: dict[Cable, Link] = {}
    # All links to keep come first: a new subnet must not overlap one that a later cable already has.
    for cable in cables:
        link = _present(machines, cable)
        if link and not any(link.a.network.overlaps(network) for network in taken):
            kept[cable] = link
            taken.append(link.a.network)
    links = []
    for cable in cables:
        link = kept.get(cable) or _completed(machines, cable, taken, within) or _fresh(cable, taken, within)
        taken.append(link.a.network)
        links.append(link)
    return links


def _present(machines: Sequence[HostFacts], cable: Cable) -> Link | None:
    """The link of a cable whose two ends already have addresses in one subnet; None for any other cable."""
    for a in _addresses(machines, cable, cable.a.host):
        for b in _addresses(machines, cable, cable.b.host):
            if a.network == b.network and a.ip != b.ip:
                return Link(cable, a, b, kept=True)
    return None


def _completed(
    machines: Sequence[HostFacts], cable: Cable, taken: Sequence[IPv4Network], within: IPv4Network
) -> Link | None:
    """The link of a cable where one end has kept an address of this command and the other has lost its own."""
    for host in cable.pair:
        for address in _addresses(machines, cable, host):
            network = address.network
            if network.prefixlen != _LINK or not network.subnet_of(within) or any(map(network.overlaps, taken)):
                continue
            if address.ip not in list(network.hosts()):
                continue
            (other,) = (IPv4Interface(f"{ip}/{_LINK}") for ip in network.hosts() if ip != address.ip)
            return Link(cable, address, other) if host == cable.a.host else Link(cable, other, address)
    return None


def _fresh(cable: Cable, taken: Sequence[IPv4Network], within: IPv4Network) -> Link:
    subnets = within.subnets(new_prefix=_LINK) if within.prefixlen <= _LINK else iter(())
    network = next((subnet for subnet in subnets if not any(map(subnet.overlaps, taken))), None)
    if network is None:
        raise InvalidArgument(f"{within} has too few subnets of two addresses left; give a larger one with --range")
    a, b = (IPv4Interface(f"{ip}/{_LINK}") for ip in network.hosts())
    return Link(cable, a, b)


def _addresses(machines: Sequence[HostFacts], cable: Cable, host: int) -> list[IPv4Interface]:
    interface = machines[host].interface(cable.end(host).interface)
    addresses = interface.addresses if interface else ()
    return [address for address in addresses if address.ip not in _SELF_ASSIGNED]
