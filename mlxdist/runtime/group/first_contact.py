"""First contact with devices: how long messages may be, found with the peer before any of the job is sent.

Thunderbolt devices do not say it, and versions of macOS differ (native/verbs/apple.c). So the first job whose ranks are
connected by such devices tries: messages of 128 KiB, and smaller ones where those do not arrive, each with new queue
pairs, which are given back before the group makes its own (native/transport/peer_probe.c). The rendezvous keeps the
ranks in step. The result is kept until one of the machines restarts, so later jobs try nothing; nor do jobs without
such devices. A cable is tried once, however many ranks share it.
"""

import functools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from mlxdist.base import logger
from mlxdist.base.environment import Environment
from mlxdist.base.errors import InvalidArgument, ResourceError

from ..devices.device_selection import DeviceSelection
from ..devices.links import Link
from ..devices.peer_findings import Course, Finding, pack_findings, unpack_findings
from ..devices.probe import MESSAGE_SIZES, PeerProbe
from ..devices.probe_cache import check_keeping, keep_probes
from ..native import check, ffi, lib
from ..rendezvous import Rendezvous
from ..rendezvous.startup_step import StepFailed, take_step
from .native_links import native_links

__all__ = ["find_cables", "largest_message"]

_SMALLEST = MESSAGE_SIZES[-1]


class _End(NamedTuple):
    """A device: its host, provider and name."""

    identity: bytes
    provider: str
    device: str


class _Cable(NamedTuple):
    """A connection of two devices. ``ranks``: the two that try it; ``links``: theirs by it."""

    ranks: tuple[int, int]
    links: tuple[Link, Link]
    ends: tuple[_End, _End]


def largest_message(rendezvous: Rendezvous, environment: Environment, host: str, agreed: DeviceSelection) -> int:
    """The bytes of the largest message that arrives by every cable of the job; 0 where devices say it themselves.

    Collective. What a cable does is read from earlier probes of its devices, or found now.
    """
    if not any(device.needs_peer_probe for node in agreed.nodes for device in node.devices):
        return 0
    known = {
        _End(node.identity, device.provider, device.name): device.peer_probe
        for node in agreed.nodes
        for device in node.devices
        if device.peer_probe
    }
    cables = find_cables(agreed, environment.topology)
    unknown = [cable for cable in cables if not all(end in known for end in cable.ends)]
    if unknown:
        found = _probe(rendezvous, environment, host, agreed, unknown)
        known |= found
        _keep(environment.rank, agreed, found)
    missing = any(end not in known for cable in cables for end in cable.ends)
    largest = [known[end].largest for cable in cables for end in cable.ends if end in known]
    return _SMALLEST if missing else min(largest, default=0)


def find_cables(agreed: DeviceSelection, topology: Collection[tuple[int, int]] | None) -> list[_Cable]:
    """Every cable of a device that needs a probe, with the lowest ranks that it connects: the same on all ranks."""
    assert agreed.choice_of is not None
    nodes = agreed.nodes
    needing = {
        _End(node.identity, device.provider, device.name)
        for node in nodes
        for device in node.devices
        if device.needs_peer_probe
    }
    choices = [agreed.choice_of(rank) for rank in range(len(nodes))]
    found: dict[tuple[_End, _End], _Cable] = {}
    for low in range(len(nodes)):
        for high in range(low + 1, len(nodes)):
            if topology is not None and (low, high) not in topology:
                continue
            for near, far in zip(choices[low].links[high], choices[high].links[low]):
                ends = _end(nodes[low].identity, near), _end(nodes[high].identity, far)
                if needing.intersection(ends) and ends[::-1] not in found:
                    found.setdefault(ends, _Cable((low, high), (near, far), ends))
    return list(found.values())


def _end(identity: bytes, link: Link) -> _End:
    return _End(identity, link.provider, link.device)


def _probe(
    rendezvous: Rendezvous, environment: Environment, host: str, agreed: DeviceSelection, cables: Sequence[_Cable]
) -> dict[_End, PeerProbe]:
    """Tries messages on these cables. Nothing that a device does ends the job here: what it then cannot do is an error
    of the group's own start."""
    assert agreed.choice is not None
    step = functools.partial(take_step, rendezvous, host=host, providers=agreed.choice.summary)
    courses = [Course() for _ in cables]
    probe = _NativeProbe(environment, cables)
    why = "no message arrives"
    try:
        for size in MESSAGE_SIZES:
            addresses = step("probe addresses", action=lambda: probe.prepare(size))
            step("probe connections", action=lambda: probe.connect(b"".join(addresses)))
            step("probe messages", action=probe.send)
            _note(courses, cables, size, step("probe results", action=probe.receive))
            if all(course.is_over for course in courses):
                break
    except StepFailed as failure:
        why = str(failure)
    finally:
        probe.close()
    if environment.rank == 0 and not all(course.is_over for course in courses):
        logger.warn(
            "connection", f"the probe of devices with their peers fails: {why}; messages have {_SMALLEST} bytes"
        )
    return {end: course.result() for cable, course in zip(cables, courses) if course.is_over for end in cable.ends}


