"""Macs that ssh reaches, as far as `mlxdist config` can tell: commands of macOS that print fixtures and keep a state.

Each Mac is a folder with a state.json. A fake ssh runs the shell's command with the commands below before all others.
"""

import json
import re
import sys
from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures" / "macos"
COMMANDS = ["uname", "id", "sudo", "system_profiler", "networksetup", "ifconfig", "route", "rdma_ctl", "ibv_devices"]
COMMANDS += ["ping", "sleep"]


def fixture(name):
    return (FIXTURES / name).read_text()


class Macs:
    """``ssh``: the command that reaches them."""

    def __init__(self, folder):
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir()
        interpreter = f"#!{sys.executable} -IS\n"
        program = interpreter + Path(__file__).read_text()
        for command in COMMANDS:
            (programs / command).write_text(program)
            (programs / command).chmod(0o700)
        self.ssh = str(folder / "ssh")
        (folder / "ssh").write_text(
            f"{interpreter}import os, subprocess, sys\nname, command = sys.argv[-2:]\nhome = {str(folder)!r} + '/' + name\n"
            f"if not os.path.isdir(home): sys.exit('ssh: Could not resolve hostname ' + name)\n"
            f"os.environ['PATH'] = {str(programs)!r} + ':/usr/bin:/bin'\nos.environ['FAKE_MAC'] = home\n"
            "print('Welcome to this Mac')\nsys.stdout.flush()\n"
            "sys.exit(subprocess.run(['sh', '-c', command]).returncode)\n"
        )
        (folder / "ssh").chmod(0o700)

    def add(self, name, thunderbolt, ports="ports_studio.txt", **state):
        (self.folder / name).mkdir()
        listed = fixture(ports)
        interfaces = re.findall(r"^Device: (en\d+)$", listed, re.MULTILINE)
        start = {
            "thunderbolt": fixture(thunderbolt),
            "ports": listed,
            "services": [["Ethernet", "Ethernet", "en0", True, "dhcp", ""]],
            "addresses": {interface: "" for interface in interfaces}
            | {"en0": f"192.168.7.{10 + len(list(self.folder.iterdir()))}/255.255.255.0"},
            "bridge": [],
            "devices": [f"rdma_{interface}" for interface in interfaces],
            "rdma_ctl": "enabled",
            "sudo": True,
        }
        self.write(name, start | state)

    def read(self, name):
        return json.loads((self.folder / name / "state.json").read_text())

    def write(self, name, state):
        (self.folder / name / "state.json").write_text(json.dumps(state))


def _networksetup(state, words):
    option, *words = words
    services = {service[0]: service for service in state["services"]}
    if option == "-listallhardwareports":
        print(state["ports"])
    elif option in ("-listallnetworkservices", "-listnetworkserviceorder"):
        print("An asterisk (*) denotes that a network service is disabled.")
        for number, (name, port, interface, enabled, *_) in enumerate(state["services"], 1):
            if option == "-listallnetworkservices":
                print(name if enabled else f"*{name}")
            else:
                print(f"({number if enabled else '*'}) {name}\n(Hardware Port: {port}, Device: {interface})\n")
    elif option == "-getinfo":
        method, address = services[words[0]][4:]
        ip, mask = address.split("/") if address else ("none", "none")
        print("DHCP Configuration" if method == "dhcp" else "Manual Configuration")
        print(f"IP address: {ip}\nSubnet mask: {mask}\nRouter: (null)")
    elif option == "-createnetworkservice":
        interface = dict(re.findall(r"Hardware Port: (.+)\nDevice: (\S+)", state["ports"]))[words[1]]
        state["services"].append([words[0], words[1], interface, True, "dhcp", ""])
    elif words[0] not in services:
        print(f"{words[0]} is not a recognized network service.\n** Error: The parameters were not valid.")
    elif option == "-removenetworkservice":
        state["services"].remove(services[words[0]])
        state["addresses"][services[words[0]][2]] = ""
    elif option == "-setnetworkserviceenabled":
        services[words[0]][3] = words[1] == "on"
    elif option in ("-setmanual", "-setdhcp", "-setv4off"):
        address = "/".join(words[1:3]) if option == "-setmanual" else ""
        services[words[0]][4:] = ["dhcp" if option == "-setdhcp" else "manual", address]
        state["addresses"][services[words[0]][2]] = address
    else:
        sys.exit(f"networksetup: {option}?")


def _ifconfig(state, words):
    import ipaddress

    if words[:1] == ["bridge0"]:
        if words[1] == "deletem":
            state["bridge"].remove(words[2])
        else:
            state["bridge"].append(words[2])
        return
    for name, address in state["addresses"].items():
        print(f"{name}: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500")
        if address:
            ip, mask = address.split("/")
            print(f"\tinet {ip} netmask {int(ipaddress.IPv4Address(mask)):#010x} broadcast {ip}")
    print("bridge0: flags=8863<UP> mtu 1500")
    for member in state["bridge"]:
        print(f"\tmember: {member} flags=3<LEARNING,DISCOVER>")


def _find(home, address):
    """The interface of another Mac that has an address."""
    for other in Path(home).parent.glob("*/state.json"):
        for name, value in json.loads(other.read_text())["addresses"].items():
            if value.split("/")[0] == address and other.parent != Path(home):
                return other.parent.name, name
    return None


def main(command, words):
    import ipaddress
    import os

    home = os.environ["FAKE_MAC"]
    path = Path(home) / "state.json"
    state = json.loads(path.read_text())
    if command == "uname":
        print("Darwin")
    elif command == "id":
        print(501 if "FAKE_ROOT" not in os.environ else 0)
    elif command == "sudo":
        if not state["sudo"]:
            sys.exit("sudo: a password is required")
        os.environ["FAKE_ROOT"] = "1"
        os.execvp(words[1], words[1:])
    elif command == "system_profiler":
        print(state["thunderbolt"])
    elif command == "networksetup":
        _networksetup(state, words)
    elif command == "ifconfig":
        _ifconfig(state, words)
    elif command == "rdma_ctl":
        print(state["rdma_ctl"])
    elif command == "ibv_devices":
        print("    device          \t   node GUID\n    ------          \t----------------")
        print("".join(f"    {device}        \t0200000000000001\n" for device in state["devices"]))
    elif command in ("route", "ping"):
        target = words[-1]
        own = {
            name: ipaddress.IPv4Interface(value) for name, value in state["addresses"].items() if value and target != "default"
        }
        by = [name for name, address in own.items() if ipaddress.IPv4Address(target) in address.network]
        if command == "route":
            print(f"   route to: {target}\n  interface: {(by or ['en0'])[0]}")
        elif not by or not _find(home, target) or ("-b" in words and words[words.index("-b") + 1] not in by):
            sys.exit(2)
    if state != json.loads(path.read_text()):
        assert "FAKE_ROOT" in os.environ, f"{command} needs root"
        path.write_text(json.dumps(state))


if __name__ == "__main__":
    main(Path(sys.argv[0]).name, sys.argv[1:])
