"""The Thunderbolt receptacles of a Mac, and which other Macs and devices are plugged in there.

From `system_profiler SPThunderboltDataType -json`. Its keys differ between versions of macOS, and are missing for
displays and docks: an entry of another shape than expected is skipped.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxdist.base.errors import InvalidArgument
from mlxdist.base.json_reader import parse_json

from .system import dicts

__all__ = ["THUNDERBOLT_5", "Peer", "Receptacle", "read_receptacles"]

THUNDERBOLT_5 = 80  # Gbit/s, the least; Thunderbolt 4 ends at 40
_MAX_DEPTH = 16  # a chain has at most six devices
_MAX_NAME = 80


@dataclass(frozen=True)
class Peer:
    """Another computer at the far end of a cable. ``hubs``: the hubs on the way to it."""

    uuid: str
    name: str = ""
    hubs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Receptacle:
    """A Thunderbolt receptacle. ``number``: "3" of "Thunderbolt 3". ``speed``: the maximum where it is empty."""

    number: str
    speed: int | None  # Gbit/s
    connected: bool
    interface: str = ""
    uuid: str = ""
    peers: tuple[Peer, ...] = ()
    others: tuple[str, ...] = ()  # hubs, displays, disks


def read_receptacles(text: str, ports: Mapping[str, str] = {}) -> tuple[Receptacle, ...]:
    """Receptacles in the order of their numbers. ``ports``: the interface of each hardware port, by name. Raises
    InvalidArgument: ``text`` is not the output of system_profiler."""
    try:
        buses = parse_json(text, repeated=True)["SPThunderboltDataType"]
    except (ValueError, KeyError, TypeError):
        raise InvalidArgument("what system_profiler says of Thunderbolt is not understood") from None
    found = [receptacle for bus in dicts(buses) for receptacle in _of_bus(bus, ports)]
    return tuple(sorted(found, key=lambda receptacle: (len(receptacle.number), receptacle.number)))


def _of_bus(bus: dict[str, Any], ports: Mapping[str, str]) -> list[Receptacle]:
    tags = [tag for name, tag in bus.items() if re.fullmatch(r"receptacle_\d+(_tag)?", name) and isinstance(tag, dict)]
    found = [(tag, number) for tag in tags if (number := _number(tag, bus))]
    connected = [tag for tag, _ in found if tag.get("receptacle_status_key") == "receptacle_connected"]
    peers, others = _plugged_in(bus)
    receptacles = []
    for tag, number in found:
        # An old bus has two receptacles, and its items do not say which one they are in.
        here = tag is (connected or [tag])[0]
        plugged = (peers, others) if here else ((), ())
        interface = ports.get(f"Thunderbolt {number}", "")
        receptacles.append(Receptacle(number, _speed(tag), tag in connected, interface, _uuid(bus), *plugged))
    return receptacles


def _number(tag: dict[str, Any], bus: dict[str, Any]) -> str:
    """The number in the tag. Where it has none, bus 0 has receptacle 1, as on every Mac with Apple silicon."""
    number = tag.get("receptacle_id_key")
    if isinstance(number, str) and re.fullmatch(r"[0-9]{1,3}", number, re.ASCII):
        return number
    name = re.fullmatch(r"thunderbolt(?:usb4)?_bus_([0-9]{1,2})", str(bus.get("_name", ""))[:_MAX_NAME], re.ASCII)
    return str(int(name[1]) + 1) if name and number is None else ""


def _speed(tag: dict[str, Any]) -> int | None:
    speed = re.search(r"(\d{1,4})\s*Gb/s", str(tag.get("current_speed_key"))[:_MAX_NAME], re.ASCII)
    return int(speed[1]) if speed else None


def _plugged_in(bus: dict[str, Any]) -> tuple[tuple[Peer, ...], tuple[str, ...]]:
    """The computers and the other devices on a bus. Only a computer has a domain of its own, with its UUID."""
    peers: list[Peer] = []
    others: list[str] = []
    waiting: list[tuple[dict[str, Any], tuple[str, ...]]] = [(item, ()) for item in dicts(bus.get("_items"))]
    while waiting:
        item, hubs = waiting.pop(0)
        name = next((str(item[key])[:_MAX_NAME] for key in ("_name", "device_name_key") if item.get(key)), "a device")
        if uuid := _uuid(item):
            peers.append(Peer(uuid, name, hubs))
        else:
            others.append(name)
        if len(hubs) < _MAX_DEPTH:
            waiting += [(inner, (*hubs, name)) for inner in dicts(item.get("_items"))]
    return tuple(peers), tuple(others)


def _uuid(entry: dict[str, Any]) -> str:
    uuid = entry.get("domain_uuid_key")
    return uuid.upper()[:_MAX_NAME] if isinstance(uuid, str) else ""
