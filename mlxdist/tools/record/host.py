"""What a host says about itself: versions, packages, hardware, variables of ranks, and the state of a git checkout.

It runs on that host, through the table of mlxdist.cli.rpc_server. Secrets are removed there.
"""

import importlib.metadata
import os
import platform
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from mlxdist.base.credentials import remove_from_environment, remove_from_text, secret_values
from mlxdist.base.gpus import visible_gpus
from mlxdist.cluster.facts.collect import collect_here, output_of
from mlxdist.launch.local import base_environment
from mlxdist.version import __version__

__all__ = ["MAX_DIFF_BYTES", "MAX_NAMES", "MAX_TEXT", "read"]

MAX_DIFF_BYTES = 1 << 20
MAX_STATUS_BYTES = 1 << 16
MAX_NAMES = 4096  # variables, and packages
MAX_TEXT = 4096  # characters of a value
# Without what a checkout may run by its settings. `head` bounds what is held in memory.
_BOUNDED = 'limit=$1 directory=$2; shift 2; git -c core.fsmonitor=false -C "$directory" "$@" | head -c "$limit"'


def read(directory: str, variables: Mapping[str, str], mpi_shim: bool) -> dict[str, Any]:
    """The record of this host.

    Args:
        directory: where the ranks run.
        variables: what the launcher sets for the ranks, in addition to the environment of this host.
        mpi_shim: whether the ranks get mlxdist's MPI shim.
    """
    facts = collect_here()
    environ = base_environment(os.environ, mpi_shim) | dict(variables)
    packages = {found.name: found.version for found in importlib.metadata.distributions() if found.name}
    return {
        "host": socket.gethostname(),
        "versions": {
            "mlxdist": __version__,
            "mlx": packages.get("mlx", ""),
            "Python": f"{platform.python_implementation()} {platform.python_version()}",
            "system": facts.version,
            "kernel": f"{platform.system()} {platform.release()}",
        },
        "python": sys.executable,
        "packages": dict(sorted(packages.items(), key=lambda package: package[0].lower())[:MAX_NAMES]),
        "hardware": {
            "architecture": facts.architecture,
            "model": facts.model,
            "chip": facts.chip,
            "cores": str(facts.cores),
            "memory": "" if facts.memory.total is None else f"{facts.memory.total / 2**30:.0f} GiB",
            "GPUs": ", ".join(gpu.name for gpu in visible_gpus()),
            "RDMA devices": ", ".join(sorted(facts.rdma.values())),
        },
        "environment": {
            name: value[:MAX_TEXT] for name, value in list(remove_from_environment(environ).items())[:MAX_NAMES]
        },
        "git": _git(directory, secret_values(environ)),
    }


def _git(directory: str, secrets: Sequence[str]) -> dict[str, Any] | None:
    """The state of the checkout around ``directory``; None where there is none, or no git."""
    root = _of_git(directory, MAX_TEXT, "rev-parse", "--show-toplevel").rstrip("\n")
    if not root:
        return None
    # Other encodings than UTF-8 are read with replacements: a diff of these files is for the eye alone.
    diff = _of_git(root, MAX_DIFF_BYTES + 1, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD")
    return {
        "root": root,
        "commit": _of_git(root, MAX_TEXT, "rev-parse", "HEAD").strip(),
        "branch": _of_git(root, MAX_TEXT, "rev-parse", "--abbrev-ref", "HEAD").strip(),
        "status": _of_git(root, MAX_STATUS_BYTES, "status", "--porcelain").splitlines()[:MAX_NAMES],
        "diff": remove_from_text(diff[:MAX_DIFF_BYTES], secrets),
        "diff_is_complete": len(diff.encode()) <= MAX_DIFF_BYTES,
    }


def _of_git(directory: str, limit: int, *words: str) -> str:
    return output_of("/bin/sh", "-c", _BOUNDED, "sh", str(limit), directory, *words)
