"""Nothing of earlier jobs is left, and no other job uses the host."""

from __future__ import annotations

import itertools

from mlxdist.launch.reaper import LOST_DOMAINS

from ..cluster import Cluster
from ..findings import Finding, fail, ok, warn

__all__ = ["check_leaks"]

_WORDS = 2  # of a command: the interpreter and the program
_DOMAINS = 11  # of a Thunderbolt port; after that nothing can be connected


def check_leaks(cluster: Cluster) -> list[Finding]:
    found = []
    for name, facts in cluster.each("facts"):
        here = _of_host(name, facts["jobs"])
        unseen = " (processes are not looked at on this system)" if facts["jobs"]["orphans"] is None else ""
        found += here or [ok(name, f"no other job, and nothing left of one{unseen}")]
    return found


def _of_host(name: str, jobs: dict) -> list[Finding]:
    found = []
    for job in jobs["running"]:
        # Without options: this is in reports, and they may be secrets.
        program = itertools.takewhile(lambda word: not word.startswith("-"), job["command"][:_WORDS])
        what = f"job {job['job']} runs there ({' '.join(program)[:60]})"
        found.append(warn(name, what, f"wait for it, or on that host: mlxdist stop {job['job']}"))
    if jobs["left"]:
        what = f"left of jobs whose launcher was killed: {', '.join(jobs['left'][:4])}"
        found.append(warn(name, what, "on that host: mlxdist launch -n 1 -- true (every launch removes it)"))
    if jobs["orphans"]:
        pids = " ".join(map(str, jobs["orphans"][:8]))
        found.append(warn(name, f"processes of a job that is over: {pids}", f"on that host: kill {pids}"))
    if jobs["shared_memory"]:
        names = " ".join(jobs["shared_memory"][:4])
        found.append(warn(name, f"shared memory of a job that is over: {names}", f"on that host: rm {names}"))
    domains = jobs["domains"]
    if domains and not jobs["running"]:
        what = f"{domains} protection domains are in use, and no job of this user runs: {LOST_DOMAINS}"
        remedy = "restart the Mac: sudo shutdown -r now"
        found.append((fail if domains >= _DOMAINS else warn)(name, what, remedy))
    return found
