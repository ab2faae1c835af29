"""There is memory, it can really be had, and there is room on the disks."""

from __future__ import annotations

from ..cluster import Cluster
from ..findings import Finding, fail, note, ok, warn

__all__ = ["check_allocation", "check_disk", "check_memory", "gib"]

_LITTLE = 0.10  # of all memory
_DISK_FAIL, _DISK_WARN = 100 << 20, 2 << 30


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 1 << 30 else f"{size / 2**20:.0f} MiB"


def check_memory(cluster: Cluster) -> list[Finding]:
    found, totals = [], {}
    for name, facts in cluster.each("facts"):
        total, available = facts["memory"].get("total"), facts["memory"].get("available")
        if total is None or available is None:
            found.append(note(name, "the system does not say how much memory is free"))
            continue
        totals[name] = total
        what = f"{gib(available)} of {gib(total)} free"
        if available < _LITTLE * total:
            found.append(warn(name, what, "end what uses it; the largest come last: ps -axo rss,pid,comm | sort -n"))
        else:
            found.append(ok(name, what))
    if totals and max(totals.values()) > 1.1 * min(totals.values()):
        small = [name for name, total in totals.items() if total < max(totals.values()) / 1.1]
        what = "less memory than other hosts: what is divided equally has to fit here"
        found.append(note(small, what, "divide by size: mlxdist shard MODEL --weights"))
    return found


def check_allocation(cluster: Cluster) -> list[Finding]:
    found = []
    for name, told in cluster.each("allocate"):
        size = gib(told["bytes"])
        if told["error"]:
            what = f"{size} of memory could not be had: {told['error']}"
            remedy = "raise the limit (ulimit -v unlimited; --memory of a container), or free some"
            found.append(fail(name, what, remedy))
        else:
            found.append(ok(name, f"{size} taken and written to"))
    for name, facts in cluster.each("facts"):
        limit, total = facts["memory"].get("wired_limit"), facts["memory"].get("total")
        if limit and total and limit > 0.95 * total:
            what = f"iogpu.wired_limit_mb lets the GPU have {gib(limit)} of {gib(total)}: macOS itself may starve"
            found.append(warn(name, what, f"sudo sysctl iogpu.wired_limit_mb={int(0.85 * total) >> 20}"))
    return found


def check_disk(cluster: Cluster) -> list[Finding]:
    found = []
    for name, facts in cluster.each("facts"):
        low = [disk for disk in facts["disks"] if disk["free"] < _DISK_WARN]
        for disk in low:
            what = f"{gib(disk['free'])} free in {disk['path']} ({disk['use']})"
            remedy = f"make room (du -xh {disk['path']} | sort -h | tail), or name another place with TMPDIR"
            found.append((fail if disk["free"] < _DISK_FAIL else warn)(name, what, remedy))
        if not low:
            found.append(ok(name, f"at least {_DISK_WARN >> 30} GiB free wherever a job writes"))
    return found
