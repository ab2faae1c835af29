"""Facts that a result depends on and that are hard to find out later: the machine, the command and the sources."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlxdist.base.environment import OF_JOB
from mlxdist.cluster.facts.collect import collect_here

__all__ = ["describe_command", "describe_machine", "relevant"]

_SECONDS = 10.0
_PREFIXES = ("MLXDIST_", "MLX_", "OMP_", "OPENBLAS_", "VECLIB_", "MKL_")


def describe_machine() -> dict[str, Any]:
    """Describes the host that this process runs on, and this Python."""
    import mlx.core as mx
    import numpy as np

    from mlxdist.version import __version__

    clock, host = time.get_clock_info("perf_counter"), collect_here()
    return {
        "host": socket.gethostname(),
        "system": platform.system(),
        "release": host.release,
        "kernel": platform.version(),
        "architecture": platform.machine(),
        "cpu": host.chip,
        "cores": os.cpu_count(),
        "memory": host.memory.total,
        "gpu": mx.is_available(mx.gpu),
        "python": platform.python_version(),
        "mlxdist": __version__,
        "mlx": importlib.metadata.version("mlx"),
        "numpy": np.__version__,
        "environment": relevant(os.environ),
        "clock": {"name": clock.implementation, "resolution": clock.resolution, "wall": time.time()},
    }


def relevant(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that change results, without those that the launcher sets for each job, the secret among them."""
    names = sorted(name for name in environ if name.startswith(_PREFIXES) and name not in OF_JOB)
    return {name: environ[name] for name in names}


def describe_command() -> dict[str, Any]:
    """When the command began, its words, and the revision of the sources if they are a working copy of git."""
    return {
        "begun": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["mlxdist", *sys.argv[1:]]),
        "revision": _revision(),
    }


def _revision() -> str | None:
    directory = str(Path(__file__).parent)
    revision = _run("git", "-C", directory, "rev-parse", "HEAD")
    changed = _run("git", "-C", directory, "status", "--porcelain", "--untracked-files=no")
    return f"{revision}{', with changes' if changed else ''}" if revision else None


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
