"""Collects facts about a host, by a shell script and the parsers of its output.

The script runs on this machine or over one ssh connection. It needs nothing installed there: hosts are usually
connected to each other before mlxdist is installed on them.
"""

import functools
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlxdist.base.errors import InvalidArgument

from ..ssh.ssh import CommandResult, SshConfig, agent_advice, run, run_everywhere
from . import interfaces, system
from .interfaces import Interface, Service
from .power import power_settings, speed_limit
from .system import Memory
from .thunderbolt import Receptacle, read_receptacles

__all__ = ["PRINTED", "HostFacts", "collect_here", "collect_hosts", "output_of", "read_facts"]

_SECONDS = 60.0  # system_profiler takes some, and networksetup reads each service
_COMMAND_SECONDS = 10.0
_MAX_BYTES = 16 << 20
# Sections of the output for a bug report. Names of network services, such as those of a VPN, are private.
PRINTED = ("system", "rdma_ctl", "devices", "ports", "thunderbolt", "interfaces")

# The PATH that ssh sets may lack /sbin and /usr/sbin. The shell reads the script from its standard input, so no command
# may read that; and the script is one function, so that half of it, after a lost connection, runs nothing. "setup" is
# for `mlxdist config` alone: hosts log a denied sudo, and each network service takes time.
_SCRIPT = r"""main() {
PATH=$PATH:/usr/sbin:/sbin:/usr/bin:/bin LC_ALL=C
export PATH LC_ALL
say() { printf '\n@mlxdist:%s\n' "$1"; shift; "$@" </dev/null 2>/dev/null; }
say system uname -s
say architecture uname -m
say release uname -r
say user id -u
if test "$1" = setup; then say sudo sh -c 'sudo -n true && echo yes'; fi
case "$(uname -s)" in
Darwin)
  say version sw_vers
  say sysctl sh -c 'for i in hw.memsize hw.model hw.ncpu machdep.cpu.brand_string vm.loadavg iogpu.wired_limit_mb; do
    sysctl "$i"; done'
  say memory vm_stat
  say power pmset -g
  say heat pmset -g therm
  say ports networksetup -listallhardwareports
  if test "$1" = setup; then
    say services networksetup -listnetworkserviceorder
    networksetup -listallnetworkservices </dev/null 2>/dev/null | sed -e 1d -e 's/^[*]//' | while IFS= read -r name; do
      say "service $name" networksetup -getinfo "$name"
    done
  fi
  say interfaces ifconfig -a
  say default route -n get default
  say rdma_ctl rdma_ctl status
  say thunderbolt system_profiler SPThunderboltDataType -json
  say devices ibv_devices
  ;;
*)
  say version cat /etc/os-release
  say cores env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc
  say load cat /proc/loadavg
  say chip grep -m 1 'model name' /proc/cpuinfo
  say memory cat /proc/meminfo
  say memory_limit cat /sys/fs/cgroup/memory.max
  say lockable sh -c 'ulimit -l'
  say capabilities grep CapEff /proc/self/status
  if test -d /run/systemd/system; then
    say sleep systemctl is-enabled sleep.target suspend.target
    say idle loginctl show-session --property=IdleAction
  fi
  if test "$1" = setup; then say nmcli nmcli -t -f RUNNING general; fi
  say interfaces ip -json addr
  say default ip -json route show default
  say wireless sh -c 'for i in /sys/class/net/*/wireless; do test -d "$i" && basename "$(dirname "$i")"; done'
  say kernel_rdma ls -d /sys/class/infiniband
  say denied sh -c 'for i in /dev/infiniband/uverbs*; do test ! -e "$i" || test -r "$i" -a -w "$i" || echo "$i"; done'
  say devices sh -c 'for i in /sys/class/infiniband/*/device/net/*; do test -e "$i" && echo "$i"; done'
  ;;
esac
say end true
}
main "$@"
"""


