"""Macs that ssh reaches, as far as `mlxdist config` can tell: commands of macOS that print fixtures and keep a state.

Each Mac is a directory with a state.json. A fake ssh puts the commands below first in the PATH of the shell's command.
"""

import json
import os
import re
import sys
from ipaddress import IPv4Address, IPv4Interface
from pathlib import Path

FIXTURES = Path(__file__).parents[1] / "fixtures" / "macos"
# Shells start faster than Pythons, so what only shows something comes from a file.
READING = """#!/bin/sh
case "$0 $1" in
*/networksetup\\ -[lg]* | */ifconfig\\ -a | */route\\ * ) exec cat "$FAKE_MAC/$(basename "$0") $*" ;;
*/networksetup\\ * | */ifconfig\\ * | */ping\\ *) exec PYTHON -IS "PROGRAM" "$(basename "$0")" "$@" ;;
*/uname\\ *) echo Darwin ;;
*/id\\ *) echo ${FAKE_ROOT:-501} ;;
*/sudo\\ *) test -e "$FAKE_MAC/locked" && { echo "sudo: a password is required" >&2; exit 1; }
  shift; FAKE_ROOT=0 exec "$@" ;;
*/sleep\\ *) ;;
*) exec cat "$FAKE_MAC/$(basename "$0")" ;;
esac
"""
SSH = """#!/bin/sh
for word; do name=$command command=$word; done
test -d "DIRECTORY/$name" || { echo "ssh: Could not resolve hostname $name" >&2; exit 255; }
echo Welcome to this Mac
PATH=DIRECTORY/bin:/usr/bin:/bin FAKE_MAC=DIRECTORY/$name exec sh -c "$command"
"""
COMMANDS = ["uname", "id", "sudo", "system_profiler", "networksetup", "ifconfig", "route", "rdma_ctl", "ibv_devices"]
COMMANDS += ["ping", "sleep"]


def fixture(name):
    return (FIXTURES / name).read_text()


class Macs:
    """``ssh``: the command that reaches them."""

    def __init__(self, directory):
        self.directory = directory
        programs = directory / "bin"
        programs.mkdir()
        for command in COMMANDS:
            (programs / command).write_text(READING.replace("PYTHON", sys.executable).replace("PROGRAM", __file__))
            (programs / command).chmod(0o700)
        self.ssh = str(directory / "ssh")
        (directory / "ssh").write_text(SSH.replace("DIRECTORY", str(directory)))
        (directory / "ssh").chmod(0o700)

    def add(self, name, thunderbolt, ports="ports_studio.txt", **state):
        (self.directory / name).mkdir()
        listed = fixture(ports)
        interfaces = re.findall(r"^Device: (en\d+)$", listed, re.MULTILINE)
        start = {
            "thunderbolt": fixture(thunderbolt),
            "ports": listed,
            "services": [["Ethernet", "Ethernet", "en0", True, "dhcp", ""]],
            "addresses": dict.fromkeys(interfaces, "")
            | {"en0": f"192.168.7.{10 + len(list(self.directory.iterdir()))}/255.255.255.0"},
            "bridge": [],
            "devices": [f"rdma_{interface}" for interface in interfaces],
            "rdma_ctl": "enabled",
            "sudo": True,
        }
        self.write(name, start | state)

    def read(self, name):
        return json.loads((self.directory / name / "state.json").read_text())

    def write(self, name, state):
        _write(self.directory / name, state)


def _write(directory, state):
    """The state, and what commands print of it."""
    (directory / "state.json").write_text(json.dumps(state))
    for name, text in _outputs(state).items():
        (directory / name).write_text(text)
    (directory / "locked").unlink(missing_ok=True)
    if not state["sudo"]:
        (directory / "locked").touch()


