"""Which RDMA runs a report makes: one for each link of the device map, else one for each pair of hosts or device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from mlxdist.cluster.hostfile import Host
from mlxdist.cluster.hostfile.options import HostSelection

__all__ = ["RdmaRun", "alone", "rdma_runs"]

_MAX_LINKS, _MAX_LOOPS = 8, 2  # a report is made within minutes


@dataclass(frozen=True)
class RdmaRun:
    """On these hosts, with these variables. ``chosen``: the hosts, with a device map of that link alone."""

    name: str
    chosen: HostSelection
    hosts: tuple[str, ...]
    settings: Mapping[str, str]
    is_loop: bool = False  # both ranks are on one host, and use the same device


def rdma_runs(chosen: HostSelection, devices: Mapping[str, list[Mapping[str, Any]]]) -> tuple[list[RdmaRun], list[str]]:
    """``devices``: of each host, the response to doctor.rdma. The runs, and why others are not made."""
    active = {host: [device for device in found if device["active"]] for host, found in devices.items()}
    notes = [
        f"{host}: {device['name']} is {device['state'] or device['error'] or 'unknown'}, so nothing is run on it"
        for host, found in devices.items()
        for device in found
        if not device["active"]
    ]
    notes += [f"{host}: there is no RDMA device" for host, found in devices.items() if not found]
    hosts = chosen.hosts()
    found = [run for pair in combinations(range(len(hosts)), 2) for run in _between(chosen, *pair, active)]
    limit = _MAX_LINKS
    if not found:
        found = [_loop(chosen, host, device) for host in hosts for device in active.get(host.name, [])]
        limit = _MAX_LOOPS
    notes += [f"{run.name}: not run, a report makes {limit} such runs at most" for run in found[limit:]]
    return found[:limit], notes


def _between(chosen: HostSelection, i: int, j: int, active: Mapping[str, list[Mapping[str, Any]]]) -> list[RdmaRun]:
    a, b = chosen.hosts()[i], chosen.hosts()[j]
    if not (active.get(a.name) and active.get(b.name)):
        return []
    provider = {"MLXDIST_PROVIDER": active[a.name][0]["provider"]}
    if not (a.rdma and b.rdma):  # no map: addresses show which devices are connected
        name = f"{a.name} and {b.name}, devices chosen by their addresses"
        return [RdmaRun(name, _only(chosen, replace(a, rdma=()), replace(b, rdma=())), (a.name, b.name), provider)]
    return [
        RdmaRun(
            f"{a.name} {near} to {b.name} {far}",
            _only(chosen, replace(a, rdma=((), (near,))), replace(b, rdma=((far,), ()))),
            (a.name, b.name),
            provider,
        )
        for near, far in zip(a.rdma[j], b.rdma[i])
    ]


def _loop(chosen: HostSelection, host: Host, device: Mapping[str, Any]) -> RdmaRun:
    """Without another host: how far the verbs of this device get. Apple's driver may refuse RTR to itself."""
    name = device["name"]
    rows = json.dumps([[None, name], [name, None]])
    settings = {"MLXDIST_PROVIDER": device["provider"], "MLXDIST_DEVICE_MAP": rows}
    return RdmaRun(f"{host.name} {name} to itself", alone(chosen, host), (host.name,), settings, is_loop=True)


def alone(chosen: HostSelection, host: Host) -> HostSelection:
    """This host, where doctor starts two ranks, and no device map."""
    return chosen if chosen.hostfile is None else _only(chosen, replace(host, rdma=()))


def _only(chosen: HostSelection, *hosts: Host) -> HostSelection:
    assert chosen.hostfile is not None
    single = tuple(replace(host, slots=1) for host in hosts)
    ours = ("MLXDIST_DEVICE_MAP=", "MLXDIST_PROVIDER=", "MLXDIST_TOPOLOGY=")
    envs = tuple(setting for setting in chosen.hostfile.envs if not setting.startswith(ours))
    return replace(chosen, hostfile=replace(chosen.hostfile, hosts=single, envs=envs))
