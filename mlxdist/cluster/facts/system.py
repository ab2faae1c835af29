"""Version, memory and limits of a system, from what its commands and files print."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "Memory",
    "dicts",
    "linux_memory",
    "lockable_memory",
    "macos_memory",
    "macos_version",
    "rdma_ctl_state",
    "settings",
    "vm_statistics",
]

_CAP_IPC_LOCK = 14


@dataclass(frozen=True)
class Memory:
    """Memory in bytes; None where the system does not report it. ``wired_limit``: the limit for a Mac's GPU."""

    total: int | None = None
    available: int | None = None
    wired_limit: int | None = None


def settings(text: str) -> dict[str, str]:
    """Lines of ``name: value``, as `sysctl NAME` and `sw_vers` print them."""
    return dict(re.findall(r"^([\w.]+):\s*(.*?)\s*$", text, re.MULTILINE))


def dicts(value: Any) -> list[dict[str, Any]]:
    """The objects in a JSON list; an empty list if ``value`` is no list."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def macos_version(release: str) -> tuple[int, int] | None:
    """The version of macOS by the kernel's ``uname -r``, which every program sees alike: (26, 3) for "25.3.0".

    ``platform.mac_ver()`` depends on the program: a Python linked with an SDK before 26 may get 16.3 there. Darwin's
    number was macOS's plus 9 up to macOS 15, minus 1 in macOS 26, and is the same since macOS 27; minor numbers agree.
    """
    found = re.match(r"(\d+)\.(\d+)\b", release)
    if not found:
        return None
    major, minor = map(int, found.groups())
    return (major - 9 if major < 25 else max(major, 26)), minor


def macos_memory(statistics: str, sysctl: Mapping[str, str]) -> Memory:
    total, wired = sysctl.get("hw.memsize", ""), sysctl.get("iogpu.wired_limit_mb", "")
    return Memory(
        int(total) if total.isdecimal() else None,
        vm_statistics(statistics),
        int(wired) << 20 if wired.isdecimal() else None,
    )


def vm_statistics(text: str) -> int | None:
    """The bytes in the output of `vm_stat` that are available without paging anything out."""
    page = re.search(r"page size of (\d+) bytes", text)
    pages = dict(re.findall(r"^Pages ([\w -]+):\s+(\d+)\.", text, re.MULTILINE))
    kinds = [int(pages[kind]) for kind in ("free", "inactive", "speculative", "purgeable") if kind in pages]
    return int(page[1]) * sum(kinds) if page and kinds else None


def linux_memory(meminfo: str, limit: str) -> Memory:
    """The memory by /proc/meminfo, reduced to ``limit``, the container's limit in /sys/fs/cgroup/memory.max."""
    found = {name: int(size) << 10 for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", meminfo, re.MULTILINE)}
    sizes = (found.get("MemTotal"), found.get("MemAvailable"))
    return Memory(*(min(size, int(limit)) if size is not None and limit.isdecimal() else size for size in sizes))


def lockable_memory(limit: str, capabilities: str) -> int | None:
    """Bytes by `ulimit -l`; None without a limit, or where it does not apply to this user (/proc/self/status)."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", capabilities, re.MULTILINE)
    is_exempt = bool(found and int(found[1], 16) >> _CAP_IPC_LOCK & 1)
    return int(limit) << 10 if limit.isdecimal() and not is_exempt else None


def rdma_ctl_state(text: str) -> str | None:
    """The state that `rdma_ctl status` prints."""
    found = re.search(r"\b(enabled|disabled)\b", text, re.IGNORECASE)
    return found[1].lower() if found else None
