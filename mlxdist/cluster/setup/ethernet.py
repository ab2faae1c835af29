"""The address by which all other hosts reach a host: not one of Wi-Fi where all have a cable."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Interface, IPv4Network

from ..facts.collect import HostFacts

__all__ = ["Choice", "choose_addresses"]

# Interfaces that lead to no other host, or around it: tunnels, virtual machines, containers, AirDrop.
_VIRTUAL = re.compile(
    r"(lo|utun|tun|tap|ipsec|ppp|gif|stf|wg|tailscale|awdl|llw|anpi|ap|docker|cni|flannel|cali|virbr|vmnet|bridge|br-|veth)"
    r"[\w.-]*"
)


@dataclass(frozen=True)
class Choice:
    """An address of a host, and the interface that has it. ``port`` is the name that macOS has for the interface."""

    address: IPv4Interface
    interface: str
    wireless: bool
    is_default: bool
    port: str = ""

    def __str__(self) -> str:
        kind = "Wi-Fi" if self.wireless else self.port or "wired"
        return f"{self.address.ip} ({self.interface}, {kind}{', default route' if self.is_default else ''})"


def choose_addresses(machines: Sequence[HostFacts], without: Sequence[frozenset[str]] = ()) -> list[Choice | None]:
    """Selects an address for each host by which all others reach it; None for a host without any address.

    Args:
        without: for each host, the interfaces with a cable that leads to one other host only.
    """
    possible = [_possible(machine, without[i] if without else frozenset()) for i, machine in enumerate(machines)]
    networks = {choice.address.network for choices in possible for choice in choices}
    common = [
        network
        for network in networks
        if all(any(c.address.network == network for c in choices) for choices in possible)
    ]
    if common:
        # Among equals the lowest network: the order of a set may differ from run to run.
        selected = max(common, key=lambda network: (_worth(network, possible), -int(network.network_address)))
        possible = [[c for c in choices if c.address.network == selected] for choices in possible]
    return [max(choices, key=_rank, default=None) for choices in possible]


def _possible(machine: HostFacts, without: frozenset[str]) -> list[Choice]:
    names = {interface: port for port, interface in machine.ports.items()}
    return [
        Choice(
            address,
            interface.name,
            interface.name in machine.wireless,
            interface.name == machine.default,
            names.get(interface.name, ""),
        )
        for interface in machine.interfaces
        if interface.up and not _VIRTUAL.fullmatch(interface.name) and interface.name not in without
        for address in interface.addresses
        if not (address.ip.is_link_local or address.ip.is_loopback)
    ]


def _worth(network: IPv4Network, possible: Sequence[Sequence[Choice]]) -> tuple[int, int]:
    here = [c for choices in possible for c in choices if c.address.network == network]
    return sum(not c.wireless for c in here), sum(c.is_default for c in here)


def _rank(choice: Choice) -> tuple[bool, bool]:
    return not choice.wireless, choice.is_default
