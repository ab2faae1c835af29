"""`mlxdist doctor`: finds what would go wrong with a job on these hosts before it starts.

diagnose.py     probe, job and checks in their order; the preflight of `mlxdist launch`
probe.py        requests to all hosts at once; then they connect to each other
facts.py, files.py, network.py, gpu.py      what the requests return; they run on the host
job.py          the job that tests values and links; its ranks run probe_rank.py
cluster.py      everything known of all hosts: what the checks read
checks/         the checks and their list: from what is known to findings
findings.py     what a check finds
exclude.py      which hosts have failed, and a hostfile without them
report.py       tables and JSON
diagnostics/    `mlxdist doctor --report FILE`
"""

from typing import Any

__all__ = ["preflight"]


def __getattr__(name: str) -> Any:
    """Loaded on first use: the functions that run on hosts and the ranks of jobs need no checks."""
    if name != "preflight":
        raise AttributeError(name)
    from .diagnose import preflight

    return preflight
