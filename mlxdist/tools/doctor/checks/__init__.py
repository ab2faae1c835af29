"""The checks, in the order of the report. Each reads known facts about all hosts, and requests nothing.

A new check is a function ``check_name(cluster) -> Iterator[Finding]`` in a file here, a line in the list below, and a
section of docs/doctor.md. Where each host is checked by itself, `each_host` of system.py has the loop.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..cluster import Cluster
from ..findings import Finding, Result, skip, warn
from .files import check_model, check_script
from .job import check_bandwidth, check_correctness, check_latency, check_provider
from .network import check_interfaces, check_local_network, check_ports
from .rdma import check_gids, check_rdma
from .reachable import check_python, check_reachable, check_versions
from .soak import check_counters, check_heat, check_kernel_log, check_soak
from .system import (
    check_allocation,
    check_clocks,
    check_cores,
    check_disk,
    check_gpus,
    check_leaks,
    check_memory,
    check_power,
    check_sleep,
)
from .variables import check_fast_synch, check_gpu_sync, check_variables

__all__ = ["CHECKS", "Check", "run_checks"]


@dataclass(frozen=True)
class Check:
    """A check. ``step``: the request that it depends on, if any; a host's error response becomes a finding.

    ``after_job``: the check reads the result of a job, which runs on hosts that passed the other checks. ``thorough``:
    --quick leaves it out. ``soak``: it reads the result of a soak, which --level 2 and above have.
    """

    name: str
    find: Callable[[Cluster], Iterator[Finding]]
    step: str = ""
    after_job: bool = False
    thorough: bool = False
    soak: bool = False


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
    Check("gpus", check_gpus),
    Check("sleep", check_sleep),
    Check("power", check_power),
    Check("leaks", check_leaks),
    Check("rdma", check_rdma, "rdma"),
    Check("gids", check_gids),
    Check("gpu-sync", check_gpu_sync, "gpu_sync", thorough=True),
    Check("ports", check_ports, "listen"),
    Check("interfaces", check_interfaces, "connect"),
    Check("local-network", check_local_network),
    Check("correctness", check_correctness, after_job=True),
    Check("provider", check_provider, after_job=True),
    Check("latency", check_latency, after_job=True, thorough=True),
    Check("bandwidth", check_bandwidth, after_job=True, thorough=True),
    Check("soak", check_soak, after_job=True, thorough=True, soak=True),
    Check("counters", check_counters, "health_after", after_job=True, thorough=True, soak=True),
    Check("kernel-log", check_kernel_log, "health_before", after_job=True, thorough=True, soak=True),
    Check("heat", check_heat, after_job=True, thorough=True, soak=True),
)


def run_checks(cluster: Cluster, after_job: bool) -> list[Result]:
    """Runs all checks that read the result of the job, or all that do not."""
    checks = [c for c in CHECKS if c.after_job is after_job and not (c.thorough and cluster.options.quick)]
    checks = [check for check in checks if not check.soak or cluster.options.level > 1]
    found = {check.name: (*check.find(cluster), *_unknown(cluster, check.step)) for check in checks}
    return [Result(name, findings or (skip((), "no host responded"),)) for name, findings in found.items()]


def _unknown(cluster: Cluster, step: str) -> Iterator[Finding]:
    """Findings for hosts that returned an error. A lost host is a finding of the check reachable."""
    remedy = f"on that host: mlxdist doctor --json, and look at {step}"
    for name, error in cluster.errors.get(step, {}).items():
        if error.connected:
            yield warn(name, f"this could not be found out: {error.text}", remedy)
