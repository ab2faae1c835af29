"""Which devices connect two ranks, and by which of their addresses.

All ranks have the same list of nodes (:class:`NodeInfo`, gathered by the rendezvous), and each chooses for itself: both
ranks of a pair take the same steps for the same pair, the lower rank first, so they take the two ends of one link.
"""

import ipaddress
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mlxdist.base.environment import MAX_LINKS
from mlxdist.base.errors import InvalidArgument
from mlxdist.cluster.hostfile.device_map import DeviceMap

from .device import Device, Gid
from .diagnosis import diagnose_device
from .gids import Nearness, Route, find_route
from .node_info import NodeInfo, host_numbers
from .paths import Path

__all__ = ["Choice", "Link", "NodeInfo", "Ports", "choose"]

_Ends = tuple["Link", "Link"]  # of the lower rank, of the higher one


@dataclass(frozen=True)
class Link:
    """An end of a link: a device, and the line of its address table to use."""

    provider: str
    device: str
    gid_index: int


class Ports(NamedTuple):
    """The ports that connect two ranks. ``rate``: of all links together, in Gbit/s one way; 0 if one does not say."""

    rate: float = 0.0
    are_thunderbolt: bool = False


@dataclass(frozen=True)
class Choice:
    """The links that one rank uses.

    ``links``: those to each rank, at most MAX_LINKS; ``paths``: what they are; ``ports``: what they go through. There
    are no links to the rank itself, and to a rank that the device map has no link to, when the user requires RDMA.
    ``summary``: the providers, "ibverbs+soft". ``adjacency``: the pairs of ranks, both ways, that are connected at all;
    None where every pair is.
    """

    links: tuple[tuple[Link, ...], ...]
    paths: tuple[Path, ...]
    ports: tuple[Ports, ...]
    summary: str
    reason: str
    adjacency: frozenset[tuple[int, int]] | None = None


class _NotConnected(Exception):
    """Why two ranks are not connected by RDMA."""


def choose(
    nodes: Sequence[NodeInfo],
    rank: int,
    provider: str = "auto",
    device_map: DeviceMap | None = None,
    links_per_peer: int = 1,
    soft_transport: str = "auto",
) -> Choice:
    """The links of ``rank`` to all others.

    Args:
        nodes: of all ranks, in order.
        provider: "auto": shared memory within a host, RDMA between hosts where the device map or subnets connect them,
            TCP where not; "soft": shared memory and TCP; "ibverbs", "librdma": RDMA between all ranks.
        device_map: which device leads where. Without it, IPv4 subnets decide.
        links_per_peer: at most, where no map lists them.
        soft_transport: "tcp": also within a host; "shm": never anything else.

    Raises:
        InvalidArgument: two ranks cannot be connected as requested.
    """
    chooser = _Chooser(nodes, provider, device_map, min(links_per_peer, MAX_LINKS), soft_transport)
    links: list[tuple[Link, ...]] = []
    ports: list[Ports] = []
    for peer in range(len(nodes)):
        low, high = min(rank, peer), max(rank, peer)
        ends = [] if peer == rank else chooser.connect(low, high)
        links.append(tuple(pair[0 if rank < peer else 1] for pair in ends))
        ports.append(_ports(nodes[low], nodes[high], ends))
    providers = sorted({link.provider for to_peer in links for link in to_peer}) or ["soft"]
    unused = dict.fromkeys(text for pair, text in chooser.unused.items() if rank in pair)
    reason = "; ".join([_reason(nodes, rank, provider, links, chooser.without_rdma), *unused])
    paths = tuple(_path(nodes[rank], node, to_node, soft_transport) for node, to_node in zip(nodes, links))
    return Choice(tuple(links), paths, tuple(ports), "+".join(providers), reason, chooser.adjacency())


