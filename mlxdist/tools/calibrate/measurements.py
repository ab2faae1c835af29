"""What the measurements of all hosts amount to: each host's figures, whether they can be true, and who falls behind."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxdist.cluster.hostfile.hosts import Measured, check_measurement

from ..bench.bandwidth import IN_PLACE
from .parts import MEMORY, PRODUCTS

__all__ = ["Figures", "Link", "figures_of", "mark_outliers"]

SLOW = 0.85  # of the median of its like: a host or link below that is marked
DIGITS = 4  # that are kept of a figure; the rest is noise


@dataclass(frozen=True)
class Link:
    """GB/s from one host to another, as the receiver saw it."""

    source: str
    target: str
    gbps: float
    least: float
    most: float


@dataclass
class Figures:
    """Of one host.

    Attributes:
        machine: what the host says of its device.
        parts: what it returned for each part; see `mlxdist.tools.calibrate.measure.measure`.
        links: those that lead to it and from it.
        problems: why the figures are no result.
        slow: which figures are far below those of its like: "tflops", "memory_gbps", "link_gbps".
    """

    name: str
    machine: dict[str, Any]
    parts: dict[str, Any]
    links: list[Link] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    slow: set[str] = field(default_factory=set)

    @property
    def product(self) -> dict[str, Any]:
        """The fastest one."""
        return max((self.parts[part] for part in PRODUCTS if self.parts.get(part)), key=lambda found: found["median"])

    @property
    def foreign_cpu_share(self) -> float | None:
        """Over all parts, which last equally long; None where the system does not say."""
        shares = [found["foreign_cpu_share"] for found in self.parts.values() if found]
        return None if None in shares else statistics.fmean(shares)

    @property
    def measured(self) -> Measured:
        """What the hostfile keeps."""
        slowest = min((link.gbps for link in self.links), default=None)
        return Measured(
            _rounded(self.product["median"]),
            _rounded(self.parts["row"]["median"]),
            None if slowest is None else _rounded(slowest),
        )


def figures_of(
    names: Sequence[str], machines: Sequence[dict], parts: Sequence[dict[str, Any]], links: Sequence[dict]
) -> list[Figures]:
    """Figures of all hosts, with what is wrong with them. ``links``: those of link_rank.py, between ranks 0, 1, ..."""
    hosts = [Figures(*of_host) for of_host in zip(names, machines, parts)]
    for host in hosts:
        host.problems += _impossible_parts(host)
    for found in links:
        ends = [hosts[found["from"]], hosts[found["to"]]]
        link = Link(ends[0].name, ends[1].name, found["median"], found["min"], found["max"])
        for host in ends:
            host.links.append(link)
        ends[1].problems += _impossible_link(link, found)
    mark_outliers(hosts)
    return hosts


def mark_outliers(hosts: Sequence[Figures]) -> None:
    """Computing and memory are compared among hosts with the same device, links among all that there are."""
    usable = [host for host in hosts if not host.problems]
    for name in ("tflops", "memory_gbps", "link_gbps"):
        for host in usable:
            like = [o for o in usable if name == "link_gbps" or o.machine["device"] == host.machine["device"]]
            known = [value for one in like if (value := getattr(one.measured, name)) is not None]
            mine = getattr(host.measured, name)
            # Of two the faster is what the device can do.
            usual = (statistics.median if len(known) > 2 else max)(known) if known else 0.0
            if mine is not None and mine < SLOW * usual:
                host.slow.add(name)


def _impossible_parts(host: Figures) -> list[str]:
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
