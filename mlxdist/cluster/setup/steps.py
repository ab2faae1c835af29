"""The commands that give the ends of cables their addresses, and for each the one that takes it back.

On a Mac the address belongs to a network service of the port, so that it is there after a restart, too. On Linux it
belongs to a connection of NetworkManager where that runs; elsewhere it lasts until the restart.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mlxdist.base.errors import InvalidArgument

from ..facts.collect import HostFacts
from ..facts.interfaces import Service
from .addresses import Link

__all__ = ["Step", "is_undone", "plan_steps"]

# What can be done, by name: an undo file has such names and their values, and no commands.
_ACTIONS: Mapping[str, tuple[int, Callable[..., list[str]]]] = {
    "create service": (2, lambda name, port: ["networksetup", "-createnetworkservice", name, port]),
    "remove service": (1, lambda name: ["networksetup", "-removenetworkservice", name]),
    "enable service": (1, lambda name: ["networksetup", "-setnetworkserviceenabled", name, "on"]),
    "disable service": (1, lambda name: ["networksetup", "-setnetworkserviceenabled", name, "off"]),
    "set address": (3, lambda name, ip, mask: ["networksetup", "-setmanual", name, ip, mask]),
    "set address and router": (4, lambda name, ip, mask, way: ["networksetup", "-setmanual", name, ip, mask, way]),
    "set dhcp": (1, lambda name: ["networksetup", "-setdhcp", name]),
    "set no address": (1, lambda name: ["networksetup", "-setv4off", name]),
    "leave bridge": (2, lambda bridge, interface: ["ifconfig", bridge, "deletem", interface]),
    "join bridge": (2, lambda bridge, interface: ["ifconfig", bridge, "addm", interface]),
    "add address": (2, lambda interface, address: ["ip", "address", "add", address, "dev", interface]),
    "delete address": (2, lambda interface, address: ["ip", "address", "delete", address, "dev", interface]),
    "set up": (1, lambda interface: ["ip", "link", "set", interface, "up"]),
    "set down": (1, lambda interface: ["ip", "link", "set", interface, "down"]),
    "add connection": (
        3,
        lambda name, interface, address: [
            *("nmcli", "connection", "add", "type", "ethernet", "ifname", interface, "con-name", name),
            *("ipv4.method", "manual", "ipv4.addresses", address, "ipv6.method", "link-local"),
        ],
    ),
    "start connection": (1, lambda name: ["nmcli", "connection", "up", name]),
    "delete connection": (1, lambda name: ["nmcli", "connection", "delete", name]),
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
            if action not in _ACTIONS or _ACTIONS[action][0] != len(values):
                raise InvalidArgument(f"there is no step {action!r:.80} with {len(values)} values")
            if any(not isinstance(value, str) or value.startswith("-") or "\0" in value for value in values):
                raise InvalidArgument(f"the step {action!r} cannot have the values {values!r:.200}")

    @property
    def words(self) -> list[str]:
        return _ACTIONS[self.action][1](*self.values)

    @property
    def undone(self) -> "Step | None":
        return Step(self.host, self.undo[0], self.undo[1:]) if self.undo else None

    def __str__(self) -> str:
        return f"sudo {shlex.join(self.words)}"


def plan_steps(machines: Sequence[HostFacts], links: Sequence[Link], without_bridge: bool = False) -> list[Step]:
    """What is still to be done, host by host; nothing where all is as it should be."""
    steps: list[Step] = []
    for host, machine in enumerate(machines):
        for link in links:
            if host in link.cable.pair:
                plan = _on_mac if machine.is_mac else _on_linux
                steps += plan(machine, link, host, without_bridge)
    return steps


def is_undone(step: Step, machine: HostFacts) -> bool:
    """Whether a step that takes something back has nothing to do: the system or the user has done it already."""
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
        steps.append(
            Step(machine.name, "leave bridge", (bridge, end.interface), ("join bridge", bridge, end.interface))
        )
    found = [service for service in machine.services if service.interface == end.interface]
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


def _on_linux(machine: HostFacts, link: Link, host: int, without_bridge: bool) -> list[Step]:
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