class _Chooser:
    def __init__(
        self,
        nodes: Sequence[NodeInfo],
        provider: str,
        device_map: DeviceMap | None,
        links_per_peer: int,
        transport: str,
    ) -> None:
        self._nodes, self._provider, self._map = nodes, provider, device_map
        self._links_per_peer, self._soft_transport = links_per_peer, transport
        self._rows = None if device_map is None or provider == "soft" else _rows(nodes, device_map)
        self._routes: dict[tuple[NodeInfo, NodeInfo], list[_Ends]] = {}
        self.without_rdma: dict[str, str] = {}  # host that is not reached by RDMA: why
        self.unused: dict[tuple[int, int], str] = {}  # pairs of ranks that not all cables of the map connect: why

    def connect(self, low: int, high: int) -> list[_Ends]:
        one_host = self._nodes[low].identity == self._nodes[high].identity
        if self._provider not in ("auto", "soft"):
            return self._by_rdma_alone(low, high, one_host)
        if self._provider == "auto" and not one_host:
            try:
                return self._by_rdma(low, high, one_host)
            except _NotConnected as error:
                for node in (self._nodes[low], self._nodes[high]):
                    self.without_rdma.setdefault(node.host, str(error))
        return self._by_soft(low, high, one_host)

    def adjacency(self) -> frozenset[tuple[int, int]] | None:
        if self._provider in ("auto", "soft") or self._rows is None or self._map is None:
            return None
        pairs = itertools.permutations(range(len(self._rows)), 2)
        adjacent = frozenset((a, b) for a, b in pairs if self._map.devices(self._rows[a], self._rows[b]))
        return adjacent if len(adjacent) < len(self._rows) * (len(self._rows) - 1) else None

    def _by_rdma_alone(self, low: int, high: int, one_host: bool) -> list[_Ends]:
        if self._map and self._rows and not self._map.devices(self._rows[low], self._rows[high]):
            return []
        try:
            return self._by_rdma(low, high, one_host)
        except _NotConnected as error:
            raise InvalidArgument(
                f"{self._pair(low, high)} cannot be connected by {self._provider}: {error}; "
                "MLXDIST_PROVIDER=auto connects them by what there is"
            ) from None

    # RDMA

    def _by_rdma(self, low: int, high: int, one_host: bool) -> list[_Ends]:
        near, far = self._nodes[low], self._nodes[high]
        if self._rows is None or self._map is None:
            if (near, far) not in self._routes:
                self._routes[near, far] = self._by_subnets(near, far, one_host)
            return self._routes[near, far]
        row, column = self._rows[low], self._rows[high]
        names = self._map.devices(row, column), self._map.devices(column, row)
        if not names[0]:
            raise _NotConnected(f"the device map has no link between {near.host} and {far.host}")
        nears, fars = ([self._named(node, name) for name in row] for node, row in zip((near, far), names))
        down = [(node, device) for node, row in ((near, nears), (far, fars)) for device in row if not device.is_active]
        why = [f"host {node.host}: {diagnose_device(device)[0]}" for node, device in down]
        pairs = _pair_up(nears, fars, (near.host, far.host), one_host)
        if not pairs:
            raise _NotConnected(why[0])
        used = pairs[:MAX_LINKS]
        if len(used) < len(nears):
            why.append(f"at most {MAX_LINKS} are used")
            self.unused[low, high] = f"{len(used)} of {len(nears)} cables between {near.host} and {far.host}: {why[0]}"
        return [_ends(*pair) for pair in used]

    def _named(self, node: NodeInfo, name: str) -> Device:
        devices = {device.name: device for device in self._rdma_devices(node)}
        if name not in devices:
            there = f"it has {', '.join(devices)}" if devices else node.missing or "it has no RDMA device"
            raise _NotConnected(
                f"host {node.host} has no device {name}, which the device map names: {there}; names change when a "
                "machine starts: `mlxdist devices` shows them"
            )
        return devices[name]

    def _by_subnets(self, near: NodeInfo, far: NodeInfo, one_host: bool) -> list[_Ends]:
        """Links that IPv4 subnets show. 169.254.0.0/16 counts only where one device of each host has it."""
        nears, fars = self._active(near), self._active(far)
        routes = [
            (route.nearness, i, j, _ends(a, b, route))
            for i, a in enumerate(nears)
            for j, b in enumerate(fars)
            if not (one_host and a.name == b.name) and (route := find_route(a.gids, b.gids))
        ]
        routes = [route for route in routes if route[0] <= Nearness.LINK_LOCAL_SUBNET]
        unclear = [route for route in routes if route[0] == Nearness.LINK_LOCAL_SUBNET]
        if len(unclear) > 1:
            routes = [route for route in routes if route[0] == Nearness.SUBNET]
            if not routes:
                raise _NotConnected(
                    f"several devices of {near.host} and {far.host} have addresses in 169.254.0.0/16, which does not "
                    "show which cable connects which; give both ends of each cable addresses in a subnet of their "
                    "own, or set MLXDIST_DEVICE_MAP"
                )
        if not routes:
            raise _NotConnected(self._without_subnet(near, nears, far, fars))
        ends: list[_Ends] = []
        used: set[tuple[int, int]] = set()  # side, device
        # The key is the same on both ranks of the pair, so that both take the same links.
        for _, i, j, pair in sorted(routes, key=lambda route: route[:3]):
            if len(ends) < self._links_per_peer and not used & {(0, i), (1, j)}:
                used |= {(0, i), (1, j)}
                ends.append(pair)
        return ends

    def _rdma_devices(self, node: NodeInfo) -> list[Device]:
        if self._provider != "auto":
            return list(node.of_provider(self._provider))
        return [device for provider in ("ibverbs", "librdma") for device in node.of_provider(provider)]

    def _active(self, node: NodeInfo) -> list[Device]:
        devices = self._rdma_devices(node)
        if not devices:
            raise _NotConnected(f"host {node.host}: {node.missing or 'it has no RDMA device'}")
        active = [device for device in devices if device.is_active]
        if not active:
            raise _NotConnected(f"host {node.host}: {diagnose_device(devices[0])[0]}")
        return active

    def _without_subnet(self, near: NodeInfo, nears: list[Device], far: NodeInfo, fars: list[Device]) -> str:
        for node, devices in ((near, nears), (far, fars)):
            if all(gid.ipv4 is None for device in devices for gid in device.gids):
                return f"host {node.host}: {diagnose_device(devices[0])[0]}"
        a, b = ((node.host, _addresses(devices)) for node, devices in ((near, nears), (far, fars)))
        return (
            f"no device of {a[0]} ({a[1]}) has a subnet in common with another one of {b[0]} ({b[1]}); give both ends "
            "of a cable addresses in one subnet, or set MLXDIST_DEVICE_MAP"
        )

    # The software provider

    def _by_soft(self, low: int, high: int, one_host: bool) -> list[_Ends]:
        if one_host and self._soft_transport != "tcp":
            routes = self._by_shm(low, high)
        elif self._soft_transport == "shm":
            raise InvalidArgument(
                f"{self._pair(low, high)} are on different hosts, and MLXDIST_SOFT_TRANSPORT=shm connects ranks of one "
                "host only; unset it"
            )
        else:
            near, far = self._nodes[low], self._nodes[high]
            routes = self._by_tcp(low, high, one_host or (near.is_emulated and far.is_emulated))
        if len(routes) <= MAX_LINKS:
            return routes[: self._links_per_peer]
        return self._one_device_a_link(low, high, routes)

    def _one_device_a_link(self, low: int, high: int, routes: list[_Ends]) -> list[_Ends]:
        """Pairs devices that the software provider emulates where each reaches one peer: it lists one for each."""
        count = self._links_per_peer
        near, far = (high - 1) * count, low * count  # each rank has its peers in order, without itself
        if near + count > len(routes):
            limit = len(routes) // count + 1
            raise InvalidArgument(
                f"{self._pair(low, high)} have no devices left for each other: this MLXDIST_SOFT_PROFILE has "
                f"{len(routes)}, enough for {limit} ranks; start at most {limit}"
            )
        return [(routes[near + link][0], routes[far + link][1]) for link in range(count)]

    def _by_shm(self, low: int, high: int) -> list[_Ends]:
        lists = []
        for node in (self._nodes[low], self._nodes[high]):
            devices = [(device, gid) for device in node.of_provider("soft") for gid in device.gids]
            lists.append([Link("soft", device.name, gid.index) for device, gid in devices if gid.type == "memory"])
        if not all(lists):
            raise InvalidArgument(
                f"{self._pair(low, high)} have no software device for shared memory; `mlxdist devices --provider soft` "
                "says why"
            )
        return list(zip(*lists))

    def _by_tcp(self, low: int, high: int, by_loopback: bool) -> list[_Ends]:
        near, far = self._nodes[low], self._nodes[high]
        ends: list[_Ends] = []
        for a, b in zip(near.of_provider("soft"), far.of_provider("soft")):
            if route := _tcp_route(near, a, far, b, by_loopback):
                ends.append(_ends(a, b, route))
        if not ends:
            texts = (f"{_addresses(node.of_provider('soft')[:1]) or 'none'} on {node.host}" for node in (near, far))
            raise InvalidArgument(
                f"{self._pair(low, high)} cannot be connected by TCP: they have no IPv4 subnet in common, and do not "
                f"both reach the rendezvous by IPv4; their addresses: {'; '.join(texts)}"
            )
        return ends

    def _pair(self, low: int, high: int) -> str:
        return f"rank {low} on {self._nodes[low].host} and rank {high} on {self._nodes[high].host}"


