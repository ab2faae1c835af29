"""Finds the addresses by which two devices reach each other: by their form, never by their index."""

import enum
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from .device import Form, Gid

__all__ = ["Nearness", "Route", "find_route", "in_one_subnet"]


class Nearness(enum.IntEnum):
    """The relation of two addresses, the best first."""

    SUBNET = 0
    LINK_LOCAL_SUBNET = 1  # 169.254.0.0/16, which every cable may have: it does not say which devices are joined
    IPV4 = 2  # of different subnets: a router may join them
    GLOBAL = 3  # IPv6, and InfiniBand
    LINK_LOCAL = 4  # IPv6


# Of two that fit otherwise. RoCE v1 does not leave its segment, and not every card has it.
_TYPES = {"RoCE v2": 0, "unknown": 1, "IB": 2, "TCP": 3, "RoCE v1": 4}


@dataclass(frozen=True)
class Route:
    """A route from device to device, each by one of its addresses."""

    near: Gid
    far: Gid
    nearness: Nearness


def find_route(near: Sequence[Gid], far: Sequence[Gid], one_host: bool = False) -> Route | None:
    """The best addresses of two devices for each other: IPv4 of one subnet, RoCE v2 before v1, 169.254 last.

    None where they have no two addresses of one form and type. What has the form of no address is never taken.

    Between equals the lines nearest to the beginning of the tables, those of ``near`` first: two ranks must pass
    their pair in the same order.

    Args:
        one_host: both are of one host, or are one device: then they may have the same address.
    """
    found = []
    for a in near:
        for b in far:
            nearness = _nearness(a, b, one_host)
            if nearness is not None:
                in_subnet = nearness <= Nearness.LINK_LOCAL_SUBNET
                key = (0 if in_subnet else nearness, _TYPES[a.type], nearness)
                found.append(((*key, a.index, b.index), a, b, nearness))
    if not found:
        return None
    _, a, b, nearness = min(found, key=lambda route: route[0])
    return Route(a, b, nearness)


def in_one_subnet(a: Gid, b: Gid) -> bool:
    """Whether each lies in the IPv4 subnet of the other. Where one prefix is not known, that of the other counts."""
    prefixes = [gid.prefix for gid in (a, b) if gid.prefix is not None]
    if a.ipv4 is None or b.ipv4 is None or not prefixes:
        return False
    return all(b.ipv4 in ipaddress.IPv4Network((a.ipv4, prefix), strict=False) for prefix in prefixes)


def _nearness(a: Gid, b: Gid, one_host: bool) -> Nearness | None:
    if a.type != b.type or a.type not in _TYPES or a.form is not b.form or a.form is Form.NONE:
        return None
    if not one_host and a.address == b.address:
        return None  # as those of bridges for containers are: each host has its own
    if a.ipv4 is None or b.ipv4 is None:
        return Nearness.LINK_LOCAL if a.form is Form.LINK_LOCAL else Nearness.GLOBAL
    if a.ipv4.is_loopback or b.ipv4.is_loopback:
        return Nearness.IPV4 if one_host and a.address == b.address else None
    if a.address == b.address or in_one_subnet(a, b):
        return Nearness.LINK_LOCAL_SUBNET if a.is_link_local else Nearness.SUBNET
    return Nearness.IPV4
