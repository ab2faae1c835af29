"""Checks clocks, memory, disks, cores, sleep, and leftovers of earlier jobs."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from mlxdist.cluster.facts.power import Power
from mlxdist.cluster.hostfile.hosts import Host
from mlxdist.launch.reaper import LOST_DOMAINS

from ..cluster import Cluster
from ..findings import Finding, fail, note, ok, skip, warn

__all__ = [
    "check_allocation",
    "check_clocks",
    "check_cores",
    "check_disk",
    "check_gpus",
    "check_leaks",
    "check_memory",
    "check_power",
    "check_sleep",
    "gib",
]

_CLOCK_SECONDS = 1.0
_LITTLE = 0.10  # of all memory
_DISK_FAIL, _DISK_WARN = 100 << 20, 2 << 30
_MAX_WORDS = 2  # of a command: the interpreter and the program
_MAX_DOMAINS = 11  # of a Thunderbolt port; after that nothing can be connected


def each_host(
    step: str,
) -> Callable[[Callable[[Host, Any], Iterator[Finding]]], Callable[[Cluster], Iterator[Finding]]]:
    """Makes a check of a function that yields findings about one host from its response to this request."""

    def decorate(find: Callable[[Host, Any], Iterator[Finding]]) -> Callable[[Cluster], Iterator[Finding]]:
        @functools.wraps(find)
        def check(cluster: Cluster) -> Iterator[Finding]:
            return (finding for host, response in cluster.each_host(step) for finding in find(host, response))

        return check

    return decorate


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 1 << 30 else f"{size / 2**20:.0f} MiB"


@each_host("clock")
def check_clocks(host: Host, clock: tuple[float, float]) -> Iterator[Finding]:
    """Compares clocks. ``clock``: seconds that the host is ahead of this machine, and the error of that measurement."""
    ahead, unsure = clock
    if abs(ahead) - unsure > _CLOCK_SECONDS:
        what = f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} this machine"
        remedy = "set it: `sudo timedatectl set-ntp true`; on a Mac `sudo sntp -sS time.apple.com`"
        yield warn(host.name, what, remedy)
    else:
        # The exact offset is left out, because the report has one line for all hosts with the same text.
        yield ok(host.name, f"within {_CLOCK_SECONDS:g} s of this machine")


def check_memory(cluster: Cluster) -> Iterator[Finding]:
    yield from _free_memory(cluster)
    totals = {name: facts["memory"]["total"] for name, facts in cluster.each("facts") if facts["memory"]["total"]}
    small = [name for name, total in totals.items() if total < max(totals.values()) / 1.1]
    if small:
        what = "less memory than other hosts: what is divided equally has to fit here"
        yield note(small, what, "divide by size: mlxdist shard MODEL --rank-shares")


@each_host("facts")
def _free_memory(host: Host, facts: dict[str, Any]) -> Iterator[Finding]:
    total, available = facts["memory"]["total"], facts["memory"]["available"]
    if total is None or available is None:
        yield note(host.name, "the system does not say how much memory is free")
    elif available < _LITTLE * total:
        remedy = "end what uses it; the largest come last: ps -axo rss,pid,comm | sort -n"
        yield warn(host.name, f"{gib(available)} of {gib(total)} free", remedy)
    else:
        yield ok(host.name, f"{gib(available)} of {gib(total)} free")


def check_allocation(cluster: Cluster) -> Iterator[Finding]:
    return itertools.chain(_allocated(cluster), _wired_limit(cluster))


@each_host("allocate")
def _allocated(host: Host, allocated: dict[str, Any]) -> Iterator[Finding]:
    size = gib(allocated["bytes"])
    if allocated["late"]:
        what = (
            f"{size} of memory were not written to within {allocated['seconds']:.0f} s: the host is busy, or it swaps"
        )
        yield warn(host.name, what, "end what uses it, then check again; shown by: ps -axo pcpu,rss,pid,comm | sort -n")
    elif allocated["error"]:
        what = f"{size} of memory could not be had: {allocated['error']}"
        yield fail(host.name, what, "raise the limit (ulimit -v unlimited; --memory of a container), or free some")
    else:
        yield ok(host.name, f"{size} taken and written to")


@each_host("facts")
def _wired_limit(host: Host, facts: dict[str, Any]) -> Iterator[Finding]:
    limit, total = facts["memory"]["wired_limit"], facts["memory"]["total"]
    if limit and total and limit > 0.95 * total:
        what = f"iogpu.wired_limit_mb lets the GPU have {gib(limit)} of {gib(total)}: macOS itself may starve"
        yield warn(host.name, what, f"sudo sysctl iogpu.wired_limit_mb={int(0.85 * total) >> 20}")


@each_host("facts")
def check_disk(host: Host, facts: dict[str, Any]) -> Iterator[Finding]:
    low = [disk for disk in facts["disks"] if disk["free"] < _DISK_WARN]
    for disk in low:
        what = f"{gib(disk['free'])} free in {disk['path']} ({disk['use']})"
        remedy = f"free some (du -xh {disk['path']} | sort -h | tail), or name another directory with TMPDIR"
        yield (fail if disk["free"] < _DISK_FAIL else warn)(host.name, what, remedy)
    if not low:
        yield ok(host.name, f"at least {_DISK_WARN >> 30} GiB free wherever a job writes")


@each_host("facts")
def check_cores(host: Host, facts: dict[str, Any]) -> Iterator[Finding]:
    cores, load = facts["cores"], facts["load"]
    ranks = f"{host.slots} rank{'s' * (host.slots > 1)}, {cores} core{'s' * (cores > 1)}"
    if host.slots > cores:
        yield note(host.name, f"{ranks}: they share cores, which costs time", f"set {cores} there: slots, or -n")
    elif load > cores:
        remedy = "end them, or wait; they are shown by: ps -axo pcpu,pid,comm | sort -n"
        yield warn(host.name, f"{load:.1f} processes want its {cores} cores already", remedy)
    else:
        yield ok(host.name, ranks)


@each_host("facts")
def check_gpus(host: Host, facts: dict[str, Any]) -> Iterator[Finding]:
    """Checks the number of NVIDIA GPUs. A Mac's GPU is not one."""
    gpus = facts["gpus"]
    if not gpus:
        yield skip(host.name, "no NVIDIA GPU")
    elif host.slots > len(gpus):
        what = f"{host.slots} ranks share {', '.join(gpus)}: the GPU runs one process at a time, and each takes memory"
        yield note(host.name, what, f"set {len(gpus)} there: slots, or -n")
    else:
        yield ok(host.name, ", ".join(gpus))


