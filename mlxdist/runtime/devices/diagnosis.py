"""Findings from facts: what keeps a machine or a device from RDMA, and what to do about it."""

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

from mlxdist.cluster.facts.collect import HostFacts
from mlxdist.cluster.facts.thunderbolt import THUNDERBOLT_5, Receptacle

from .device import Device, port_remedy

__all__ = ["Finding", "Verdict", "diagnose", "diagnose_device", "diagnose_host"]

_MACOS = (26, 2)
_MEMLOCK = 64 << 20  # slabs of a few dozen peers
_ENOSYS = re.compile(r"errno:? 38\b", re.IGNORECASE)


class Verdict(enum.StrEnum):
    OK = "ok"
    NOT_APPLE_SILICON = "not Apple silicon"
    MACOS_TOO_OLD = "macOS too old"
    RDMA_CTL_OFF = "rdma_ctl off"
    THUNDERBOLT_4 = "Thunderbolt 4"
    SLOW_CABLE = "cable below Thunderbolt 5"
    PORT_DOWN = "port down"
    BRIDGED = "bridged"
    NO_IPV4 = "no IPv4 GID"
    NO_KERNEL_RDMA = "no kernel RDMA"
    NO_LIBRARY = "library fails"
    NO_DEVICE = "no device"
    MEMLOCK = "memlock limit too low"
    NOT_PERMITTED = "not permitted"
    NOT_OPENED = "cannot be opened"


@dataclass(frozen=True)
class Finding:
    """``subject``: a device, or "" for the machine. ``remedy`` is empty where nothing is wrong."""

    verdict: Verdict
    subject: str
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}" if self.remedy else self.what


def diagnose(facts: HostFacts, devices: Sequence[Device], error: str = "") -> list[Finding]:
    """The findings about the machine and about each device."""
    of_devices = [finding for device in devices for finding in diagnose_device(device, facts)]
    return [*diagnose_host(facts, devices, error), *of_devices]


def diagnose_host(facts: HostFacts, devices: Sequence[Device], error: str = "") -> list[Finding]:
    """The findings about the machine, whatever its devices report. ``error``: why they could not be listed."""
    found = []
    if not facts.is_mac:
        found = _diagnose_linux(facts, devices)
    elif not devices or any(device.is_thunderbolt for device in devices):  # else they are of another maker's driver
        found = _diagnose_mac(facts)
    known = {finding.verdict for finding in found}
    # On a Mac the library is missing, or lists nothing, for one of the reasons above; Linux has it without a device.
    explained = bool(known) if facts.is_mac else Verdict.NO_KERNEL_RDMA in known and bool(_ENOSYS.search(error))
    if error and not explained:
        found.append(Finding(Verdict.NO_LIBRARY, "", error))
    if not devices and not error and not known:
        remedy = "look whether the card is there (`lspci`) and its driver loaded (`rdma link`)"
        if facts.is_mac:
            remedy = "restart the Mac: macOS makes one for every Thunderbolt port (`ibv_devices`)"
        found.append(Finding(Verdict.NO_DEVICE, "", "there is no RDMA device", remedy))
    return found


def diagnose_device(device: Device, facts: HostFacts = HostFacts()) -> list[Finding]:
    """The findings about a device, the first cause first; that it is ready where nothing is wrong. Never empty."""
    found = _diagnose_port(device, facts) if not device.error else [_diagnose_error(device)]
    return found or [Finding(Verdict.OK, device.name, f"{device.name} is ready")]


def _diagnose_mac(facts: HostFacts) -> list[Finding]:
    if facts.architecture != "arm64":
        what = f"this is no Apple silicon, or Python runs as {facts.architecture or 'another processor'}"
        remedy = "RDMA over Thunderbolt needs a Mac with Thunderbolt 5 and a Python for arm64"
        return [Finding(Verdict.NOT_APPLE_SILICON, "", what, remedy)]
    found = []
    if facts.macos is not None and facts.macos < _MACOS:
        what = f"macOS {'.'.join(map(str, facts.macos))} has no RDMA"
        found.append(Finding(Verdict.MACOS_TOO_OLD, "", what, "update to macOS 26.2 or newer"))
    if _is_thunderbolt_4(facts.receptacles):
        what = "the Thunderbolt ports of this Mac end at 40 Gb/s: it has no Thunderbolt 5, though macOS lists devices"
        remedy = "use a Mac with Thunderbolt 5; ranks reach this one by TCP"
        found.append(Finding(Verdict.THUNDERBOLT_4, "", what, remedy))
    if facts.rdma_ctl == "disabled":
        remedy = "start the Mac in recovery, run `rdma_ctl enable` in Terminal there, restart"
        found.append(Finding(Verdict.RDMA_CTL_OFF, "", "RDMA is switched off (`rdma_ctl status`: disabled)", remedy))
    return found