def _outputs(state):
    devices = "".join(f"    {device}        \t0200000000000001\n" for device in state["devices"])
    head = "An asterisk (*) denotes that a network service is disabled.\n"
    found = {
        "system_profiler": state["thunderbolt"],
        "networksetup -listallhardwareports": state["ports"],
        "networksetup -listallnetworkservices": head,
        "networksetup -listnetworkserviceorder": head,
        "rdma_ctl": state["rdma_ctl"],
        "ibv_devices": f"    device          \t   node GUID\n    ------          \t----------------\n{devices}",
        "route -n get default": "  interface: en0\n",
        "ifconfig -a": "",
    }
    for number, (name, port, interface, enabled, method, address) in enumerate(state["services"], 1):
        found["networksetup -listallnetworkservices"] += name + "\n" if enabled else f"*{name}\n"
        found["networksetup -listnetworkserviceorder"] += (
            f"({number if enabled else '*'}) {name}\n(Hardware Port: {port}, Device: {interface})\n\n"
        )
        ip, mask = address.split("/") if address else ("none", "none")
        title = "DHCP" if method == "dhcp" else "Manual"
        info = f"{title} Configuration\nIP address: {ip}\nSubnet mask: {mask}\nRouter: (null)\n"
        found[f"networksetup -getinfo {name}"] = info
    for name, address in state["addresses"].items():
        found["ifconfig -a"] += f"{name}: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500\n"
        if address:
            ip, mask = address.split("/")
            found["ifconfig -a"] += f"\tinet {ip} netmask {int(IPv4Address(mask)):#010x} broadcast {ip}\n"
            for peer in IPv4Interface(address).network.hosts() if mask == "255.255.255.252" else ():
                found[f"route -n get {peer}"] = f"   route to: {peer}\n  interface: {name}\n"
    found["ifconfig -a"] += "bridge0: flags=8863<UP> mtu 1500\n"
    found["ifconfig -a"] += "".join(f"\tmember: {member} flags=3<LEARNING,DISCOVER>\n" for member in state["bridge"])
    return found


def _networksetup(state, option, *words):
    services = {service[0]: service for service in state["services"]}
    if option == "-createnetworkservice":
        interface = dict(re.findall(r"Hardware Port: (.+)\nDevice: (\S+)", state["ports"]))[words[1]]
        state["services"].append([words[0], words[1], interface, True, "dhcp", ""])
    elif words[0] not in services:
        print(f"{words[0]} is not a recognized network service.\n** Error: The parameters were not valid.")
    elif option == "-removenetworkservice":
        state["services"].remove(services[words[0]])
        state["addresses"][services[words[0]][2]] = ""
    elif option == "-setnetworkserviceenabled":
        services[words[0]][3] = words[1] == "on"
    else:
        address = "/".join(words[1:3])
        services[words[0]][4:] = [{"-setdhcp": "dhcp", "-setmanual": "manual"}[option], address]
        state["addresses"][services[words[0]][2]] = address


def _ifconfig(state, bridge, action, member):
    assert bridge == "bridge0"
    {"deletem": state["bridge"].remove, "addm": state["bridge"].append}[action](member)


def _reaches(home, interface, target):
    """Whether the interface, if one is given, is in the subnet of an address that another Mac has."""
    own = [value for name, value in json.loads((home / "state.json").read_text())["addresses"].items()
           if value and interface in ("", name)]  # fmt: skip
    others = [json.loads(path.read_text()) for path in home.parent.glob("*/state.json") if path.parent != home]
    there = any(value.split("/")[0] == target for state in others for value in state["addresses"].values())
    return there and any(IPv4Address(target) in IPv4Interface(value).network for value in own)


def main(command, *words):
    home = Path(os.environ["FAKE_MAC"])
    if command == "ping":
        sys.exit(0 if _reaches(home, words[words.index("-b") + 1] if "-b" in words else "", words[-1]) else 2)
    assert "FAKE_ROOT" in os.environ, f"{command} needs root"
    state = json.loads((home / "state.json").read_text())
    {"networksetup": _networksetup, "ifconfig": _ifconfig}[command](state, *words)
    _write(home, state)


if __name__ == "__main__":
    main(*sys.argv[1:])
