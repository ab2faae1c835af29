"""What a host says of itself, within seconds: versions, variables, memory, disks, sleep, jobs. Runs on that host.

What a command of the system prints is read by functions of their own, so that it can be read anywhere.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mlxdist.base.environment import OF_JOB, Environment
from mlxdist.base.errors import EnvironmentVariableError, ResourceError
from mlxdist.base.host_identity import host_identity
from mlxdist.base.own_python import own_code
from mlxdist.cluster.facts.rdma import system_release
from mlxdist.launch.jobs import list_jobs, read_record
from mlxdist.launch.reaper import PROTECTION_DOMAINS
from mlxdist.launch.runtime_directory import runtime_folder, try_lock
from mlxdist.runtime import mpi_shim
from mlxdist.version import __version__

__all__ = ["allocate", "clock", "kernel_objects", "output_of", "power_settings", "read", "vm_statistics"]

_SECONDS = 10.0
_IMPORT_SECONDS = 60.0
_RELEVANT = re.compile(r"(MLX|MLXDIST|OMP|OPENBLAS|VECLIB|MKL|HF|TRANSFORMERS|TOKENIZERS|PYTHON|DYLD|LD)_?[A-Z0-9_]*")
_PRIVATE = re.compile(r"TOKEN|SECRET|PASSW|KEY")
_MAX_VALUE = 4096
_IMPORT = "import time; t = time.monotonic(); import mlx.core, mlxdist; mlxdist.init; print(time.monotonic() - t)"


def read(folder: str = "") -> dict[str, Any]:
    """Everything that takes no time. ``folder``: where ranks will run."""
    return {
        "versions": _versions(),
        "import": _try_import(),
        "variables": _variables(),
        "variables_error": _variables_error(),
        "identity": host_identity(),
        "ssh": os.environ.get("SSH_CONNECTION", "").split(),
        "system": platform.system(),
        "cores": _cores(),
        "load": os.getloadavg()[0],
        "memory": _memory(),
        "disks": _disks(folder),
        "power": _power(),
        "jobs": _jobs(),
    }


def clock() -> float:
    return time.time()


def allocate(most: int, seconds: float = 20.0) -> dict[str, Any]:
    """Takes memory and writes to all of it, in a process of its own: the system may kill that for it."""
    available = _memory().get("available") or most
    size = max(1 << 20, min(most, available // 4))
    begin = time.monotonic()
    try:
        done = subprocess.run(
            own_code(_ALLOCATE, str(size)), stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return {"bytes": size, "error": f"it was not done after {seconds:g} s"}
    words = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
    return {"bytes": size, "error": words[0] if done.returncode else "", "seconds": time.monotonic() - begin}


_ALLOCATE = """
import mmap, sys
size = int(sys.argv[1])
memory = mmap.mmap(-1, size)
for at in range(0, size, mmap.PAGESIZE):
    memory[at] = 1
