"""Hosts and the cables between them as a graph: which shape it has, what is missing, and where to plug it in."""

import enum
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from mlxdist.base.environment import MAX_LINKS
from mlxdist.base.errors import InvalidArgument

from ..facts.collect import HostFacts
from ..facts.thunderbolt import THUNDERBOLT_5, Receptacle

__all__ = ["Cable", "End", "Shape", "Topology", "build_topology"]

_MAX_STEPS = 200_000  # of the search for a ring: more than twelve hosts need


class Shape(enum.StrEnum):
    SINGLE = "single host"
    MESH = "mesh"
    RING = "ring"
    LINE = "line"
    INCOMPLETE = "incomplete"  # every host can be reached over cables
    APART = "apart"


@dataclass(frozen=True)
class End:
    """An end of a cable. ``host`` is an index; ``interface`` is empty where macOS has none for the port."""

    host: int
    interface: str
    receptacle: str = ""

    @property
    def port(self) -> str:
        return f"Thunderbolt {self.receptacle}" if self.receptacle else self.interface


@dataclass(frozen=True)
class Cable:
    """A cable. ``a`` is the end at the lower host index. ``rdma``: it can carry RDMA, enabled or not."""

    a: End
    b: End
    speed: int | None = None  # Gbit/s
    rdma: bool = True
    hubs: tuple[str, ...] = ()

    @property
    def pair(self) -> tuple[int, int]:
        return self.a.host, self.b.host

    def end(self, host: int) -> End:
        return self.a if self.a.host == host else self.b


