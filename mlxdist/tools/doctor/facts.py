"""Facts that only mlxdist's Python on a host can report: versions, imports, variables, disks, jobs, devices.

This module runs on that host. Facts that need no Python are in mlxdist/cluster/facts.
"""

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlxdist.base.child_process import code_command
from mlxdist.base.environment import OF_JOB, Environment
from mlxdist.base.errors import EnvironmentVariableError, ResourceError
from mlxdist.base.gpus import visible_gpus
from mlxdist.base.host_identity import host_identity
from mlxdist.cluster.facts.collect import collect_here, output_of
from mlxdist.launch.jobs import list_jobs, read_job
from mlxdist.launch.reaper import PROTECTION_DOMAINS
from mlxdist.launch.runtime_directory import is_locked, runtime_directory
from mlxdist.runtime import mpi_shim
from mlxdist.runtime.devices.device import REAL_PROVIDER
from mlxdist.runtime.devices.diagnosis import diagnose
from mlxdist.runtime.devices.listing import list_apart
from mlxdist.runtime.devices.queue_pairs import usable
from mlxdist.version import __version__

__all__ = ["allocate", "clock", "devices", "installation", "kernel_objects", "read", "run_python"]

_IMPORT_SECONDS = 60.0
_RELEVANT = re.compile(r"(MLX|MLXDIST|OMP|OPENBLAS|VECLIB|MKL|HF|TRANSFORMERS|TOKENIZERS|PYTHON|DYLD|LD)_?[A-Z0-9_]*")
_PRIVATE = re.compile(r"TOKEN|SECRET|PASSW|KEY")
_MAX_VALUE = 4096
_IMPORT = "import time; t = time.monotonic(); import mlx.core, mlxdist; mlxdist.init; print(time.monotonic() - t)"
_ALLOCATE = """
import mmap, sys
size = int(sys.argv[1])
memory = mmap.mmap(-1, size)
for at in range(0, size, mmap.PAGESIZE):
    memory[at] = 1
"""
_BUILD = """
from mlxdist.runtime.native import bridge
print(f"compiler={bridge.compiler}")
print(f"nanobind={bridge.nanobind}")
"""


def read(directory: str = "") -> dict[str, Any]:
    """The facts that take a few seconds at most. ``directory``: the directory where ranks will run."""
    host = collect_here()
    packages = {name: _version(package) for name, package in (("MLX", "mlx"), ("mlx_lm", "mlx-lm"), ("NumPy", "numpy"))}
    packages = {name: version for name, version in packages.items() if version}
    return {
        "versions": {"Python": platform.python_version(), "mlxdist": __version__}
        | packages
        | {"system": host.version, "processor": host.architecture},
        "import": _try_import(),
        "variables": _variables(),
        "variables_error": _variables_error(),
        "identity": host_identity(),
        "ssh": os.environ.get("SSH_CONNECTION", "").split(),
        "system": host.system,
        "cores": host.cores,
        "gpus": [str(gpu) for gpu in visible_gpus()],
        "load": host.load,
        "memory": vars(host.memory),
        "disks": _disks(directory),
        "power": host.power,
        "jobs": _jobs(),
        "printed": host.printed,
    }


def clock() -> float:
    return time.time()


