"""The results of `mlxdist config`, for people and for programs."""

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from ..facts.collect import HostFacts
from ..topology.drawing import as_text
from ..topology.topology import Topology
from .addresses import Link
from .ethernet import Choice
from .steps import Step

__all__ = ["as_json", "bridge_notes", "show"]


def show(topology: Topology, links: Sequence[Link], to_stderr: bool) -> None:
    """Prints the picture, the shape, the cables that would improve it, and the addresses of the ends."""
    stream = sys.stderr if to_stderr else sys.stdout
    console = Console(file=stream, width=None if stream.isatty() else 200, highlight=False, markup=False)
    console.print(as_text(topology), soft_wrap=True)
    ring = f": {', '.join(topology.names[host] for host in topology.ring)}" if topology.shape == "ring" else ""
    count = len(topology.cables)
    lines = [f"{count} cable{'s' * (count != 1)}, {topology.shape}{ring}", *topology.advice()]
    for link in links:
        a, b = (f"{topology.names[host]} {link.address(host)}" for host in link.cable.pair)
        lines.append(f"{a} - {b}{' (there already)' if link.kept else ''}")
    for line in lines:
        console.print(line, soft_wrap=True)


def bridge_notes(machines: Sequence[HostFacts], links: Sequence[Link], without_bridge: bool) -> list[str]:
    """Notes about hosts where a port with a cable is in the Thunderbolt Bridge."""
    notes = []
    for host, machine in enumerate(machines):
        ends = [link.cable.end(host).interface for link in links if host in link.cable.pair]
        bridged = [end for end in ends if machine.bridge_of(end)]
        if not bridged:
            continue
        ports, bridge = ", ".join(bridged), machine.bridge_of(bridged[0])
        if without_bridge:
            notes.append(
                f"{machine.name}: macOS puts {ports} back into {bridge} at the next start, unless the bridge is "
                "removed in System Settings > Network > Manage Virtual Interfaces"
            )
        else:
            notes.append(
                f"{machine.name}: {ports} left in {bridge} (Thunderbolt Bridge), which works with addresses of their "
                "own; if RDMA then fails with errno 22, run this with --without-bridge"
            )
    return notes


def as_json(
    machines: Sequence[HostFacts],
    choices: Sequence[Choice | None],
    topology: Topology | None,
    links: Sequence[Link],
    steps: Sequence[Step],
) -> dict[str, Any]:
    """The results for --json. ``topology`` is None where cables were not searched for."""
    plain: dict[str, Any] = {"hosts": [_host(machine, choice) for machine, choice in zip(machines, choices)]}
    if topology is not None:
        addresses = {link.cable: link for link in links}
        plain["shape"] = topology.shape.value
        plain["missing"] = [[topology.names[a], topology.names[b]] for a, b in topology.missing]
        plain["notes"] = list(topology.notes)
        plain["cables"] = []
        for cable in topology.cables:
            link = addresses.get(cable)
            ends = [
                {
                    "host": topology.names[end.host],
                    "port": end.port,
                    "interface": end.interface,
                    "address": str(link.address(end.host)) if link else None,
                }
                for end in (cable.a, cable.b)
            ]
            plain["cables"].append({"ends": ends, "gbps": cable.speed, "rdma": cable.rdma})
        plain["steps"] = [{"host": step.host, "command": step.words} for step in steps]
    return plain


def _host(machine: HostFacts, choice: Choice | None) -> dict[str, Any]:
    return {
        "name": machine.name,
        "system": machine.system,
        "rdma_ctl": machine.rdma_ctl,
        "address": str(choice.address) if choice else None,
        "interface": choice.interface if choice else None,
        "wireless": choice.wireless if choice else None,
    }
