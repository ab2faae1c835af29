"""The checks, in the order in which they are shown. Each looks at what is known of all hosts, and asks nothing.

A new check is a function ``check_name(cluster) -> list[Finding]`` in a file here, a line in the list below, and a
section of docs/doctor.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..cluster import Cluster
from ..findings import Finding, Result, skip, warn
from .clocks import check_clocks
from .cores import check_cores
from .gpu import check_gpu_crossing
from .job import check_bandwidth, check_latency, check_provider, check_values
from .leaks import check_leaks
from .memory import check_allocation, check_disk, check_memory
from .model import check_model
from .network import check_interfaces, check_ports, check_privacy
from .program import check_script
from .python import check_python, check_versions
from .rdma import check_gids, check_rdma
from .reachable import check_reachable
from .sleep import check_sleep
from .variables import check_fast_synch, check_variables

__all__ = ["CHECKS", "Check", "run_checks"]


@dataclass(frozen=True)
class Check:
    """``step``: what it asks hosts, if anything; a host that cannot answer is a finding of this check.

    ``after_job``: it looks at what a job has shown, which is run on hosts that have passed the others. ``thorough``:
    not for --quick.
    """

    name: str
    find: Callable[[Cluster], list[Finding]]
    step: str = ""
    after_job: bool = False
    thorough: bool = False


CHECKS = (
    Check("reachable", check_reachable),
    Check("python", check_python),
    Check("versions", check_versions),
    Check("variables", check_variables),
    Check("fast-synch", check_fast_synch),
    Check("script", check_script, "program"),
    Check("model", check_model, "model"),
    Check("clocks", check_clocks, "clock"),
    Check("memory", check_memory),
    Check("allocation", check_allocation, "allocate"),
    Check("disk", check_disk),
    Check("cores", check_cores),
    Check("sleep", check_sleep),
    Check("leaks", check_leaks),
    Check("rdma", check_rdma, "rdma"),
    Check("gids", check_gids),
    Check("gpu-crossing", check_gpu_crossing, "crossing", thorough=True),
    Check("ports", check_ports, "listen"),
    Check("interfaces", check_interfaces, "connect"),
    Check("privacy", check_privacy),
    Check("values", check_values, after_job=True),
    Check("provider", check_provider, after_job=True),
    Check("latency", check_latency, after_job=True, thorough=True),
    Check("bandwidth", check_bandwidth, after_job=True, thorough=True),
)


def run_checks(cluster: Cluster, after_job: bool) -> list[Result]:
    """All that look at what is known before the job, or after it."""
    checks = [c for c in CHECKS if c.after_job is after_job and not (c.thorough and cluster.question.quick)]
    found = {check.name: (*check.find(cluster), *_unanswered(cluster, check.step)) for check in checks}
    return [Result(name, findings or (skip((), "no host could be asked"),)) for name, findings in found.items()]


def _unanswered(cluster: Cluster, step: str) -> list[Finding]:
    """Hosts that have said that they cannot answer. One that was lost is a finding of the check reachable."""
    troubles = cluster.troubles.get(step, {}).items()
    remedy = f"on that host: mlxdist doctor --json, and look at {step}"
    return [
        warn(name, f"this could not be found out: {trouble.text}", remedy)
        for name, trouble in troubles
        if trouble.connected
    ]
