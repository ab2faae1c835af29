"""The hosts of `mlxdist calibrate`: measures them and their links, and checks and shows the results."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.console import Console

from mlxdist.base.errors import ResourceError
from mlxdist.cluster.hostfile.hosts import Hostfile, Measured, check_measurement
from mlxdist.cluster.hostfile.options import HostSelection
from mlxdist.cluster.hostfile.rank_shares import MEASUREMENTS, speeds
from mlxdist.cluster.ssh.rpc_client import CallError, Connections
from mlxdist.version import __version__

from ..bench.bandwidth import IN_PLACE
from ..bench.results import table_of
from ..bench.runner import Runner, progress_bar

__all__ = ["HostMeasurement", "as_json", "judge", "measure_hosts", "shares", "show_hosts"]

PRODUCTS = ("float32", "float16", "bfloat16")  # dtypes of matrix products; parts of measure.py
MEMORY = ("copy", "sum", "row")
PARTS = (*PRODUCTS, *MEMORY)
START_SECONDS = 120.0  # a host may have to load MLX from a slow disk
LATE = 10  # times what a part should take, and START_SECONDS, is too late
UNSTEADY = 0.15  # spread of a measurement that is worth no plan
SLOW = 0.85  # of the median of its kind: a host or link below that is marked
DIGITS = 4  # that are kept of a measurement; the rest is noise


@dataclass(frozen=True)
class Link:
    """A link: GB/s from one host to another, as the receiver measured it."""

    source: str
    target: str
    gbps: float
    least: float
    most: float


@dataclass
class HostMeasurement:
    """The measurements of one host.

    Attributes:
        machine: the host's description of its device.
        parts: the host's result for each part; see `mlxdist.tools.calibrate.measure.measure`.
        links: the links that lead to the host and from it.
        problems: why the measurements are invalid.
        slow: the measurements that are far below the usual ones: "tflops", "memory_gbps", "link_gbps".
    """

    name: str
    machine: dict[str, Any]
    parts: dict[str, Any]
    links: list[Link] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    slow: set[str] = field(default_factory=set)

    @property
    def product(self) -> dict[str, Any]:
        """The result of the fastest dtype of products."""
        return max((self.parts[part] for part in PRODUCTS if self.parts.get(part)), key=lambda found: found["median"])

    @property
    def foreign_cpu_share(self) -> float | None:
        """The mean share of other processes over all parts, which last equally long; None where it is not known."""
        shares = [found["foreign_cpu_share"] for found in self.parts.values() if found]
        return None if None in shares else statistics.fmean(shares)

    @property
    def measured(self) -> Measured:
        """The measurements that the tuning file stores."""
        slowest = min((link.gbps for link in self.links), default=None)
        return Measured(
            _rounded(self.product["median"]),
            _rounded(self.parts["row"]["median"]),
            None if slowest is None else _rounded(slowest),
        )


def judge(
    names: Sequence[str], machines: Sequence[dict], parts: Sequence[dict[str, Any]], links: Sequence[dict]
) -> list[HostMeasurement]:
    """The measurements of all hosts, with their problems. ``links``: results of ranks.py, by rank."""
    hosts = [HostMeasurement(*of_host) for of_host in zip(names, machines, parts)]
    for host in hosts:
        host.problems += _impossible_parts(host)
    for found in links:
        ends = [hosts[found["source"]], hosts[found["target"]]]
        link = Link(ends[0].name, ends[1].name, found["median"], found["min"], found["max"])
        for host in ends:
            host.links.append(link)
        ends[1].problems += _impossible_link(link, found)
    _mark_outliers(hosts)
    return hosts


def _mark_outliers(hosts: Sequence[HostMeasurement]) -> None:
    """Marks slow hosts. Computing and memory are compared among hosts with the same device, links among all hosts."""
    usable = [host for host in hosts if not host.problems]
    for name in ("tflops", "memory_gbps", "link_gbps"):
        for host in usable:
            alike = [o for o in usable if name == "link_gbps" or o.machine["device"] == host.machine["device"]]
            known = [value for one in alike if (value := getattr(one.measured, name)) is not None]
            mine = getattr(host.measured, name)
            # The median of two hosts would hide the slow one: the faster of them shows what the device can do.
            usual = (statistics.median if len(known) > 2 else max)(known) if known else 0.0
            if mine is not None and mine < SLOW * usual:
                host.slow.add(name)


def _impossible_parts(host: HostMeasurement) -> list[str]:
    problems = []
    for part, found in host.parts.items():
        if found is None:
            continue
        figure, unit = ("tflops", "TFLOPS") if part in PRODUCTS else ("memory_gbps", "GB/s")
        if found["wrong"]:
            problems.append(f"{found['wrong']} elements of the results of {part!r} are wrong")
        if check_measurement(figure, found["median"]):
            problems.append(f"{found['median']:.4g} {unit} in {part!r} cannot be; the clock or the work is wrong")
    missing = [part for part in ("float32", *MEMORY) if not host.parts.get(part)]
    return problems + [f"there is no result of {part!r}" for part in missing]


def _impossible_link(link: Link, found: dict) -> list[str]:
    what = f"what came from {link.source}"
    if found["wrong"]:
        return [f"{found['wrong']:.0f} elements of {what} are wrong"]
    if check_measurement("link_gbps", link.gbps) or link.gbps > IN_PLACE * found["memcpy"]:
        return [
            f"{what} came with {link.gbps:.4g} GB/s, but this host copies {found['memcpy']:.4g} GB/s at most; the "
            "clock or the work is wrong"
        ]
    return []


def _rounded(figure: float) -> float:
    return float(f"{figure:.{DIGITS}g}")


def measure_hosts(selection: HostSelection, seconds: float) -> tuple[list[HostMeasurement], dict[str, Any]]:
    """Measures all selected hosts. Returns the measurements, and the result of the job that measured their links.

    Raises:
        ResourceError: a host cannot be measured.
    """
    names = [host.name for host in selection.hosts()]
    with progress_bar() as progress:
        task = progress.add_task("connecting", total=1 + len(PARTS))
        with Connections(names, selection.ssh_config) as connections:
            machines = _all_of(connections.call("calibrate.machine", seconds=START_SECONDS))
            _check_machines(names, machines)
            parts: list[dict[str, Any]] = [{} for _ in names]
            for part in PARTS:
                progress.update(task, advance=1, description=f"products in {part}" if part in PRODUCTS else part)
                share = seconds / len(PARTS)
                arguments = {"part": part, "seconds": share}
                found = connections.call("calibrate.measure", arguments, seconds=START_SECONDS + LATE * share)
                for of_host, one in zip(parts, _all_of(found)):
                    of_host[part] = one
    job: dict[str, Any] = {"rows": [], "provider": None, "foreign_cpu_share": None}
    if len(names) > 1:
        # One rank on each host, one pair after the other, each way by itself.
        hostfile = Hostfile(tuple(selection.hosts())).with_one_rank_each().for_mlxdist()
        pairs = [{"source": a, "target": b} for a in range(len(names)) for b in range(len(names)) if a != b]
        where, target = replace(selection, hostfile=hostfile), "mlxdist.tools.calibrate.ranks:Links"
        runner = Runner("links", where, len(names), pinned=False, target=target)
        job = runner.job(pairs, seconds=seconds / len(pairs))
    return judge(names, machines, parts, [link for links in job["rows"] for link in links]), job


def _all_of(responses: list[Any]) -> list[Any]:
    """Returns all responses, or raises one error for all hosts that returned one."""
    errors = [response for response in responses if isinstance(response, CallError)]
    if errors:
        raise ResourceError("\n".join(f"{one.name}: {one}" if one.connected else str(one) for one in errors))
    return responses


def _check_machines(names: list[str], machines: list[dict[str, Any]]) -> None:
    for name, machine in zip(names, machines):
        if machine["mlxdist"] != __version__:
            raise ResourceError(f"{name} has mlxdist {machine['mlxdist']!r:.40}, and this machine {__version__}")
    for number, (name, machine) in enumerate(zip(names, machines)):
        same = [other for other, one in zip(names[:number], machines) if one["identity"] == machine["identity"]]
        if same:
            raise ResourceError(f"{same[0]} and {name} are one machine; give it once, with slots for its ranks")


def shares(selection: HostSelection, hosts: list[HostMeasurement]) -> dict[str, dict[str, float]]:
    """The speed of a rank on each host relative to the slowest rank, by memory and by compute."""
    hostfile = selection.hostfile or Hostfile(tuple(selection.hosts()))
    names = [host.name for host in hostfile.hosts for _ in range(host.slots)]
    measured = {host.name: host.measured for host in hosts}
    return {by: dict(zip(names, speeds(hostfile, by, measured))) for by in MEASUREMENTS}


def show_hosts(selection: HostSelection, hosts: list[HostMeasurement], console: Console) -> None:
    rank_shares = shares(selection, hosts)
    rows = []
    for host in hosts:
        link = min(host.links, key=lambda link: link.gbps, default=None)
        of_link = link and {"median": link.gbps, "min": link.least, "max": link.most}
        rows.append(
            [
                host.name,
                host.machine["device"],
                host.product["dtype"],
                _cell(host.product, "tflops" in host.slow),
                _cell(host.parts["row"], "memory_gbps" in host.slow),
                f"{max(host.parts[part]['median'] for part in ('copy', 'sum')):.3g}",
                _cell(of_link, "link_gbps" in host.slow) if of_link else "",
                "/".join(f"{rank_shares[by][host.name]:.2f}" for by in ("memory", "compute")),
            ]
        )
    columns = ["host", "device", "in", "TFLOPS", "one row\nGB/s", "array\nGB/s", "link\nGB/s", "shares:\nmem/comp"]
    console.print(table_of("", columns, rows, left=3, box=None, pad_edge=False, header_style="bold"))
    if any(host.slow for host in hosts):
        console.print("! more than 15% below others of its kind: look at what else runs there, power and cables")
    if any(_spread(found) > UNSTEADY for host in hosts for found in (host.product, host.parts["row"])):
        advice = "other work disturbs it; measure again, or for longer with --seconds"
        console.print(f"\N{PLUS-MINUS SIGN} above {UNSTEADY:.0%}: {advice}")


def _cell(found: dict[str, Any], slow: bool = False) -> str:
    return f"{'! ' * slow}{found['median']:.3g} \N{PLUS-MINUS SIGN}{_spread(found):.0%}"


def _spread(found: dict[str, Any]) -> float:
    """Half of the difference between minimum and maximum, as a share of the median."""
    return (found["max"] - found["min"]) / 2 / found["median"]


def as_json(selection: HostSelection, hosts: list[HostMeasurement], job: dict[str, Any]) -> dict[str, Any]:
    return {
        "hosts": [
            {
                "host": host.name,
                "machine": host.machine,
                "measured": None if host.problems else asdict(host.measured),
                "parts": host.parts,
                "slow": sorted(host.slow),
                "problems": host.problems,
            }
            for host in hosts
        ],
        "links": [asdict(link) for host in hosts for link in host.links if link.target == host.name],
        "provider": job["provider"],
        "rank_shares": None if any(host.problems for host in hosts) else shares(selection, hosts),
    }