def _ports(near: NodeInfo, far: NodeInfo, ends: Sequence[_Ends]) -> Ports:
    """The ports at the ends of links. The rate of a link is that of its slower port."""
    devices = [{(device.provider, device.name): device for device in node.devices} for node in (near, far)]
    pairs = [[named[end.provider, end.device] for named, end in zip(devices, pair)] for pair in ends]
    rates = [min(device.speed or 0.0 for device in pair) for pair in pairs]
    are_thunderbolt = bool(pairs) and all(device.is_thunderbolt for pair in pairs for device in pair)
    return Ports(sum(rates) if all(rates) else 0.0, are_thunderbolt)


def _path(here: NodeInfo, there: NodeInfo, links: tuple[Link, ...], soft_transport: str) -> Path:
    if here is there:
        return Path.SHARED_MEMORY
    if not links:
        return Path.NONE
    if any(link.provider != "soft" for link in links):
        return Path.RDMA
    return Path.SHARED_MEMORY if here.identity == there.identity and soft_transport != "tcp" else Path.TCP


def _rows(nodes: Sequence[NodeInfo], device_map: DeviceMap) -> list[int]:
    """The row of each rank in the map, which has one for each rank, or one for each host in order of first ranks."""
    numbers = host_numbers(nodes)
    hosts = max(numbers) + 1
    if device_map.size == len(nodes):
        return list(range(len(nodes)))
    if device_map.size == hosts:
        return numbers
    raise InvalidArgument(
        f"the device map {device_map.source} is for {device_map.size} hosts, but the job has {len(nodes)} ranks on "
        f"{hosts} hosts; write a row for each host, in the order of their first ranks, or for each rank"
    )


