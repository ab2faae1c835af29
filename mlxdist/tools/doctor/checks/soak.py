"""Checks what a soak has found: its data, and what has grown on each host meanwhile."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from ..cluster import Cluster
from ..findings import Finding, fail, note, ok, skip, warn

__all__ = ["check_counters", "check_heat", "check_kernel_log", "check_soak"]

_SHOWN = 3
_CABLE = "look at the cable and ports of that link, and try another cable; mlxdist devices (on that host)"


def check_soak(cluster: Cluster) -> Iterator[Finding]:
    soak = cluster.soak
    if soak is None or soak.skipped:
        yield skip((), soak.skipped if soak else "no soak was run")
    elif soak.error:
        remedy = (
            "run it again with MLXDIST_DEBUG=info in the environment; level 1 has passed: see counters and kernel-log"
        )
        yield fail((), f"the ranks failed under load: {soak.error}", remedy)
    elif soak.wrong:
        remedy = "MLXDIST_CHECKSUM=1 says whether data is damaged in transit; look for bad memory or a bad cable there"
        yield fail((), "; ".join(soak.wrong[:_SHOWN]), remedy)
    else:
        moved = f"{soak.bytes / 1e9:.2f} GB in {soak.operations} operations"
        yield ok(soak.hosts, f"{moved} of {soak.ranks} ranks in {soak.seconds:.0f} s arrived right to the bit")


def check_counters(cluster: Cluster) -> Iterator[Finding]:
    for host, before, after in _both(cluster):
        old, new = before["counters"], after["counters"]
        grown = {name: new[name] - old[name] for name in sorted(old) if name in new and new[name] > old[name]}
        grown = {name: growth for name, growth in grown.items() if "throttle" not in name}  # see check_heat
        if grown:
            growths = [f"{name} by {growth}" for name, growth in grown.items()]
            more = f" and {len(growths) - _SHOWN} more" * (len(growths) > _SHOWN)
            yield warn(host, f"errors have been counted: {', '.join(growths[:_SHOWN])}{more}", _CABLE)
        if gone := sorted({name.split()[0] for name in old} - {name.split()[0] for name in new}):
            yield warn(host, f"{', '.join(gone)}: not there any more", f"{_CABLE}; then see kernel-log")
        if not grown and not gone:
            what = f"no error on {', '.join(after['rdma'])}" if after["rdma"] else "no RDMA port with counters"
            yield ok(host, f"{what}, none of its {len(new)} counters of errors has grown")


def check_kernel_log(cluster: Cluster) -> Iterator[Finding]:
    for host, before, after in _both(cluster):
        if after["log_refusal"]:
            yield skip(host, f"the kernel's log cannot be read: {after['log_refusal']}")
            continue
        lines = list((Counter(after["log"]) - Counter(before["log"])).elements())
        if lines:
            more = f" and {len(lines) - _SHOWN} more" * (len(lines) > _SHOWN)
            remedy = "look at all of them (on that host): dmesg, or on a Mac: log show --last 1h"
            yield warn(host, f"the kernel has written: {'; '.join(lines[-_SHOWN:])}{more}", remedy)
        else:
            yield ok(host, "nothing about links, RDMA, Thunderbolt or heat")


def check_heat(cluster: Cluster) -> Iterator[Finding]:
    remedy = "give it air, and let it cool; a job of hours will be slower than this soak's beginning"
    for host, before, after in _both(cluster):
        throttled = sum(_throttles(after).values()) - sum(_throttles(before).values())
        if (after["speed"] or 100) < 100:
            was = before["speed"] or 100
            yield warn(host, f"heat leaves {after['speed']} % of its speed, and left {was} % before", remedy)
        elif throttled > 0:
            yield warn(host, f"heat has throttled its processors: their counters grew by {throttled}", remedy)
        elif after["temperature"] is not None and before["temperature"] is not None:
            yield ok(host, f"{before['temperature']:.0f} °C before, {after['temperature']:.0f} °C after, not throttled")
        elif after["speed"] is not None or _throttles(after):
            yield ok(host, "not throttled")
        else:
            yield note(host, "the system shows neither temperatures nor whether it is throttled")


def _throttles(health: dict[str, Any]) -> dict[str, int]:
    return {name: count for name, count in health["counters"].items() if "throttle" in name}


def _both(cluster: Cluster) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """The hosts with a state before and one after."""
    before = cluster.responses.get("health_before", {})
    return ((host, before[host], after) for host, after in cluster.each("health_after") if host in before)