@dataclass(frozen=True)
class Topology:
    """Hosts and cables. ``notes``: irregularities, in sentences. ``ring``: hosts in the order of a ring, or none."""

    names: tuple[str, ...]
    cables: tuple[Cable, ...]
    shape: Shape
    ring: tuple[int, ...] = ()
    missing: tuple[tuple[int, int], ...] = ()  # pairs that a mesh needs
    free: tuple[tuple[str, ...], ...] = ()  # of each host: receptacles where nothing is plugged in
    notes: tuple[str, ...] = field(default=())

    def between(self, a: int, b: int) -> list[Cable]:
        return [cable for cable in self.cables if cable.pair == (min(a, b), max(a, b))]

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Pairs of hosts that should have a cable. A ring needs no cables of a mesh, so it has no gaps."""
        return () if self.shape is Shape.RING else self.missing

    def advice(self) -> list[str]:
        """Sentences about the cables to add, for a better shape."""
        if self.shape in (Shape.MESH, Shape.SINGLE):
            return []
        lines = []
        if self.shape is Shape.LINE:
            ends = Counter(end for pair in {cable.pair for cable in self.cables} for end in pair)
            first, last = (host for host in range(len(self.names)) if ends[host] == 1)
            lines.append(f"one more cable makes it a ring: {self._pairs_of_ports([(first, last)])[0]}")
        count = len(self.missing)
        lines.append(f"for a mesh {count} {'cables are' if count > 1 else 'cable is'} missing:")
        return lines + [f"  {text}" for text in self._pairs_of_ports(self.missing)]

    def _pairs_of_ports(self, pairs: Sequence[tuple[int, int]]) -> list[str]:
        unused = [list(free) for free in self.free]

        def port(host: int) -> str:
            if unused[host]:
                return f"{self.names[host]} Thunderbolt {unused[host].pop(0)}"
            return f"{self.names[host]} (no free port)" if self.free[host] else self.names[host]

        return [f"from {port(a)} to {port(b)}" for a, b in pairs]


def build_topology(machines: Sequence[HostFacts], named: Sequence[str] = ()) -> Topology:
    """Builds the graph of the cables that Macs report and those that the user names: "a:eth1=b:eth1". Raises
    InvalidArgument: a named cable is impossible, or a Mac is listed twice."""
    found, notes = _thunderbolt_cables(machines)
    cables = tuple(sorted([*found, *_named_cables(machines, named)], key=_order))
    pairs = {cable.pair for cable in cables}
    ring = _find_ring(len(machines), pairs)
    missing = tuple(pair for pair in itertools.combinations(range(len(machines)), 2) if pair not in pairs)
    notes += _irregularities(machines, cables)
    free = tuple(
        tuple(r.number for r in machine.receptacles if not r.connected and not r.peers) for machine in machines
    )
    names = tuple(machine.name for machine in machines)
    return Topology(names, cables, _shape(len(machines), pairs, ring, missing), ring, missing, free, tuple(notes))


def _thunderbolt_cables(machines: Sequence[HostFacts]) -> tuple[list[Cable], list[str]]:
    """Cables and notes. A cable is reported by both ends, or, behind some hubs, by one of them."""
    ends = [(host, receptacle) for host, machine in enumerate(machines) for receptacle in machine.receptacles]
    owners: dict[str, int] = {}
    for host, receptacle in ends:
        if receptacle.uuid and owners.setdefault(receptacle.uuid, host) != host:
            names = f"{machines[owners[receptacle.uuid]].name} and {machines[host].name}"
            raise InvalidArgument(f"{names} are the same Mac; name each host once")
    cables: list[Cable] = []
    notes = [f"{machine.name}: {machine.unreadable}" for machine in machines if machine.unreadable]
    used: set[tuple[int, str]] = set()
    for host, receptacle in ends:
        for peer in receptacle.peers:
            there = [(h, r) for h, r in ends if r.uuid == peer.uuid and (h, r.number) != (host, receptacle.number)]
            # The two receptacles of an old bus have one UUID: the one that reports this end comes first.
            there.sort(key=lambda end: receptacle.uuid not in {p.uuid for p in end[1].peers})
            free = [end for end in there if (end[0], end[1].number) not in used]
            where = f"{machines[host].name} Thunderbolt {receptacle.number}"
            if not there:
                notes.append(f"{where} leads to {peer.name}, which is none of these hosts")
            elif (host, receptacle.number) in used or not free:
                continue
            elif free[0][0] == host:
                notes.append(f"{where} and Thunderbolt {free[0][1].number} are joined to each other: pull that cable")
            else:
                seen_from_there = (p.hubs for p in free[0][1].peers if p.uuid == receptacle.uuid)
                cables.append(_cable((host, receptacle), free[0], peer.hubs or next(seen_from_there, ())))
            if free:
                used |= {(host, receptacle.number), (free[0][0], free[0][1].number)}
    return cables, notes


def _cable(one: tuple[int, Receptacle], other: tuple[int, Receptacle], hubs: tuple[str, ...]) -> Cable:
    (a, at_a), (b, at_b) = sorted((one, other), key=lambda end: end[0])
    speed = min((receptacle.speed for receptacle in (at_a, at_b) if receptacle.speed is not None), default=None)
    ends = End(a, at_a.interface, at_a.number), End(b, at_b.interface, at_b.number)
    return Cable(ends[0], ends[1], speed, speed is None or speed >= THUNDERBOLT_5, hubs)


def _named_cables(machines: Sequence[HostFacts], named: Sequence[str]) -> list[Cable]:
    cables = []
    for text in named:
        ends = []
        for side in text.split("=") if text.count("=") == 1 else ():
            name, _, interface = side.rpartition(":")
            host = next((i for i, machine in enumerate(machines) if machine.name == name), None)
            if host is None:
                raise InvalidArgument(f"--cable {text}: {name or side!r} is none of the hosts")
            if machines[host].interface(interface) is None:
                there = ", ".join(i.name for i in machines[host].interfaces if i.name not in ("lo", "lo0"))
                raise InvalidArgument(f"--cable {text}: {name} has no interface {interface!r}, but {there}")
            ends.append(End(host, interface))
        if len(ends) != 2 or ends[0].host == ends[1].host:
            raise InvalidArgument(f"--cable {text}: write a cable as HOST:INTERFACE=HOST:INTERFACE, of two hosts")
        a, b = sorted(ends, key=lambda end: end.host)
        cables.append(Cable(a, b, rdma=all(end.interface in machines[end.host].rdma for end in (a, b))))
    return cables


def _irregularities(machines: Sequence[HostFacts], cables: Sequence[Cable]) -> list[str]:
    notes = []
    for cable in cables:
        where = " and ".join(f"{machines[end.host].name} {end.port}" for end in (cable.a, cable.b))
        if cable.speed is not None and not cable.rdma:
            notes.append(
                f"the cable between {where} runs at {cable.speed} Gb/s: Thunderbolt 4, which has no RDMA; use a "
                "Thunderbolt 5 cable between Macs with Thunderbolt 5"
            )
        if cable.hubs:
            notes.append(f"the cable between {where} goes through {', '.join(cable.hubs)}; a direct cable is faster")
        for end in (cable.a, cable.b):
            if not end.interface:
                notes.append(f"{machines[end.host].name} has no network interface for {end.port}")
    for pair, count in Counter(cable.pair for cable in cables).items():
        if count > MAX_LINKS:
            a, b = (machines[host].name for host in pair)
            notes.append(f"there are {count} cables between {a} and {b}: mlxdist uses {MAX_LINKS}")
    return notes


def _shape(count: int, pairs: set[tuple[int, int]], ring: tuple[int, ...], missing: Sequence) -> Shape:
    if count < 2:
        return Shape.SINGLE
    if not missing:
        return Shape.MESH
    if ring:
        return Shape.RING
    reached, new = {0}, {0}
    while new:
        new = {b for pair in pairs for a, b in (pair, pair[::-1]) if a in new} - reached
        reached |= new
    if len(reached) < count:
        return Shape.APART
    degrees = Counter(host for pair in pairs for host in pair)
    return Shape.LINE if len(pairs) == count - 1 and max(degrees.values()) <= 2 else Shape.INCOMPLETE


def _find_ring(count: int, pairs: set[tuple[int, int]]) -> tuple[int, ...]:
    """An order that begins with host 0 and is nearest to the one given; none for less than three hosts."""
    joined = [[b for b in range(count) if (min(a, b), max(a, b)) in pairs] for a in range(count)]
    if count < 3 or any(len(others) < 2 for others in joined):
        return ()
    # A depth-first search for a Hamiltonian cycle, which may take exponential time: hence a limit of steps.
    path, choices, steps = [0], [iter(joined[0])], 0
    while path and steps < _MAX_STEPS:
        steps += 1
        following = next((host for host in choices[-1] if host not in path), None)
        if following is None:
            path.pop()
            choices.pop()
            continue
        path.append(following)
        choices.append(iter(joined[following]))
        if len(path) == count and 0 in joined[following]:
            return tuple(path)
    return ()


def _order(cable: Cable) -> tuple:
    # en9 comes before en10.
    def natural(text: str) -> list:
        return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]

    return cable.pair, natural(cable.a.receptacle), natural(cable.a.interface)