def allocate(size: int, seconds: float = 20.0) -> dict[str, Any]:
    """Takes memory and writes to all of it, in a process of its own, because the system may kill that process.

    "late" in the result: the time limit ``seconds`` ended the test, so its result is not about the memory.
    """
    size = max(1 << 20, min(size, (collect_here().memory.available or size) // 4))
    begin = time.monotonic()
    _, error = run_python(code_command(_ALLOCATE, str(size)), seconds)
    taken = time.monotonic() - begin
    return {"bytes": size, "error": error, "late": bool(error) and taken >= seconds, "seconds": taken}


def devices(seconds: float = 10.0) -> dict[str, Any]:
    """The RDMA devices of this host, and their problems: the verdicts are those of `mlxdist devices`."""
    listing = list_apart(REAL_PROVIDER, seconds=seconds)
    found = diagnose(collect_here(), listing.devices, listing.error)
    return {
        "devices": [
            device.to_json()
            | {
                "active": device.is_active,
                "queue_pairs": usable(device),
                "interfaces": list(device.interfaces),
                "networks": sorted({str(gid) for gid in device.gids if gid.ipv4}),
            }
            for device in listing.devices
        ],
        "findings": [vars(finding) | {"verdict": str(finding.verdict)} for finding in found],
    }


def installation() -> dict[str, str]:
    """How mlxdist was built and installed; empty values are unknown. "host": the machine's own name."""
    host = collect_here()
    found = {
        "host": socket.gethostname(),
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": f"{platform.python_implementation()} {platform.python_version()}, {platform.python_compiler()}",
        "environment": _kind_of_environment(),
        "pip": _version("pip"),
        "uv": output_of("uv", "--version").strip(),
        "mlx-metal": _version("mlx-metal"),
    }
    if host.is_mac:
        # A Python that was linked with an SDK before macOS 26 may read 16 there; the kernel's number is right.
        found |= {"macOS": host.release, "macOS build": host.build, "macOS as Python reads it": platform.mac_ver()[0]}
        found |= {"model": host.model, "chip": host.chip}
    build, _ = run_python(code_command(_BUILD), _IMPORT_SECONDS)
    return found | dict(re.findall(r"^(compiler|nanobind)=(.*)$", build, re.MULTILINE))


def kernel_objects(text: str) -> int | None:
    """The number in the output of ``ioclasscount NAME``, such as ``NAME = 3``."""
    found = re.search(r"=\s*(\d+)\s*$", text.strip())
    return int(found[1]) if found else None


def run_python(command: Sequence[str], seconds: float, **variables: str) -> tuple[str, str]:
    """Runs a Python process with the variables of ranks and ``variables``. Returns its output and its error."""
    environment = {name: value for name, value in os.environ.items() if name not in OF_JOB} | variables
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            env=environment,
            text=True,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return "", f"it had not ended after {seconds:g} s"
    words = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
    return done.stdout, words[0] if done.returncode else ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _kind_of_environment() -> str:
    """The kind of environment that this Python is in, without its path."""
    kinds = {"conda": "conda", "uv": "uv", "framework": "Python.framework", "homebrew": "Homebrew", "pyenv": "pyenv"}
    paths = f"{sys.prefix} {sys.base_prefix}".lower()
    names = [name for word, name in kinds.items() if f"/{word}" in paths or f"{word}/" in paths]
    return ", ".join([*names, "virtual environment" if sys.prefix != sys.base_prefix else "no virtual environment"])


def _try_import() -> dict[str, Any]:
    output, error = run_python(code_command(_IMPORT), _IMPORT_SECONDS)
    return {"error": error} if error else {"error": "", "seconds": float(output)}


def _variables() -> dict[str, str]:
    """The variables of this shell that affect ranks, except those of mlxdist's jobs and private ones."""
    return {
        name: value[:_MAX_VALUE]
        for name, value in sorted(os.environ.items())
        if _RELEVANT.fullmatch(name) and not _PRIVATE.search(name) and name not in OF_JOB and not mpi_shim.diverts(name)
    }


def _variables_error() -> str:
    try:
        Environment.read({name: value for name, value in os.environ.items() if name not in OF_JOB})
    except EnvironmentVariableError as error:
        return str(error)
    return ""


def _disks(directory: str) -> list[dict[str, Any]]:
    """The file systems that a job writes to, each once."""
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError:  # nothing can be written anywhere, which is what has to be found
        temporary = os.environ.get("TMPDIR") or "/tmp"
    paths = {"temporary files": temporary, "the job's directory": directory}
    with contextlib.suppress(ResourceError):
        paths["records of jobs"] = str(runtime_directory())
    found: dict[int, dict[str, Any]] = {}
    for use, path in paths.items():
        with contextlib.suppress(OSError):
            usage = shutil.disk_usage(path)
            found.setdefault(os.stat(path).st_dev, {"use": use, "path": path, "total": usage.total, "free": usage.free})
    return list(found.values())


def _jobs() -> dict[str, Any]:
    """Jobs of this user: running, stale after a killed launcher; processes of finished jobs; kernel objects."""
    found: dict[str, Any] = {"running": [], "stale": [], "orphans": None, "domains": None, "shared_memory": []}
    with contextlib.suppress(ResourceError):
        running = list_jobs()
        ours = os.environ.get("MLXDIST_JOB", "").partition(".")[0]
        found["running"] = [{"job": j.name, "ranks": len(j.pids), "command": j.command[:20]} for j in running]
        found["stale"] = [path.name for path in sorted(runtime_directory().iterdir()) if _is_stale(path)]
        found["orphans"] = _orphans({ours, *(job.name for job in running)})
    if sys.platform == "darwin":
        found["domains"] = kernel_objects(output_of("ioclasscount", PROTECTION_DOMAINS))
    elif os.path.isdir("/dev/shm"):
        mine = (path for path in Path("/dev/shm").glob("mlxdist*") if _owner(path) == os.getuid())
        found["shared_memory"] = sorted(map(str, mine))
    return found


def _is_stale(directory: Path) -> bool:
    """Whether the directory belongs to a job whose launcher was killed."""
    job = None if directory.name.startswith(".") else read_job(directory)
    return job is not None and job.name == directory.name and not is_locked(directory)


def _orphans(jobs: set[str]) -> list[int] | None:
    """Processes of this user that were ranks of a job, have lost their parent, and belong to no running job.

    None where the system has no /proc.
    """
    if sys.platform != "linux":
        return None
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (directory / "stat").read_bytes().rpartition(b")")[2].split()[1]
            if directory.stat().st_uid != os.getuid() or parent != b"1":
                continue
            name = re.search(rb"(?:^|\0)MLXDIST_JOB=([\w.-]+)", (directory / "environ").read_bytes())
            if name and name[1].decode().partition(".")[0] not in jobs:
                found.append(int(directory.name))
    return sorted(found)


def _owner(path: Path) -> int | None:
    try:
        return path.stat().st_uid
    except OSError:
        return None
