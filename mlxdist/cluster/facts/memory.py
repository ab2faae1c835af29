"""Measures memory: of a process, and what is free, for a program that ends by itself before the system kills it."""

import contextlib
import os
import re
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .system import Memory, linux_memory, vm_statistics

__all__ = ["ProcessMemory", "cgroup_memory", "linux_process_memory", "memory_now", "process_memory", "total_memory"]

_CGROUPS = Path("/sys/fs/cgroup")
# For cgroup v2 and v1: the controller, the files of limit and usage, and the line of memory.stat with the part of the
# usage that the kernel reclaims first.
_VERSIONS = (
    ("", "memory.max", "memory.current", r"^inactive_file (\d+)$"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", r"^total_inactive_file (\d+)$"),
)


def memory_now() -> Memory:
    """Memory of this machine, or of this process's container or SLURM job where that has less.

    Reads a few files on Linux (0.1 ms), and starts ``vm_stat`` on a Mac (some ms).
    """
    if sys.platform == "darwin":
        from .collect import output_of  # only here: `mlxdist.init` is fast without the rest of that

        return Memory(total_memory(), vm_statistics(output_of("vm_stat")))
    host = linux_memory(_text(Path("/proc/meminfo")), "")
    group = cgroup_memory(_CGROUPS, _text(Path("/proc/self/cgroup")))
    return Memory(_least(host.total, group.total), _least(host.available, group.available))


def total_memory() -> int | None:
    """The total of `memory_now`, which takes no command on a Mac either."""
    if sys.platform == "darwin":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return memory_now().total


@dataclass(frozen=True)
class ProcessMemory:
    """Memory of a process in bytes; None where the system does not report it.

    ``private``: what it shares with no other process and the system cannot drop: anonymous memory on Linux, the
    physical footprint on a Mac, which has the buffers of Metal and what is compressed. ``resident`` also has the pages
    of files and of shared memory, which several processes count alike.
    """

    resident: int | None = None
    private: int | None = None


def process_memory() -> ProcessMemory:
    """The memory of this process: a file is read on Linux, a function of the system called on a Mac (some us)."""
    if sys.platform == "darwin":
        return _macos_process_memory()
    return linux_process_memory(_text(Path("/proc/self/status")))


def linux_process_memory(status: str) -> ProcessMemory:
    """The memory of a process by its /proc/PID/status."""
    found = {name: int(size) << 10 for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", status, re.MULTILINE)}
    return ProcessMemory(found.get("VmRSS"), found.get("RssAnon"))


# <sys/resource.h>: RUSAGE_INFO_V0, and in its struct, after an UUID, the places of ri_resident_size and
# ri_phys_footprint among ten numbers.
_RUSAGE_INFO, _RUSAGE, _RESIDENT, _FOOTPRINT = 0, struct.Struct("16x10Q"), 6, 7


def _macos_process_memory() -> ProcessMemory:
    import ctypes  # only here: the launcher starts without

    usage = ctypes.create_string_buffer(_RUSAGE.size)
    if ctypes.CDLL(None).proc_pid_rusage(os.getpid(), _RUSAGE_INFO, usage):
        return ProcessMemory()
    numbers = _RUSAGE.unpack(usage.raw)
    return ProcessMemory(numbers[_RESIDENT], numbers[_FOOTPRINT])


def cgroup_memory(mounted: Path, own: str) -> Memory:
    """The strictest limit of a process's control groups, and the memory that is left in the fullest of them.

    Args:
        mounted: where the control groups are mounted.
        own: ``/proc/PID/cgroup``, with the group of the process. The groups around it have limits too: SLURM sets them
            for the job, systemd for a slice.
    """
    total = available = None
    for directory, (_, limit, used, reclaimable) in _groups(mounted, own):
        text = _text(directory / limit)
        if text.isdecimal():  # not "max"
            # A group's usage counts the page cache, which the kernel frees before it ends a process.
            cache = re.search(reclaimable, _text(directory / "memory.stat"), re.MULTILINE)
            left = int(text) - int(_text(directory / used) or 0) + (int(cache[1]) if cache else 0)
            total, available = _least(total, int(text)), _least(available, max(0, left))
    return Memory(total, available)


def _groups(mounted: Path, own: str) -> Iterator[tuple[Path, tuple[str, str, str, str]]]:
    """Yields control groups from the process's outwards. The path may be its host's, and missing in a container."""
    for version in _VERSIONS:
        controller = version[0]
        found = re.search(rf"^\d+:{controller}:(/.*)$", own, re.MULTILINE)
        if found is not None:
            path = Path(found[1].lstrip("/"))
            for inner in (path, *path.parents):
                yield mounted / controller / inner, version


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):  # there is no such thing here
        return path.read_text().strip()
    return ""


def _least(a: int | None, b: int | None) -> int | None:
    return min((number for number in (a, b) if number is not None), default=None)
