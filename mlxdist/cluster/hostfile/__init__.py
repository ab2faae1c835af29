"""Hostfiles: which hosts a job runs on, in the formats that are around. `mlxdist hostfile` is the command.

Names load on first use: options.py, which the launcher always needs, is beside what reads files.
"""

import importlib
from typing import Any

_MODULE_OF = {
    "MEASUREMENTS": "rank_shares",
    "FORMATS": "hosts",
    "Host": "hosts",
    "Hostfile": "hosts",
    "Measured": "hosts",
    "expand": "slurm",
    "from_slurm": "slurm",
    "parse": "parsing",
    "read": "parsing",
    "save": "writing",
    "speeds": "rank_shares",
    "tasks_per_node": "slurm",
    "write": "writing",
}

__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'mlxdist.cluster.hostfile' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value
