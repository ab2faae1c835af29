"""The job that measures the links between hosts: one rank on each, started as any other job."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxdist.base.errors import ResourceError
from mlxdist.base.own_python import own_module
from mlxdist.cluster.hostfile import save
from mlxdist.cluster.hostfile.options import HostSelection

__all__ = ["measure_links"]

_MARGIN = 120.0  # seconds to start the job, and for the least that is measured of every pair


def measure_links(chosen: HostSelection, seconds: float) -> dict[str, Any]:
    """What rank 0 of link_rank.py prints; the ranks are the hosts in their order.

    Raises:
        ResourceError: the job failed; what it said is in the message.
    """
    hostfile = chosen.hostfile.with_one_rank_each().for_mlxdist()
    hosts = tuple(replace(host, measured=None) for host in hostfile.hosts)
    with tempfile.TemporaryDirectory(prefix="mlxdist-calibrate-") as folder:
        file = Path(folder, "hosts.json")
        save(replace(hostfile, hosts=hosts), file)
        command = own_module("mlxdist", "launch", "--hostfile", str(file), "--ssh", shlex.join(chosen.ssh))
        command += ["--python", chosen.python] * bool(chosen.python)
        command += ["--cwd", "/", "--no-prefix", "--timeout", f"{seconds + _MARGIN + len(hosts) ** 2:g}", "--"]
        command += own_module("mlxdist.tools.calibrate.link_rank", f"{seconds:g}", python=chosen.python)
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ
        ) as job:
            try:
                output, errors = job.communicate()
            except BaseException:
                job.terminate()
                raise
    if job.returncode:
        raise ResourceError(f"the job that measures links failed:\n{errors.decode(errors='replace').strip()}")
    lines = [line for line in output.decode(errors="replace").splitlines() if line.startswith('{"links": ')]
    if not lines:
        raise ResourceError(f"the job that measures links printed no result, but {output[:200]!r}")
    return json.loads(lines[-1])