@dataclass(frozen=True)
class HostFacts:
    """The facts that one host reports. None and empty mean unknown: the system has no such value, or hides it."""

    name: str = "localhost"  # what ssh connects to
    system: str = "Linux"  # "Darwin" or "Linux"
    architecture: str = ""  # of the processor; "arm64"
    macos: tuple[int, ...] | None = None  # its version; (26, 3)
    release: str = ""  # that version, or of another system's kernel
    version: str = ""  # the same for people
    build: str = ""
    # model: the identifier of a Mac's model; chip: the name of the processor
    model: str = ""
    chip: str = ""
    cores: int = 1
    load: float = 0.0  # processes that want a core
    memory: Memory = Memory()
    # Settings of pmset or systemd about sleep; on a Mac also "speed", percent that heat leaves.
    power: Mapping[str, Any] = field(default_factory=dict)
    root: bool = False  # whether commands are run as root there already
    sudo: bool = False  # whether `sudo -n` runs them without a password
    rdma_ctl: str | None = None  # "enabled", "disabled"
    rdma: Mapping[str, str] = field(default_factory=dict)  # the RDMA device of each interface that has one
    kernel_rdma: bool | None = None  # whether Linux has a driver for RDMA
    denied: tuple[str, ...] = ()  # files of RDMA devices that this user may not open
    memlock: int | None = None  # bytes that a process may lock, where there is a limit
    receptacles: tuple[Receptacle, ...] = ()
    ports: Mapping[str, str] = field(default_factory=dict)  # the interface of each hardware port of a Mac
    services: tuple[Service, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    default: str = ""  # the interface that other networks are reached by
    wireless: frozenset[str] = frozenset()  # interfaces of Wi-Fi
    network_manager: bool = False  # whether NetworkManager runs there
    unreadable: str = ""  # what has another form than expected, in words; only cables need it
    printed: Mapping[str, str] = field(default_factory=dict, repr=False)  # what commands printed, by section

    @property
    def is_mac(self) -> bool:
        return self.system == "Darwin"

    def interface(self, name: str) -> Interface | None:
        return next((interface for interface in self.interfaces if interface.name == name), None)

    def bridge_of(self, name: str) -> str:
        return next((bridge.name for bridge in self.interfaces if name in bridge.members), "")


def collect_hosts(names: Sequence[str], ssh_config: SshConfig) -> tuple[list[HostFacts], dict[str, str]]:
    """Returns the facts of the hosts that respond, as `mlxdist config` needs them, and by host why others have none."""
    found, wrong = [], {}
    for result in run_everywhere(names, ["sh", "-s", "setup"], ssh_config, input=_SCRIPT, seconds=_SECONDS):
        try:
            found.append(read_facts(result.name, result.output))
        except InvalidArgument as error:
            wrong[result.name] = _what_is_wrong(result, error)
    return found, wrong


@functools.cache
def collect_here() -> HostFacts:
    """Facts of this machine at the first call, as many as the script prints before its time limit."""
    result = run("localhost", ["/bin/sh", "-s"], input=_SCRIPT, seconds=_SECONDS)
    facts = _facts("localhost", _sections(result.output), platform.system())
    return replace(facts, architecture=platform.machine())  # of this Python, which may be for another processor


def read_facts(name: str, text: str) -> HostFacts:
    """Parses the output of the script on a host. Raises InvalidArgument: the output stops before its end, or the host
    runs neither macOS nor Linux."""
    sections = _sections(text)
    if "end" not in sections:
        raise InvalidArgument(f"{name} printed only a part of its facts")
    system = sections.get("system", "").strip()
    if system not in ("Darwin", "Linux"):
        raise InvalidArgument(
            f"{name} runs {system[:40] or 'an unknown system'}, and only macOS and Linux are known here"
        )
    return _facts(name, sections, system)


def output_of(*command: str, seconds: float = _COMMAND_SECONDS) -> str:
    """The output of a command on this machine; empty where the command is missing, fails or exceeds its time limit."""
    # A shell that ssh starts without a login has a PATH without the administrator's directories.
    words = ["/bin/sh", "-c", 'export PATH=$PATH:/usr/sbin:/sbin LC_ALL=C; exec "$@"', "sh", *command]
    return run("localhost", words, seconds=seconds).output


def _sections(text: str) -> dict[str, str]:
    """The output of each command of the script, by name. Output of shell startup files precedes the first mark."""
    marks = re.split(r"^@mlxdist:(.*)\n", text[:_MAX_BYTES], flags=re.MULTILINE)
    return dict(zip(marks[1::2], marks[2::2]))


class _Output(dict[str, str]):
    """The output of the script's commands, by name; empty for a command that was not run."""

    def __missing__(self, section: str) -> str:
        return ""


def _facts(name: str, sections: Mapping[str, str], kind: str) -> HostFacts:
    output = _Output({section: text.strip() for section, text in sections.items()})
    found: dict[str, Any] = {
        "architecture": output["architecture"],
        "release": output["release"],
        "root": output["user"] == "0",
        "sudo": "yes" in output["sudo"],
        "default": interfaces.default_interface(output["default"]),
        "printed": {section: sections[section] for section in PRINTED if section in sections},
    }
    return HostFacts(name, kind, **found | (_mac if kind == "Darwin" else _linux)(output))


def _mac(output: _Output) -> dict[str, Any]:
    ports = interfaces.hardware_ports(output["ports"])
    sysctl, versions = system.settings(output["sysctl"]), system.settings(output["version"])
    details = {key.removeprefix("service "): text for key, text in output.items() if key.startswith("service ")}
    receptacles: tuple[Receptacle, ...] = ()
    unreadable = ""
    try:
        receptacles = read_receptacles(output["thunderbolt"], ports)
    except InvalidArgument as error:
        unreadable = str(error)
    macos = system.macos_version(output["release"])
    release = ".".join(map(str, macos)) if macos else output["release"]
    cores, load = sysctl.get("hw.ncpu", ""), re.search(r"\d+\.\d+", sysctl.get("vm.loadavg", ""))
    devices = re.findall(r"^\s*(rdma_(\S+))\s", output["devices"], re.MULTILINE)
    return {
        "macos": macos,
        "release": release,
        "version": f"macOS {release} ({versions.get('BuildVersion', '')})",
        "build": versions.get("BuildVersion", ""),
        "model": sysctl.get("hw.model", ""),
        "chip": sysctl.get("machdep.cpu.brand_string", ""),
        "cores": int(cores) if cores.isdecimal() else 1,
        "load": float(load[0]) if load else 0.0,
        "memory": system.macos_memory(output["memory"], sysctl),
        "power": {"pmset": power_settings(output["power"]), "speed": speed_limit(output["heat"])},
        "rdma_ctl": system.rdma_ctl_state(output["rdma_ctl"]),
        "rdma": {interface: device for device, interface in devices},
        "receptacles": receptacles,
        "ports": ports,
        "services": interfaces.services(output["services"], details),
        "interfaces": interfaces.macos_interfaces(output["interfaces"]),
        "wireless": frozenset(interface for port, interface in ports.items() if port in ("Wi-Fi", "AirPort")),
        "unreadable": unreadable,
    }


def _linux(output: _Output) -> dict[str, Any]:
    pretty = re.search(r'^PRETTY_NAME="?([^"\n]*)', output["version"], re.MULTILINE)
    idle = re.search(r"IdleAction=(\w+)", output["idle"])
    asleep = {"masked": output["sleep"].split() == ["masked"] * 2, "idle": idle[1] if idle else ""}
    cores, load = output["cores"], re.match(r"\d+\.\d+", output["load"])
    devices = re.findall(r"^/sys/class/infiniband/([^/]+)/device/net/(\S+)$", output["devices"], re.MULTILINE)
    return {
        "version": f"{pretty[1] if pretty else 'Linux'}, {output['release']}",
        "chip": output["chip"].partition(":")[2].strip() or output["architecture"],
        "cores": int(cores) if cores.isdecimal() else 1,
        "load": float(load[0]) if load else 0.0,
        "memory": system.linux_memory(output["memory"], output["memory_limit"]),
        "power": {"systemd": asleep} if "sleep" in output else {},
        "rdma": {interface: device for device, interface in devices},
        "kernel_rdma": bool(output["kernel_rdma"]) if "kernel_rdma" in output else None,
        "denied": tuple(output["denied"].split()),
        "memlock": system.lockable_memory(output["lockable"], output["capabilities"]),
        "interfaces": interfaces.linux_interfaces(output["interfaces"]),
        "wireless": frozenset(output["wireless"].split()),
        "network_manager": "running" in output["nmcli"],
    }


def _what_is_wrong(result: CommandResult, error: InvalidArgument) -> str:
    if result.status == 0:
        return str(error)
    return f"{result.name} does not respond: {result.failure}{agent_advice(result.name, result.failure)}"
