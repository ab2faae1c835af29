"""What this machine says about itself, as far as RDMA depends on it. Each reader asks one thing, and waits for no one.

The readers of a macOS command are in two halves, so that its output can be read anywhere; those that `mlxdist config`
needs, too, are in mlxdist/config.
"""

import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mlxdist.base.errors import InvalidArgument

from .interfaces import bridge_members, hardware_ports
from .thunderbolt import read_receptacles

__all__ = [
    "Facts",
    "ThunderboltPort",
    "bridge_members",
    "hardware_ports",
    "macos_version",
    "read_facts",
    "rdma_ctl_state",
    "system_release",
    "thunderbolt_ports",
]

_SECONDS = 10.0  # of a command of the system; system_profiler needs some
_CAP_IPC_LOCK = 14
_CLASS = Path("/sys/class/infiniband")
_NODES = Path("/dev/infiniband")


@dataclass(frozen=True)
class ThunderboltPort:
    """A receptacle of this machine. Where nothing is plugged in, ``speed`` is what it can do itself."""

    receptacle: str
    speed: int | None  # Gbit/s
    connected: bool
    interface: str = ""


@dataclass(frozen=True)
class Facts:
    """``None``: not known here, because the system has no such thing, or did not say."""

    system: str = "Linux"  # or "Darwin"
    machine: str = ""
    macos: tuple[int, ...] | None = None
    rdma_ctl: str | None = None  # "enabled", "disabled"
    thunderbolt: tuple[ThunderboltPort, ...] = ()
    bridged: frozenset[str] = field(default_factory=frozenset)  # interfaces that are members of bridge0
    kernel_rdma: bool | None = None
    refused: tuple[str, ...] = ()  # files of devices that this user may not open
    memlock: int | None = None  # bytes that this process may lock, where there is a limit


def read_facts() -> Facts:
    """Those of this machine."""
    if sys.platform == "darwin":
        names = hardware_ports(_run("networksetup", "-listallhardwareports"))
        return Facts(
            system="Darwin",
            machine=platform.machine(),
            macos=macos_version(platform.release()),
            rdma_ctl=rdma_ctl_state(_run("rdma_ctl", "status")),
            thunderbolt=thunderbolt_ports(_run("system_profiler", "SPThunderboltDataType", "-json"), names),
            bridged=bridge_members(_run("ifconfig", "bridge0")),
        )
    return Facts(
        system=platform.system(),
        machine=platform.machine(),
        kernel_rdma=_CLASS.is_dir(),
        refused=_refused(),
        memlock=_memlock(),
    )


def macos_version(release: str) -> tuple[int, int] | None:
    """Of the kernel's ``platform.release()``, which is the same for every program: (26, 3) for "25.3.0".

    ``platform.mac_ver()`` is not: a Python that was linked with an SDK before 26 may read 16.3 there. Darwin's number
    was that of macOS and 9 up to macOS 15, one less in macOS 26, and is the same since macOS 27; minor numbers agree.
    """
    found = re.match(r"(\d+)\.(\d+)\b", release)
    if not found:
        return None
    major, minor = map(int, found.groups())
    return (major - 9 if major < 25 else max(major, 26)), minor


def system_release() -> str:
    """The version of macOS, such as 26.3, or of another system's kernel."""
    version = macos_version(platform.release()) if sys.platform == "darwin" else None
    return ".".join(map(str, version)) if version else platform.release()


def rdma_ctl_state(text: str) -> str | None:
    """``rdma_ctl status``."""
    found = re.search(r"\b(enabled|disabled)\b", text, re.IGNORECASE)
    return found[1].lower() if found else None


def thunderbolt_ports(text: str, interfaces: Mapping[str, str]) -> tuple[ThunderboltPort, ...]:
    """``system_profiler SPThunderboltDataType -json``; nothing where it has another shape than expected."""
    try:
        found = read_receptacles(text)
    except InvalidArgument:
        return ()
    return tuple(
        ThunderboltPort(port.number, port.speed, port.connected, interfaces.get(f"Thunderbolt {port.number}", ""))
        for port in found
    )


def _run(*command: str) -> str:
    """What a command prints; nothing where there is none, or where it fails or hangs: then it has told us nothing."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace")


def _refused() -> tuple[str, ...]:
    nodes = sorted(_NODES.glob("uverbs*")) if _NODES.is_dir() else ()
    return tuple(str(node) for node in nodes if not os.access(node, os.R_OK | os.W_OK))


def _memlock() -> int | None:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY or _may_lock(Path("/proc/self/status")) else limit


def _may_lock(status: Path) -> bool:
    """Whether the limit does not hold for this process."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status.read_text() if status.exists() else "", re.MULTILINE)
    return bool(found and int(found[1], 16) >> _CAP_IPC_LOCK & 1)
