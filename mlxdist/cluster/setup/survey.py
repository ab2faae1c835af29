"""What each host says about itself: its cables, interfaces and addresses, and whether commands may be run as root.

A shell script goes to each host over one ssh connection, and the outputs of its commands come back. Nothing of mlxdist
has to be installed there: hosts are usually joined before they are set up otherwise.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlxdist.base.errors import InvalidArgument

from ..facts.interfaces import (
    Interface,
    Service,
    default_interface,
    hardware_ports,
    linux_interfaces,
    macos_interfaces,
    services,
)
from ..facts.rdma import rdma_ctl_state
from ..facts.thunderbolt import Receptacle, read_receptacles
from ..ssh.ssh import CommandResult, SshConfig, agent_advice, run_everywhere

__all__ = ["SCRIPT", "Survey", "read_parts", "read_survey", "survey_hosts"]

_SECONDS = 60.0  # system_profiler takes some, and networksetup asks for each service
_MAX_BYTES = 16 << 20

# The path that ssh sets does not always lead to what only root needs. The script is read from standard input, so no
# command may read that; and as one function, so that half of it does nothing.
SCRIPT = r"""main() {
PATH=$PATH:/usr/sbin:/sbin:/usr/bin:/bin LC_ALL=C
export PATH LC_ALL
say() { printf '\n@mlxdist:%s\n' "$1"; shift; "$@" </dev/null 2>/dev/null; }
say system uname -s
say user id -u
say sudo sh -c 'sudo -n true && echo yes'
case "$(uname -s)" in
Darwin)
  say thunderbolt system_profiler SPThunderboltDataType -json
  say ports networksetup -listallhardwareports
  say services networksetup -listnetworkserviceorder
  networksetup -listallnetworkservices </dev/null 2>/dev/null | sed -e 1d -e 's/^[*]//' | while IFS= read -r name; do
    say "service $name" networksetup -getinfo "$name"
  done
  say interfaces ifconfig -a
  say default route -n get default
  say rdma_ctl rdma_ctl status
  say devices ibv_devices
  ;;
*)
  say interfaces ip -json addr
  say default ip -json route show default
  say wireless sh -c 'for i in /sys/class/net/*/wireless; do test -d "$i" && basename "$(dirname "$i")"; done'
  say devices sh -c 'for i in /sys/class/infiniband/*/device/net/*; do test -e "$i" && echo "$i"; done'
  say nmcli nmcli -t -f RUNNING general
  ;;
esac
say end true
}
main
"""


@dataclass(frozen=True)
class Survey:
    """What is known of a host.

    Attributes:
        name: what ssh connects to.
        system: "Darwin" or "Linux".
        root: whether commands are run as root there already.
        sudo: whether `sudo -n` runs them without a password.
        rdma_ctl: "enabled", "disabled", or None where that is not said.
        rdma: the RDMA device of each interface that has one.
        ports: the interface of each hardware port of a Mac.
        default: the interface that other networks are reached by.
        wireless: interfaces of Wi-Fi.
        network_manager: whether NetworkManager runs there.
        unreadable: what it has said and is not understood, in words; only cables need it.
    """

    name: str
    system: str
    root: bool = False
    sudo: bool = False
    rdma_ctl: str | None = None
    rdma: Mapping[str, str] | None = None
    receptacles: tuple[Receptacle, ...] = ()
    ports: Mapping[str, str] | None = None
    services: tuple[Service, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    default: str = ""
    wireless: frozenset[str] = frozenset()
    network_manager: bool = False
    unreadable: str = ""

    @property
    def is_mac(self) -> bool:
        return self.system == "Darwin"

    def interface(self, name: str) -> Interface | None:
        return next((interface for interface in self.interfaces if interface.name == name), None)

    def bridge_of(self, name: str) -> str:
        return next((bridge.name for bridge in self.interfaces if name in bridge.members), "")


def survey_hosts(names: Sequence[str], ssh_config: SshConfig) -> tuple[list[Survey], dict[str, str]]:
    """Of the hosts that answer; and for each of the others what is wrong, and what to do."""
    found, wrong = [], {}
    for answer in run_everywhere(names, ["sh", "-s"], ssh_config, input=SCRIPT, seconds=_SECONDS):
        try:
            found.append(read_survey(answer.name, answer.output))
        except InvalidArgument as error:
            wrong[answer.name] = _what_is_wrong(answer, error)
    return found, wrong


def read_survey(name: str, text: str) -> Survey:
    """What the script printed on a host.

    Raises:
        InvalidArgument: it did not come to its end, or this is neither macOS nor Linux.
    """
    parts = read_parts(text)
    if "end" not in parts:
        raise InvalidArgument(f"{name} does not answer all questions")
    system = parts.get("system", "").strip()
    common = {"root": parts.get("user", "").strip() == "0", "sudo": "yes" in parts.get("sudo", "")}
    if system == "Darwin":
        return _mac(name, parts, common)
    if system == "Linux":
        return _linux(name, parts, common)
    raise InvalidArgument(f"{name} runs {system[:40] or 'an unknown system'}, and only macOS and Linux are known here")


def read_parts(text: str) -> dict[str, str]:
    """What each command of the script printed. What the start files of a shell print stands before the first mark."""
    marks = re.split(r"^@mlxdist:(.*)\n", text[:_MAX_BYTES], flags=re.MULTILINE)
    return dict(zip(marks[1::2], marks[2::2]))


def _mac(name: str, parts: Mapping[str, str], common: Mapping[str, bool]) -> Survey:
    ports = hardware_ports(parts.get("ports", ""))
    details = {key.removeprefix("service "): text for key, text in parts.items() if key.startswith("service ")}
    devices = re.findall(r"^\s*(rdma_(\S+))\s", parts.get("devices", ""), re.MULTILINE)
    receptacles, unreadable = (), ""
    try:
        receptacles = read_receptacles(parts.get("thunderbolt", ""))
    except InvalidArgument as error:
        unreadable = str(error)
    return Survey(
        name,
        "Darwin",
        **common,
        rdma_ctl=rdma_ctl_state(parts.get("rdma_ctl", "")),
        rdma={interface: device for device, interface in devices},
        receptacles=receptacles,
        ports=ports,
        services=services(parts.get("services", ""), details),
        interfaces=macos_interfaces(parts.get("interfaces", "")),
        default=default_interface(parts.get("default", "")),
        wireless=frozenset(interface for port, interface in ports.items() if port in ("Wi-Fi", "AirPort")),
        unreadable=unreadable,
    )


def _linux(name: str, parts: Mapping[str, str], common: Mapping[str, bool]) -> Survey:
    devices = re.findall(r"^/sys/class/infiniband/([^/]+)/device/net/(\S+)$", parts.get("devices", ""), re.MULTILINE)
    return Survey(
        name,
        "Linux",
        **common,
        rdma={interface: device for device, interface in devices},
        interfaces=linux_interfaces(parts.get("interfaces", "")),
        default=default_interface(parts.get("default", "")),
        wireless=frozenset(parts.get("wireless", "").split()),
        network_manager="running" in parts.get("nmcli", ""),
    )


def _what_is_wrong(answer: CommandResult, error: InvalidArgument) -> str:
    if answer.status == 0:
        return str(error)
    words = answer.last_words or f"exit status {answer.status}"
    return f"{answer.name} does not answer: {words}{agent_advice(answer.name, words)}"
