"""Jobs for a report, with every verb traced: whether they use RDMA, and the flight records of those that fail."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from typing import Any

from mlxdist.base.errors import InvalidArgument, ResourceError
from mlxdist.cluster.hostfile.hosts import Host
from mlxdist.cluster.hostfile.options import HostSelection
from mlxdist.runtime.observation.stragglers import analyze
from mlxdist.tools.observe.collect import find_ranks

from ..job import last_words, place_ranks, run_ranks

__all__ = ["RdmaRun", "Run", "alone", "probe", "rdma_runs", "run"]

_SECONDS = 60.0
_SETTINGS = {"MLXDIST_DEBUG": "trace:verbs,connection", "MLXDIST_TIMEOUT": "20", "MLXDIST_RENDEZVOUS_TIMEOUT": "30"}
_OPERATIONS = 20  # of each rank's flight record
_REQUEST_SECONDS = 2.0
_MAX_LINKS, _MAX_LOOPS = 8, 2  # a report is made within minutes
_FIRST_LINES, _LAST_LINES = 250, 150  # of a job's output


@dataclass
class Run:
    """A job and its results."""

    name: str
    settings: dict[str, str]
    error: str = ""  # its last words, if it has failed
    results: list[dict[str, Any]] = field(default_factory=list)  # of its ranks, at most one each
    trace: list[str] = field(default_factory=list)  # its debug output
    output: list[str] = field(default_factory=list)  # the rest of its standard error
    flight: dict[str, Any] = field(default_factory=dict)  # its flight records, if it has failed


def probe(name: str, selection: HostSelection, hosts: Sequence[str], settings: Mapping[str, str]) -> Run:
    """Runs a job of two or more ranks, which compute checked sums and measure the links between them."""
    ranks = 2 if selection.hostfile is None else max(2, selection.hostfile.only(hosts).ranks)
    # Each rank counts as a host of its own: links are measured between ranks of one host, too.
    parameters = {"hosts": list(range(ranks)), "links": True}
    words = ["mlxdist.tools.doctor.probe_rank", json.dumps(parameters)]
    return run(name, selection, hosts, words, settings)


def run(
    name: str, selection: HostSelection, hosts: Sequence[str], words: Sequence[str], settings: Mapping[str, str]
) -> Run:
    """Runs `python -m WORDS` as the ranks of these hosts."""
    settings = _SETTINGS | dict(settings)
    found = Run(name, settings)
    with place_ranks(selection, hosts) as placement:
        found.settings |= placement.settings
        result, found.results = run_ranks(placement, words, settings, _SECONDS, prefix=True)
    lines = result.errors.splitlines()
    others = [line for line in lines if not _DEBUG_LINE.match(line)]
    found.trace = _ends([line for line in lines if _DEBUG_LINE.match(line)])
    found.output = _ends(others)
    if result.status or not found.results:
        found.error = last_words("\n".join(_PREFIX.sub("", line) for line in others))
        found.flight = _flight(result.errors, selection)
    return found


_PREFIX = re.compile(r"^\[[^\]]+\] ")  # the rank, and its host where there are several
_DEBUG_LINE = re.compile(_PREFIX.pattern + r"[\d:.]{15} mlxdist rank ")


def _ends(lines: list[str]) -> list[str]:
    """The first and last lines: a queue pair that is re-created many times fills the lines between with repeats."""
    if len(lines) <= _FIRST_LINES + _LAST_LINES:
        return lines
    note = f"[... {len(lines) - _FIRST_LINES - _LAST_LINES} lines were cut here ...]"
    return [*lines[:_FIRST_LINES], note, *lines[-_LAST_LINES:]]


def _flight(errors: str, selection: HostSelection) -> dict[str, Any]:
    """The records of all ranks, as `mlxdist dump` reads them, and which rank waited for which."""
    job = re.search(r"/([^/\s]+)/flight/flight-\d+\.json", errors)
    if job is None:
        return {"notes": ["no rank has printed the path of a flight record"]}
    try:
        with find_ranks(job[1], selection) as ranks:
            left = ranks.collect(full=True, seconds=_REQUEST_SECONDS)
    except (InvalidArgument, ResourceError) as error:
        return {"notes": [str(error)]}
    records = [asdict(record) for record in left.records.values()]
    for record in records:
        record["operations"] = record["operations"][-_OPERATIONS:]
    findings = analyze(left.records).findings if left.records else []
    return {"job": job[1], "findings": findings, "notes": left.notes, "records": records}


@dataclass(frozen=True)
class RdmaRun:
    """A job to run on ``hosts`` with ``settings``. ``selection``: these hosts, with a device map of that link alone."""

    name: str
    selection: HostSelection
    hosts: tuple[str, ...]
    settings: Mapping[str, str]
    is_loop: bool = False  # both ranks are on one host, and use the same device


def rdma_runs(
    selection: HostSelection, devices: Mapping[str, list[Mapping[str, Any]]]
) -> tuple[list[RdmaRun], list[str]]:
    """The runs to make, and why others are not made. ``devices``: each host's response to doctor.rdma."""
    active = {host: [device for device in found if device["active"]] for host, found in devices.items()}
    notes = [
        f"{host}: {device['name']} is {device['state'] or device['error'] or 'unknown'}, so nothing is run on it"
        for host, found in devices.items()
        for device in found
        if not device["active"]
    ]
    notes += [f"{host}: there is no RDMA device" for host, found in devices.items() if not found]
    hosts = selection.hosts()
    found = [run for pair in combinations(range(len(hosts)), 2) for run in _between(selection, *pair, active)]
    limit = _MAX_LINKS
    if not found:
        found = [_loop(selection, host, device) for host in hosts for device in active.get(host.name, [])]
        limit = _MAX_LOOPS
    notes += [f"{run.name}: not run, a report makes {limit} such runs at most" for run in found[limit:]]
    return found[:limit], notes