@each_host("facts")
def check_sleep(host: Host, facts: dict[str, Any]) -> Iterator[Finding]:
    """Checks that the host does not sleep. A job keeps a Mac awake; between jobs, ssh has to reach it, too."""
    power = facts["power"]
    mac, systemd = power.get("pmset", {}), power.get("systemd")
    if "sleep" not in mac and systemd is None:
        yield skip(host.name, "neither pmset nor systemd says when it sleeps")
    elif mac.get("sleep") and not mac.get("SleepDisabled"):
        what = f"it sleeps after {mac['sleep']} min without a user: not while a job runs (caffeinate), but before one"
        yield note(host.name, what, "sudo pmset -a sleep 0 disksleep 0")
    elif systemd and not systemd["masked"] and systemd["idle"] not in ("", "ignore", "lock"):
        what = f"it does this when no user is active: {systemd['idle']} (IdleAction of systemd-logind)"
        remedy = "sudo systemctl mask sleep.target suspend.target hibernate.target hybrid-sleep.target"
        yield warn(host.name, what, remedy)
    else:
        yield ok(host.name, "it does not sleep by itself")


@each_host("facts")
def check_power(host: Host, facts: dict[str, Any]) -> Iterator[Finding]:
    """Checks that a Mac gives its GPU full speed, and that no display ends long work of it."""
    power = facts["power"]
    mac, speed = power.get("pmset", {}), power.get("speed")
    if not mac:
        yield skip(host.name, "pmset says nothing of its power")
        return
    problems = [
        (warn if problem.slows else note)(host.name, problem.text, problem.remedy)
        for problem in Power.of(mac, speed).problems()
    ]
    heat = "pmset says nothing of heat" if speed is None else "no heat"
    yield from problems or [ok(host.name, f"full power, its display may sleep, and {heat}")]


@each_host("facts")
def check_leaks(host: Host, facts: dict[str, Any]) -> Iterator[Finding]:
    """Checks that nothing of earlier jobs is left, and that no other job uses the host."""
    name, jobs, problems = host.name, facts["jobs"], []
    for job in jobs["running"]:
        # Options are left out: reports show this text, and options may have secrets.
        program = itertools.takewhile(lambda word: not word.startswith("-"), job["command"][:_MAX_WORDS])
        what = f"job {job['job']} runs there ({' '.join(program)[:60]})"
        problems.append(warn(name, what, f"wait for it, or on that host: mlxdist stop {job['job']}"))
    if jobs["stale"]:
        what = f"left of jobs whose launcher was killed: {', '.join(jobs['stale'][:4])}"
        problems.append(warn(name, what, "on that host: mlxdist launch -n 1 -- true (every launch removes it)"))
    if jobs["orphans"]:
        pids = " ".join(map(str, jobs["orphans"][:8]))
        problems.append(warn(name, f"processes of a job that is over: {pids}", f"on that host: kill {pids}"))
    if jobs["shared_memory"]:
        names = " ".join(jobs["shared_memory"][:4])
        problems.append(warn(name, f"shared memory of a job that is over: {names}", f"on that host: rm {names}"))
    if (domains := jobs["domains"]) and not jobs["running"]:
        what = f"{domains} protection domains are in use, and no job of this user runs: {LOST_DOMAINS}"
        make = fail if domains >= _MAX_DOMAINS else warn
        problems.append(make(name, what, "restart the Mac: sudo shutdown -r now"))
    unseen = " (processes are not looked at on this system)" if jobs["orphans"] is None else ""
    yield from problems or [ok(name, f"no other job, and nothing left of one{unseen}")]
