"""The hostfile: hosts in the order of their ranks, their addresses, and the devices of their cables."""

from collections.abc import Sequence
from dataclasses import replace

from mlxdist.base.errors import InvalidArgument

from ..facts.collect import HostFacts
from ..hostfile.hosts import Host, Hostfile, ring_topology
from ..topology.topology import Cable, End, Shape, Topology
from .addresses import Link
from .ethernet import Choice

__all__ = ["BACKENDS", "make_hostfile", "rdma_notes"]

BACKENDS = ("mlxdist", "ring", "jaccl", "jaccl-ring")


def make_hostfile(
    machines: Sequence[HostFacts],
    topology: Topology,
    links: Sequence[Link],
    choices: Sequence[Choice | None],
    *,
    backend: str = "mlxdist",
    envs: Sequence[str] = (),
    hosts: Sequence[Host] = (),
) -> Hostfile:
    """Builds the hostfile. In a ring, each host is next to those that it shares a cable with.

    Args:
        hosts: the user's entries for these hosts; values that are not detected, such as the number of ranks, are kept.

    Raises:
        InvalidArgument: ``backend`` cannot work over these cables, or a host has no address.
    """
    order = list(topology.ring if topology.shape is Shape.RING or backend in ("ring", "jaccl-ring") else ())
    order = order or list(range(len(machines)))
    cells = {
        (a, b): [_device(machines[a], cable.end(a)) for cable in topology.between(a, b) if _is_usable(machines, cable)]
        for a in order
        for b in order
        if a != b
    }
    if backend != "mlxdist":
        cells = _for_mlx(backend, topology, order, cells)
    has_rdma = any(cells.values())
    known = {entry.name: entry for entry in hosts}
    entries = []
    for place, host in enumerate(order):
        ips = _ips(backend, machines, links, choices, host, order[place - 1], has_rdma)
        rdma = tuple(tuple(cells.get((host, other), ())) for other in order) if has_rdma else ()
        entry = known.get(machines[host].name, Host(machines[host].name))
        entries.append(replace(entry, ips=ips, rdma=rdma))
    envs = list(envs)
    whole = len(order) > 2 and all(cells.get((a, b)) for a, b in zip(order, order[1:] + order[:1]))
    if backend == "mlxdist" and topology.shape is Shape.RING and whole:
        envs.append(ring_topology(sum(entry.slots for entry in entries)))
    return Hostfile(tuple(entries), backend, tuple(envs))


def rdma_notes(machines: Sequence[HostFacts], topology: Topology) -> list[str]:
    """Notes about hosts that have a cable for RDMA but no device for it."""
    notes = []
    for host, machine in enumerate(machines):
        ends = [cable.end(host) for cable in topology.cables if cable.rdma and host in cable.pair]
        without = [end for end in ends if end.interface and not _device(machine, end)]
        if without and machine.is_mac:
            state = "is switched off" if machine.rdma_ctl == "disabled" or not machine.rdma else "has no device"
            ports = ", ".join(end.port for end in without)
            notes.append(
                f"RDMA {state} on {machine.name} ({ports}): with macOS 26.2 or newer, start it in recovery, run "
                "`rdma_ctl enable` in Terminal there, restart, and run this again"
            )
    return notes


def _device(machine: HostFacts, end: End) -> str:
    return machine.rdma.get(end.interface, "")


def _is_usable(machines: Sequence[HostFacts], cable: Cable) -> bool:
    return cable.rdma and all(_device(machines[end.host], end) for end in (cable.a, cable.b))


def _for_mlx(
    backend: str, topology: Topology, order: Sequence[int], cells: dict[tuple[int, int], list[str]]
) -> dict[tuple[int, int], list[str]]:
    """The devices for MLX, which uses the same number of cables for every pair: that of the pair with the fewest."""
    if backend != "jaccl" and not topology.ring and len(order) > 2:
        raise InvalidArgument(f"--backend {backend} needs a ring of cables through all hosts, and there is none")
    if backend == "ring":
        return {}
    neighbours = {(a, b) for a, b in zip(order, [*order[1:], order[0]])}
    needed = {pair: found for pair, found in cells.items() if backend == "jaccl" or {pair, pair[::-1]} & neighbours}
    bare = next((pair for pair, found in needed.items() if not found), None)
    if bare is not None:
        a, b = (topology.names[host] for host in bare)
        raise InvalidArgument(f"--backend {backend} needs RDMA between {a} and {b}, and no cable there has it")
    count = min(map(len, needed.values()), default=0)
    return {pair: found[:count] for pair, found in needed.items()}


def _ips(
    backend: str,
    machines: Sequence[HostFacts],
    links: Sequence[Link],
    choices: Sequence[Choice | None],
    host: int,
    before: int,
    has_rdma: bool,
) -> tuple[str, ...]:
    """The addresses of a host. MLX's ring gets those by which the previous host reaches it."""
    by_cable = [str(link.address(host).ip) for link in links if set(link.cable.pair) == {host, before}]
    if backend == "ring":
        if not by_cable:
            a, b = machines[before].name, machines[host].name
            raise InvalidArgument(f"--backend ring: no cable with addresses leads from {a} to {b}")
        return tuple(by_cable)
    choice = choices[host]
    by_network = [str(choice.address.ip)] if choice is not None else []
    # Where the cable between two hosts has no RDMA, TCP over it is still faster than over the network.
    ips = [*by_cable, *by_network] if len(machines) == 2 and (not has_rdma or not by_network) else by_network
    return tuple(dict.fromkeys(ips))