def _is_thunderbolt_4(ports: Sequence[Receptacle]) -> bool:
    """Whether a Mac has no Thunderbolt 5. An empty port reports its own speed, one in use that of the slowest part."""
    speeds = [port.speed for port in ports if port.speed is not None]
    empty = [port for port in ports if port.speed is not None and not port.connected]
    return bool(speeds) and max(speeds) < THUNDERBOLT_5 and bool(empty)


def _diagnose_linux(facts: HostFacts, devices: Sequence[Device]) -> list[Finding]:
    found = []
    if facts.kernel_rdma is False and not devices:  # libraries for tests have some all the same
        what = "the kernel has no RDMA device (/sys/class/infiniband is missing)"
        remedy = "load the card's driver; to try RDMA without a card: `modprobe rdma_rxe`, then "
        remedy += "`rdma link add rxe0 type rxe netdev eth0`"
        found.append(Finding(Verdict.NO_KERNEL_RDMA, "", what, remedy))
    if facts.denied:
        what = f"this user may not open {', '.join(facts.denied)}"
        remedy = "make it readable and writable for the user; into a container: `--device=/dev/infiniband`"
        found.append(Finding(Verdict.NOT_PERMITTED, "", what, remedy))
    if devices and facts.memlock is not None and facts.memlock < _MEMLOCK:
        what = f"this process may lock {facts.memlock // 1024} KiB of memory, and RDMA needs to lock its buffers"
        remedy = (
            "raise the limit: `ulimit -l unlimited`, or `* - memlock unlimited` in /etc/security/limits.conf; of a "
        )
        remedy += "container: `--ulimit memlock=-1`"
        found.append(Finding(Verdict.MEMLOCK, "", what, remedy))
    return found


def _diagnose_error(device: Device) -> Finding:
    if re.search(r"\(errno (1|13)\)", device.error):
        what = f"this user may not open {device.name}: {device.error}"
        return Finding(Verdict.NOT_PERMITTED, device.name, what, "give the user access to /dev/infiniband")
    what = f"{device.name} cannot be opened: {device.error}"
    return Finding(Verdict.NOT_OPENED, device.name, what, "look into the kernel's log, restart the machine")


def _diagnose_port(device: Device, facts: HostFacts) -> list[Finding]:
    found = []
    interface = device.interfaces[0] if device.interfaces else device.name.removeprefix("rdma_")
    for port in facts.receptacles:
        slow = port.connected and port.speed is not None and port.speed < THUNDERBOLT_5
        if slow and port.interface == interface and not _is_thunderbolt_4(facts.receptacles):
            what = f"the cable in Thunderbolt {port.number} ({device.name}) runs at {port.speed} Gb/s"
            remedy = "use a cable for Thunderbolt 5, to a Mac with Thunderbolt 5"
            found.append(Finding(Verdict.SLOW_CABLE, device.name, what, remedy))
    if not device.is_active:
        remedy = "plug in the cable" if device.state == "DOWN" else "wait for the port to come up"
        if device.link_layer == "InfiniBand" and device.state != "DOWN":
            remedy = "start a subnet manager (opensm) on one of the hosts"
        elif device.is_thunderbolt:
            remedy += "; RDMA must be enabled on the Mac at its other end, too"
        found.append(Finding(Verdict.PORT_DOWN, device.name, f"{device.name} is {device.state}", remedy))
    if not any(gid.ipv4 for gid in device.gids) and device.link_layer != "InfiniBand" and device.is_active:
        found.append(_without_ipv4(device, interface, facts))
    return found


def _without_ipv4(device: Device, interface: str, facts: HostFacts) -> Finding:
    remedy = (
        f"give its interface one, such as `sudo ip address add 10.0.1.1/24 dev {interface}`, or set MLXDIST_DEVICE_MAP"
    )
    if device.is_thunderbolt:
        remedy = f"{port_remedy()}; by hand `sudo ifconfig {interface} inet 10.0.1.1/24`"
    elif facts.is_mac:
        remedy = "set MLXDIST_DEVICE_MAP"  # the driver of another maker may make no interface
    if facts.bridge_of(interface) == "bridge0":
        what = (
            f"{interface} of {device.name} is a member of bridge0 (Thunderbolt Bridge), and has no IPv4 address itself"
        )
        remedy += f", and if connecting then fails with errno 22 `sudo ifconfig bridge0 deletem {interface}`"
        return Finding(Verdict.BRIDGED, device.name, what, remedy)
    what = f"{device.name} has no IPv4 address, so nothing says which device it is joined to"
    return Finding(Verdict.NO_IPV4, device.name, what, remedy)
