"""Hostfiles: which hosts a job runs on, in the formats that are around. `mlxdist hostfile` is the command."""

from .hosts import FORMATS, Host, Hostfile
from .reading import parse, read
from .slurm import expand, from_slurm, tasks_per_node
from .writing import write

__all__ = ["FORMATS", "Host", "Hostfile", "expand", "from_slurm", "parse", "read", "tasks_per_node", "write"]