def _between(selection: HostSelection, i: int, j: int, active: Mapping[str, list[Mapping[str, Any]]]) -> list[RdmaRun]:
    a, b = selection.hosts()[i], selection.hosts()[j]
    if not (active.get(a.name) and active.get(b.name)):
        return []
    provider = {"MLXDIST_PROVIDER": active[a.name][0]["provider"]}
    if not (a.rdma and b.rdma):  # no map: addresses show which devices are connected
        name = f"{a.name} and {b.name}, devices chosen by their addresses"
        return [RdmaRun(name, _only(selection, replace(a, rdma=()), replace(b, rdma=())), (a.name, b.name), provider)]
    return [
        RdmaRun(
            f"{a.name} {near} to {b.name} {far}",
            _only(selection, replace(a, rdma=((), (near,))), replace(b, rdma=((far,), ()))),
            (a.name, b.name),
            provider,
        )
        for near, far in zip(a.rdma[j], b.rdma[i])
    ]


def _loop(selection: HostSelection, host: Host, device: Mapping[str, Any]) -> RdmaRun:
    """A run with both ranks on one host and device: it tests the verbs. Apple's driver may refuse RTR to itself."""
    name = device["name"]
    rows = json.dumps([[None, name], [name, None]])
    settings = {"MLXDIST_PROVIDER": device["provider"], "MLXDIST_DEVICE_MAP": rows}
    return RdmaRun(f"{host.name} {name} to itself", alone(selection, host), (host.name,), settings, is_loop=True)


def alone(selection: HostSelection, host: Host) -> HostSelection:
    """The selection of this host alone, where doctor starts two ranks, without its device map."""
    return selection if selection.hostfile is None else _only(selection, replace(host, rdma=()))


def _only(selection: HostSelection, *hosts: Host) -> HostSelection:
    assert selection.hostfile is not None
    single = tuple(replace(host, slots=1) for host in hosts)
    ours = ("MLXDIST_DEVICE_MAP=", "MLXDIST_PROVIDER=", "MLXDIST_TOPOLOGY=")
    envs = tuple(setting for setting in selection.hostfile.envs if not setting.startswith(ours))
    return replace(selection, hostfile=replace(selection.hostfile, hosts=single, envs=envs))
