"""An identity of a host: names are not unique, for containers and Macs may share one."""

import os
import sys
from pathlib import Path

__all__ = ["boot_identity", "host_identity"]

_MAX_UUID = 64


def host_identity() -> str:
    """A text that is equal for processes that share a kernel, its host name and its network namespace."""
    namespace = Path("/proc/self/ns/net")  # another network namespace has other interfaces
    network = os.readlink(namespace) if namespace.exists() else ""
    return f"{os.uname().nodename} {boot_identity()} {network}"


def boot_identity() -> str:
    """A text that all processes of one machine share from one boot to the next; "" where the system has none."""
    if sys.platform == "darwin":
        return _boot_session()
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else ""


def _boot_session() -> str:
    """The kernel's identifier of this boot, a text that macOS keeps as a sysctl; see sysctlbyname(3)."""
    import ctypes  # only here: the launcher starts without

    text = ctypes.create_string_buffer(_MAX_UUID)
    size = ctypes.c_size_t(_MAX_UUID)
    failed = ctypes.CDLL(None).sysctlbyname(b"kern.bootsessionuuid", text, ctypes.byref(size), None, ctypes.c_size_t(0))
    return "" if failed else text.value.decode(errors="replace")
