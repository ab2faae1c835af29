"""The job that measures the links between hosts: one rank on each, started as any other job."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from mlxdist.base.child_process import module_command
from mlxdist.base.errors import ResourceError
from mlxdist.cluster.hostfile.options import HostSelection
from mlxdist.launch.run_job import host_arguments, run_job

__all__ = ["measure_links"]

_MARGIN = 120.0  # seconds to start the job, and for the least that is measured of every pair


def measure_links(chosen: HostSelection, seconds: float) -> dict[str, Any]:
    """What rank 0 of link_rank.py prints; the ranks are the hosts in their order.

    Raises:
        ResourceError: the job failed; what it said is in the message.
    """
    hostfile = chosen.hostfile.with_one_rank_each().for_mlxdist()
    hosts = tuple(replace(host, measured=None) for host in hostfile.hosts)
    seconds_in_all = seconds + _MARGIN + len(hosts) ** 2
    program = module_command("mlxdist.tools.calibrate.link_rank", f"{seconds:g}", python=chosen.python)
    with host_arguments(replace(chosen, hostfile=replace(hostfile, hosts=hosts))) as where:
        job = run_job(program, where, directory="/", prefix=False, timeout=seconds_in_all)
    if job.status:
        raise ResourceError(f"the job that measures links failed:\n{job.errors.strip()}")
    lines = [line for line in job.output.splitlines() if line.startswith('{"links": ')]
    if not lines:
        raise ResourceError(f"the job that measures links printed no result, but {job.output[:200]!r}")
    return json.loads(lines[-1])