"""


def output_of(*command: str, seconds: float = _SECONDS) -> str:
    """What a command prints; nothing where there is none, or where it fails or hangs: then it has told us nothing."""
    # ssh gives a shell that is not for logging in a PATH without those of the administrator.
    environment = os.environ | {"PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, env=environment, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace")


def power_settings(text: str) -> dict[str, int]:
    """``pmset -g``: {"sleep": 1, "SleepDisabled": 0}, minutes for times."""
    return {name: int(value) for name, value in re.findall(r"^\s*(\w+)\s+(\d+)\b", text, re.MULTILINE)}


def vm_statistics(text: str) -> int | None:
    """``vm_stat``: bytes that can be had without paging anything out."""
    page = re.search(r"page size of (\d+) bytes", text)
    pages = dict(re.findall(r"^Pages ([\w -]+):\s+(\d+)\.", text, re.MULTILINE))
    kinds = [int(pages[kind]) for kind in ("free", "inactive", "speculative", "purgeable") if kind in pages]
    return int(page[1]) * sum(kinds) if page and kinds else None


def kernel_objects(text: str) -> int | None:
    """``ioclasscount NAME``: ``NAME = 3``."""
    found = re.search(r"=\s*(\d+)\s*$", text.strip())
    return int(found[1]) if found else None


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version(), "mlxdist": __version__}
    for name, package in (("MLX", "mlx"), ("mlx_lm", "mlx-lm"), ("NumPy", "numpy")):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(package)
    return found | {"system": _system(), "processor": platform.machine()}


def _system() -> str:
    if sys.platform == "darwin":
        build = output_of("sw_vers", "-buildVersion").strip()
        return f"macOS {system_release()} ({build})"
    try:
        name = platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    except OSError:
        name = platform.system()
    return f"{name}, {platform.release()}"


def _try_import() -> dict[str, Any]:
    """In a process of its own, as ranks do it."""
    try:
        done = subprocess.run(
            own_code(_IMPORT),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_IMPORT_SECONDS,
            env={name: value for name, value in os.environ.items() if name not in OF_JOB},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"it had not ended after {_IMPORT_SECONDS:g} s"}
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return {"error": words[0] if words else f"it ended with status {done.returncode}"}
    return {"error": "", "seconds": float(done.stdout)}


def _variables() -> dict[str, str]:
    """Those of this shell that the ranks will have, as far as they change what ranks do."""
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


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> dict[str, int | None]:
    """Bytes; None where the system does not say."""
    if sys.platform == "darwin":
        total, wired = (output_of("sysctl", "-n", name).strip() for name in ("hw.memsize", "iogpu.wired_limit_mb"))
        return {
            "total": int(total) if total.isdecimal() else None,
            "available": vm_statistics(output_of("vm_stat")),
            "wired_limit": int(wired) << 20 if wired.isdecimal() else None,
        }
    with contextlib.suppress(OSError):
        found = dict(re.findall(r"^(\w+):\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE))
        total, available = (int(found[name]) << 10 if name in found else None for name in ("MemTotal", "MemAvailable"))
        limit = _container_limit()
        if limit is not None and total is not None and available is not None:
            total, available = min(total, limit), min(available, limit)
        return {"total": total, "available": available}
    return {"total": None, "available": None}


def _container_limit() -> int | None:
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _disks(folder: str) -> list[dict[str, Any]]:
    """The places where a job writes. Each file system once."""
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError:  # nothing can be written anywhere, which is what has to be found
        temporary = os.environ.get("TMPDIR") or "/tmp"
    places = {"temporary files": temporary, "the job's folder": folder}
    with contextlib.suppress(ResourceError):
        places["records of jobs"] = str(runtime_folder())
    found: dict[int, dict[str, Any]] = {}
    for use, path in places.items():
        with contextlib.suppress(OSError):
            usage = shutil.disk_usage(path)
            found.setdefault(os.stat(path).st_dev, {"use": use, "path": path, "total": usage.total, "free": usage.free})
    return list(found.values())


def _power() -> dict[str, Any]:
    if sys.platform == "darwin":
        return {"pmset": power_settings(output_of("pmset", "-g"))}
    if not os.path.isdir("/run/systemd/system"):
        return {}
    masked = output_of("systemctl", "is-enabled", "sleep.target", "suspend.target").split()
    action = re.search(r"IdleAction=(\w+)", output_of("loginctl", "show-session", "--property=IdleAction"))
    return {"systemd": {"masked": masked == ["masked"] * 2, "idle": action[1] if action else ""}}


def _jobs() -> dict[str, Any]:
    """Those of this user: running, left by a killed launcher; processes of jobs that are over; kernel objects."""
    found: dict[str, Any] = {"running": [], "left": [], "orphans": None, "domains": None, "shared_memory": []}
    with contextlib.suppress(ResourceError):
        running = list_jobs()
        names = {job.name for job in running}
        ours = os.environ.get("MLXDIST_JOB", "").partition(".")[0]
        found["running"] = [{"job": j.name, "ranks": len(j.pids), "command": j.command[:20]} for j in running]
        found["left"] = [name for name in _unlocked(runtime_folder()) if name not in names]
        found["orphans"] = _orphans({*names, ours})
    if sys.platform == "darwin":
        found["domains"] = kernel_objects(output_of("ioclasscount", PROTECTION_DOMAINS))
    elif os.path.isdir("/dev/shm"):
        mine = (path for path in Path("/dev/shm").glob("mlxdist*") if _owner(path) == os.getuid())
        found["shared_memory"] = sorted(map(str, mine))
    return found


def _unlocked(runtime: Path) -> list[str]:
    left = []
    for name in sorted(os.listdir(runtime)):
        if not name.startswith(".") and read_record(runtime / name) is not None:
            lock = try_lock(runtime / name, fcntl.LOCK_SH)
            if lock is not None:
                os.close(lock)
                left.append(name)
    return left


def _orphans(jobs: set[str]) -> list[int] | None:
    """Processes of this user that were ranks of a job, have lost their parent, and are of no job that runs. None where
    this is not looked for."""
    if sys.platform != "linux":
        return None
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (folder / "stat").read_bytes().rpartition(b")")[2].split()[1]
            if folder.stat().st_uid != os.getuid() or parent != b"1":
                continue
            name = re.search(rb"(?:^|\0)MLXDIST_JOB=([\w.-]+)", (folder / "environ").read_bytes())
            if name and name[1].decode().partition(".")[0] not in jobs:
                found.append(int(folder.name))
    return sorted(found)


def _owner(path: Path) -> int | None:
    try:
        return path.stat().st_uid
    except OSError:
        return None
