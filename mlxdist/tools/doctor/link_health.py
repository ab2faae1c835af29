"""Counters of errors, the kernel's log and heat of a host: `mlxdist doctor` reads them before and after a soak.

This module runs on that host.
"""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

from mlxdist.base.validation import read_bounded
from mlxdist.cluster.facts.collect import output_of
from mlxdist.cluster.ssh.ssh import run
from mlxdist.runtime.diagnostics.power import read_power

__all__ = ["error_counters", "interface_errors", "matching_lines", "read", "temperature"]

_SYSTEM = Path("/sys")
_MAX_COUNTERS = 4096
_MAX_LINES, _MAX_LINE = 500, 300
# Where counters are, and which of them count errors: others count traffic.
_COUNTERS = (
    ("class/infiniband/*/ports/*/counters/*", r"err|discard|dropped|downed|recovery|integrity|overrun"),
    (
        "class/infiniband/*/ports/*/hw_counters/*",
        r"err|discard|dropped|out_of_|retry|retrans|timeout|icrc|nak|duplicate",
    ),
    ("class/net/*/statistics/*", r"^(rx|tx)_errors$|^rx_crc_errors$"),
    ("devices/system/cpu/cpu*/thermal_throttle/*", r"^(core|package)_throttle_count$"),
)
_LOG = (
    r"rdma|infiniband|thunderbolt|\bmlx[45]|\broce|\bib_|\brxe|link (is )?(up|down)|link.{0,20}(error|reset|retrain)|"
    + (r"pcie bus error|aer:|machine check|hardware error|thermal|throttl|temperature above")
)
_MAC_LOG = " OR ".join(
    f'eventMessage CONTAINS[c] "{word}"' for word in ("thunderbolt", "rdma", "link down", "link up", "thermal")
)
_LOG_SECONDS = 60.0  # `log show` of an hour takes some


def read(seconds: float = 1.0) -> dict[str, Any]:
    """The state of this host now. ``seconds``: how far back a Mac's log is read; Linux shows all that it holds."""
    lines, refusal = _mac_log(seconds) if sys.platform == "darwin" else _linux_log()
    counters = error_counters(_SYSTEM)
    if sys.platform == "darwin":
        counters = interface_errors(output_of("netstat", "-i"))
    pmset = shutil.which("pmset")
    power = read_power(pmset) if pmset else None
    return {
        "rdma": sorted({name.split("/")[0] for name in counters if "/" in name}),
        "counters": counters,
        "log": lines,
        "log_refusal": refusal,
        "speed": power and power.speed,
        "temperature": temperature(_SYSTEM),
    }


def error_counters(system: Path) -> dict[str, int]:
    """The counters of errors of RDMA ports, network interfaces and processors, by name: "mlx5_0/1 symbol_error".

    Args:
        system: where sysfs is mounted.
    """
    found: dict[str, int] = {}
    for pattern, words in _COUNTERS:
        for path in sorted(system.glob(pattern))[:_MAX_COUNTERS]:
            if re.search(words, path.name) and not _is_virtual(path):
                try:
                    found[_name(path)] = int(read_bounded(path, 64))
                except ValueError:  # it is not permitted, or a driver does not have this one
                    continue
    return found


def _is_virtual(path: Path) -> bool:
    """Whether this is a counter of an interface without a device: those of containers come and go."""
    return "net" in path.parts and not (path.parent.parent / "device").exists()


def _name(path: Path) -> str:
    parts = path.parts
    if "ports" in parts:
        return f"{parts[parts.index('ports') - 1]}/{parts[parts.index('ports') + 1]} {path.name}"
    return f"{parts[-3]} {path.name}"


def interface_errors(text: str) -> dict[str, int]:
    """The errors of a Mac's Ethernet and Thunderbolt interfaces in the output of `netstat -i`: "en2 Ierrs"."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        words = line.split()
        # Name Mtu Network [Address] Ipkts Ierrs Opkts Oerrs Coll: the row of the link itself.
        if (
            len(words) >= 8
            and re.fullmatch(r"en\d+", words[0])
            and words[2].startswith("<Link#")
            and all(word.isdecimal() for word in words[-5:])
        ):
            found |= {f"{words[0]} Ierrs": int(words[-4]), f"{words[0]} Oerrs": int(words[-2])}
    return found


def temperature(system: Path) -> float | None:
    """The highest temperature of the thermal zones of Linux, in degrees Celsius; None where it shows none."""
    found = []
    for path in system.glob("class/thermal/thermal_zone*/temp"):
        try:
            found.append(int(read_bounded(path, 64)) / 1000)
        except ValueError:  # the sensor is off
            continue
    return max(found, default=None)


def matching_lines(text: str) -> list[str]:
    """The last lines of a log that are about links, RDMA, Thunderbolt or heat, bounded."""
    lines = [line.strip()[:_MAX_LINE] for line in text.splitlines() if re.search(_LOG, line, re.IGNORECASE)]
    return lines[-_MAX_LINES:]


def _linux_log() -> tuple[list[str], str]:
    done = run("localhost", ["dmesg"], seconds=_LOG_SECONDS)
    return (matching_lines(done.output), "") if done.status == 0 else ([], f"dmesg: {done.failure}")


def _mac_log(seconds: float) -> tuple[list[str], str]:
    words = ["log", "show", "--style", "compact", "--last", f"{max(1, int(seconds) + 1)}s", "--predicate"]
    done = run("localhost", [*words, f"processID == 0 AND ({_MAC_LOG})"], seconds=_LOG_SECONDS)
    return (matching_lines(done.output), "") if done.status == 0 else ([], f"log show: {done.failure}")
