"""Network interfaces and services of a host, from what macOS and Linux print about them."""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Interface
from typing import Any

from mlxdist.base.json_reader import parse_json

from .system import dicts

__all__ = [
    "Interface",
    "Service",
    "default_interface",
    "hardware_ports",
    "linux_interfaces",
    "macos_interfaces",
    "services",
]


@dataclass(frozen=True)
class Interface:
    """A network interface. ``members``: the interfaces in it, if it is a bridge."""

    name: str
    up: bool = True
    addresses: tuple[IPv4Interface, ...] = ()
    members: tuple[str, ...] = ()


@dataclass(frozen=True)
class Service:
    """A network service of macOS: settings for an interface that outlive a restart."""

    name: str
    port: str
    interface: str
    enabled: bool = True
    method: str = ""  # "manual", "dhcp", "off", or another way to its address, or "" where macOS does not say
    address: IPv4Interface | None = field(default=None)  # what is set by hand; of other methods None
    router: str = ""  # what is set with it, "" if nothing


def hardware_ports(text: str) -> dict[str, str]:
    """The interface of each port in `networksetup -listallhardwareports`: {"Thunderbolt 1": "en2"}."""
    return dict(re.findall(r"^Hardware Port: (.+)\nDevice: (\S+)$", text, re.MULTILINE))


def macos_interfaces(text: str) -> tuple[Interface, ...]:
    """The interfaces in the output of `ifconfig -a`."""
    found = []
    for part in re.split(r"^(?=[A-Za-z][\w.-]*: flags=)", text, flags=re.MULTILINE):
        if not (head := re.match(r"([A-Za-z][\w.-]*): flags=[0-9a-fA-F]*<([A-Z0-9,]*)>", part)):
            continue
        pairs = re.findall(r"^\s+inet (\S+)(?: --> \S+)? netmask (0x[0-9a-fA-F]{8})", part, re.MULTILINE)
        addresses = tuple(filter(None, (_interface(a, f"{ipaddress.IPv4Address(int(m, 16))}") for a, m in pairs)))
        members = tuple(re.findall(r"^\s*member: (\S+)", part, re.MULTILINE))
        found.append(Interface(head[1], "UP" in head[2].split(","), addresses, members))
    return tuple(found)


def linux_interfaces(text: str) -> tuple[Interface, ...]:
    """The interfaces in the output of `ip -json addr`."""
    found = []
    for entry in _objects(text):
        if isinstance(entry.get("ifname"), str):
            inet = [listed for listed in dicts(entry.get("addr_info")) if listed.get("family") == "inet"]
            addresses = (_interface(listed.get("local"), listed.get("prefixlen")) for listed in inet)
            flags = entry.get("flags")
            is_up = isinstance(flags, list) and "UP" in flags
            found.append(Interface(entry["ifname"], is_up, tuple(filter(None, addresses))))
    return tuple(found)


def default_interface(text: str) -> str:
    """The interface to other networks in the output of `route -n get default` or `ip -json route show default`."""
    if found := re.search(r"^\s*interface: (\S+)", text, re.MULTILINE):
        return found[1]
    routes = [route for route in _objects(text) if isinstance(route.get("dev"), str)]
    return min(routes, key=_metric)["dev"] if routes else ""


def services(text: str, details: Mapping[str, str]) -> tuple[Service, ...]:
    """The services that `networksetup -listnetworkserviceorder` lists. ``details``: their `-getinfo`, by name."""
    entries = re.findall(r"^\((\d+|\*)\) (.+)\n\(Hardware Port: (.*), Device: ?(\S*)\)$", text, re.MULTILINE)
    return tuple(
        Service(name, port, interface, number != "*", *_settings(details.get(name, "")))
        for number, name, port, interface in entries
    )


def _settings(text: str) -> tuple[str, IPv4Interface | None, str]:
    method = re.search(r"^(\w+)(?: \w+)* Configuration", text, re.MULTILINE)
    values = dict(re.findall(r"^(IP address|Subnet mask|Router): ?(.*)$", text, re.MULTILINE))
    address = _interface(values.get("IP address"), values.get("Subnet mask"))
    router = values.get("Router", "")
    name = method[1].lower() if method else ""
    if name == "manual" and address is None:
        name = "off"  # macOS prints "Manual Configuration" without an address
    return name, address if name == "manual" else None, "" if router in ("(null)", "none") else router


def _interface(address: Any, mask: Any) -> IPv4Interface | None:
    try:
        return IPv4Interface(f"{address}/{mask}")
    except ValueError:
        return None


def _objects(text: str) -> list[dict[str, Any]]:
    """The objects of a list that `ip -json` prints; none where the text is something else."""
    try:
        return dicts(parse_json(text, repeated=True))
    except ValueError:
        return []


def _metric(route: dict[str, Any]) -> int:
    return route["metric"] if isinstance(route.get("metric"), int) else 0