def _note(courses: Sequence[Course], cables: Sequence[_Cable], size: int, rows: Sequence[bytes]) -> None:
    """Adds what all ranks have found. Raises InvalidArgument, on all ranks: one has sent something else."""
    of_rank = [unpack_findings(row) for row in rows]
    expected = Counter(rank for cable in cables for rank in cable.ranks)
    for rank, findings in enumerate(of_rank):
        if len(findings) != expected[rank]:
            raise InvalidArgument(
                f"rank {rank} has found something of {len(findings)} cables, and has {expected[rank]}"
            )
    each = [iter(findings) for findings in of_rank]
    for course, cable in zip(courses, cables):
        low, high = (next(each[rank]) for rank in cable.ranks)
        course.add(size, (low, high))


def _keep(rank: int, agreed: DeviceSelection, found: Mapping[_End, PeerProbe]) -> None:
    """Keeps what was found of this host's devices. The lowest rank of each host does that."""
    identity = agreed.nodes[rank].identity
    if any(node.identity == identity for node in agreed.nodes[:rank]):
        return
    results = ((device, found.get(_End(identity, device.provider, device.name))) for device in agreed.devices)
    try:
        keep_probes([replace(device, probe=None, peer_probe=result) for device, result in results if result])
    except (OSError, ResourceError) as error:
        logger.warn("connection", f"what the probe of devices has found is not kept: {error}")


class _NativeProbe:
    """The engine's probe of this rank's ends of cables, which it opens when it is first used."""

    def __init__(self, environment: Environment, cables: Sequence[_Cable]) -> None:
        self._environment = environment
        self._pointer: Any = ffi.NULL
        self._links: list[list[Link]] = [[] for _ in range(environment.world_size)]
        self._places: list[int] = []  # of this rank's cables in what the engine finds
        for cable in cables:
            for near, far, link in zip(cable.ranks, cable.ranks[::-1], cable.links):
                if near == environment.rank:
                    self._places.append(far * lib.MLXDIST_MAX_LINKS + len(self._links[far]))
                    self._links[far].append(link)

    def prepare(self, size: int) -> bytes:
        if not self._pointer:
            check_keeping()  # a driver may lose memory to a queue pair that breaks: once a boot, not at every start
            self._open()
        address = ffi.new("char[]", lib.mlxdist_peer_probe_address_size(self._pointer))
        check(lib.mlxdist_peer_probe_prepare(self._pointer, size, address))
        return bytes(ffi.buffer(address))

    def connect(self, addresses: bytes) -> bytes:
        check(lib.mlxdist_peer_probe_connect(self._pointer, addresses, len(addresses)))
        return b""

    def send(self) -> bytes:
        lib.mlxdist_peer_probe_send(self._pointer)
        return b""

    def receive(self) -> bytes:
        findings = ffi.new("mlxdist_peer_finding[]", self._environment.world_size * lib.MLXDIST_MAX_LINKS)
        lib.mlxdist_peer_probe_receive(self._pointer, findings)
        return pack_findings([_finding(findings[place]) for place in self._places])

    def close(self) -> None:
        lib.mlxdist_peer_probe_close(self._pointer)

    def _open(self) -> None:
        environment = self._environment
        options = ffi.new("mlxdist_options *")
        lib.mlxdist_default_options(options)
        options.reliable = environment.qp_type == "rc"
        links = native_links(self._links)
        options.links = links[0]
        made = ffi.new("mlxdist_peer_probe **")
        check(lib.mlxdist_peer_probe_open(environment.rank, environment.world_size, options, made))
        self._pointer = made[0]


def _finding(native: Any) -> Finding:
    """A finding of the engine. C has numbers where Python has flags."""
    return Finding(
        arrives=bool(native.arrives),
        receives=native.receives,
        empty=bool(native.empty),
        lengths=bool(native.lengths),
        packets=bool(native.packets),
        failed=ffi.string(native.failed).decode(errors="replace"),
        longer=ffi.string(native.longer).decode(errors="replace"),
    )