def _pair_up(
    nears: list[Device], fars: list[Device], hosts: tuple[str, str], one_host: bool
) -> list[tuple[Device, Device, Route]]:
    """The two ends of each link: devices of a common subnet; those that no subnet pairs, in the order of the map.

    A cable of which one end is not active is left out.
    """
    free, pairs = list(fars), {}
    for near in nears:
        for far in free:
            route = find_route(near.gids, far.gids, one_host)
            if route and route.nearness == Nearness.SUBNET:
                pairs[near.name] = (near, far, route)
                free.remove(far)
                break
    for near in nears:
        if near.name not in pairs:
            far = free.pop(0)
            if not (near.is_active and far.is_active):
                continue
            route = find_route(near.gids, far.gids, one_host)
            if route is None:
                raise _NotConnected(
                    f"{near.name} of {hosts[0]} ({_addresses([near])}) and {far.name} of {hosts[1]} "
                    f"({_addresses([far])}) have no addresses of one form and type; give both ends of a cable IPv4 "
                    "addresses"
                )
            pairs[near.name] = (near, far, route)
    ordered = [pairs[near.name] for near in nears if near.name in pairs]
    return [pair for pair in ordered if pair[0].is_active and pair[1].is_active]


def _tcp_route(near: NodeInfo, a: Device, far: NodeInfo, b: Device, by_loopback: bool) -> Route | None:
    """The TCP route of two devices: a network of both to the rendezvous is known to work; then any common subnet."""
    tables = [[gid for gid in device.gids if gid.type == "TCP"] for device in (a, b)]
    if by_loopback and {gid.address for gid in tables[0]} == {gid.address for gid in tables[1]}:
        return _own_route(*tables)
    known = [[gid for gid in table if _is_address(gid, node.address)] for table, node in zip(tables, (near, far))]
    routes = find_route(known[0], known[1]), find_route(tables[0], tables[1])
    return next((route for route in routes if route and route.nearness <= Nearness.LINK_LOCAL_SUBNET), routes[0])


