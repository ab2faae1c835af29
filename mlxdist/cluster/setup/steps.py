"""The commands that give the ends of cables their addresses, and for each the one that takes it back.

On a Mac the address belongs to a network service of the port, so that it is there after a restart, too. On Linux it
belongs to a connection of NetworkManager where that runs; elsewhere it lasts until the restart.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from mlxdist.base.errors import InvalidArgument

from ..facts.collect import HostFacts
from ..facts.interfaces import Service
from .addresses import Link

__all__ = ["Step", "is_undone", "plan_steps"]

# The actions, by name. An undo file has only names and values, so that no changed file can run other commands as root.
_ACTIONS = {
    "create service": "networksetup -createnetworkservice {0} {1}",
    "remove service": "networksetup -removenetworkservice {0}",
    "enable service": "networksetup -setnetworkserviceenabled {0} on",
    "disable service": "networksetup -setnetworkserviceenabled {0} off",
    "set address": "networksetup -setmanual {0} {1} {2}",
    "set address and router": "networksetup -setmanual {0} {1} {2} {3}",
    "set dhcp": "networksetup -setdhcp {0}",
    "set no address": "networksetup -setv4off {0}",
    "leave bridge": "ifconfig {0} deletem {1}",
    "join bridge": "ifconfig {0} addm {1}",
    "add address": "ip address add {1} dev {0}",
    "delete address": "ip address delete {1} dev {0}",
    "set up": "ip link set {0} up",
    "set down": "ip link set {0} down",
    "add connection": "nmcli connection add type ethernet ifname {1} con-name {0} ipv4.method manual "
    "ipv4.addresses {2} ipv6.method link-local",
    "start connection": "nmcli connection up {0}",
    "delete connection": "nmcli connection delete {0}",
}


@dataclass(frozen=True)
class Step:
    """A command for one host."""

    host: str  # what ssh connects to
    action: str  # a name in the table above, with its values
    values: tuple[str, ...]
    undo: tuple[str, ...] = ()  # action and values that take it back; empty where another step's undo does

    def __post_init__(self) -> None:
        for action, *values in filter(None, ((self.action, *self.values), self.undo)):
            if action not in _ACTIONS or _ACTIONS[action].count("{") != len(values):
                raise InvalidArgument(f"there is no step {action!r:.80} with {len(values)} values")
            if any(not isinstance(value, str) or value.startswith("-") or "\0" in value for value in values):
                raise InvalidArgument(f"the step {action!r} cannot have the values {values!r:.200}")

    @property
    def words(self) -> list[str]:
        return [word.format(*self.values) for word in _ACTIONS[self.action].split()]

    @property
    def undone(self) -> "Step | None":
        return Step(self.host, self.undo[0], self.undo[1:]) if self.undo else None

    def __str__(self) -> str:
        return f"sudo {shlex.join(self.words)}"


def plan_steps(machines: Sequence[HostFacts], links: Sequence[Link], without_bridge: bool = False) -> list[Step]:
    """Steps that are still to be run, host by host; none where all settings are in place."""
    steps: list[Step] = []
    for host, machine in enumerate(machines):
        for link in links:
            if host in link.cable.pair:
                steps += (
                    _on_mac(machine, link, host, without_bridge) if machine.is_mac else _on_linux(machine, link, host)
                )
    return steps


def is_undone(step: Step, machine: HostFacts) -> bool:
    """Whether an inverse step has nothing to do, because the system or the user has already taken the step back."""
    name, *rest = step.values
    if step.action == "join bridge":
        return machine.bridge_of(rest[0]) == name
    if step.action in ("delete address", "set down"):
        interface = machine.interface(name)
        if interface is None:
            return True
        return rest[0] not in map(str, interface.addresses) if rest else not interface.up
    if step.action in ("remove service", "disable service") or step.action.startswith("set "):
        return name not in [service.name for service in machine.services]
    return False


def _on_mac(machine: HostFacts, link: Link, host: int, without_bridge: bool) -> list[Step]:
    end, address = link.cable.end(host), link.address(host)
    steps = []
    bridge = machine.bridge_of(end.interface)
    if bridge and without_bridge:
        member = (bridge, end.interface)
        steps.append(Step(machine.name, "leave bridge", member, ("join bridge", *member)))
    found = [service for service in machine.services if service.interface == end.interface]
    # A service that is enabled and has the address comes first: it needs no step, so a second run changes nothing.
    service = min(found, key=lambda service: (not service.enabled, service.address != address), default=None)
    if service is None:
        name = f"mlxdist {end.port}"
        steps.append(Step(machine.name, "create service", (name, end.port), ("remove service", name)))
        steps.append(Step(machine.name, "set address", (name, str(address.ip), str(address.netmask))))
        return steps
    if not service.enabled:
        steps.append(Step(machine.name, "enable service", (service.name,), ("disable service", service.name)))
    if service.address != address:
        values = (service.name, str(address.ip), str(address.netmask))
        steps.append(Step(machine.name, "set address", values, _before(service)))
    return steps


def _before(service: Service) -> tuple[str, ...]:
    if service.address is None:
        return "set no address" if service.method == "off" else "set dhcp", service.name
    values = (service.name, str(service.address.ip), str(service.address.netmask))
    return ("set address and router", *values, service.router) if service.router else ("set address", *values)


def _on_linux(machine: HostFacts, link: Link, host: int) -> list[Step]:
    end, address = link.cable.end(host), link.address(host)
    interface = machine.interface(end.interface)
    has_address = interface is not None and address in interface.addresses
    if interface is not None and has_address and interface.up:
        return []
    if machine.network_manager and not has_address:
        name = f"mlxdist-{end.interface}"
        return [
            Step(machine.name, "add connection", (name, end.interface, str(address)), ("delete connection", name)),
            Step(machine.name, "start connection", (name,)),
        ]
    steps = []
    if not has_address:
        values = (end.interface, str(address))
        steps.append(Step(machine.name, "add address", values, ("delete address", *values)))
    if interface is None or not interface.up:
        steps.append(Step(machine.name, "set up", (end.interface,), ("set down", end.interface)))
    return steps