def _own_route(near: list[Gid], far: list[Gid]) -> Route | None:
    """The TCP route between processes of one host: by loopback, which no firewall filters."""
    if not near:
        return None
    a = min(near, key=lambda gid: (gid.ipv4 is None or not gid.ipv4.is_loopback, gid.index))
    return Route(a, next(gid for gid in far if gid.address == a.address), Nearness.IPV4)


def _is_address(gid: Gid, address: str) -> bool:
    if not address:
        return False
    wanted = ipaddress.ip_address(address)
    return gid.ipv4 == (getattr(wanted, "ipv4_mapped", None) or wanted)


def _ends(near: Device, far: Device, route: Route) -> _Ends:
    return Link(near.provider, near.name, route.near.index), Link(far.provider, far.name, route.far.index)


def _addresses(devices: Sequence[Device]) -> str:
    return ", ".join(f"{device.name}: {' '.join(map(_address, device.gids)) or 'no address'}" for device in devices)


def _address(gid: Gid) -> str:
    return str(gid) if gid.ipv4 else f"{gid} ({gid.type}, {gid.form})"


def _reason(
    nodes: Sequence[NodeInfo], rank: int, provider: str, links: Sequence[Sequence[Link]], why: dict[str, str]
) -> str:
    own = nodes[rank]
    unused = sum(device.is_active and device.provider != "soft" for device in own.devices)
    if provider != "auto":
        return f"MLXDIST_PROVIDER={provider}"
    if all(node.identity == own.identity for node in nodes):
        rest = f", {unused} RDMA device{'s' * (unused > 1)} left unused" if unused else ""
        return f"all ranks are on one host{rest}"
    others = [peer for peer, node in enumerate(nodes) if node.identity != own.identity]
    without = [nodes[peer].host for peer in others if any(link.provider == "soft" for link in links[peer])]
    without = list(dict.fromkeys(without))
    used = dict.fromkeys(link.device for peer in others for link in links[peer] if link.provider != "soft")
    parts = [f"RDMA to other hosts by {', '.join(used)}"] if used else []
    if without:
        more = f" and {len(without) - 1} more" if len(without) > 1 else ""
        parts.append(f"TCP to {without[0]}{more}: {why[without[0]]}")
    return "; ".join(parts)
