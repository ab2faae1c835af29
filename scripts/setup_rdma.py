"""Sets up RDMA between two Macs (or two Linux hosts with a cable), and checks that it holds.

    python scripts/setup_rdma.py --node0 studio-a --node1 studio-b
    python scripts/setup_rdma.py --node0 a --node1 b --node0-ip 10.111.0.1 --node1-ip 10.111.0.2 --dry-run

Finds the cables between the two, shows every command before it runs it (with `sudo -n`, over ssh), checks whether
RDMA is enabled and its devices are there, and whether each host reaches the other by each cable: at once, and again
after a while, because other software may give a port another address. `mlxdist config --undo` takes it back.

Variables instead of options: RMLX_NODE0, RMLX_NODE1, RMLX_NODE0_IP, RMLX_NODE1_IP, RMLX_REMOTE_DIR.
Exit status: 0 if all is well, 1 if not, 2 for a bad command line.
"""

import argparse
import ipaddress
import os
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mlxdist.base.errors import InvalidArgument
from mlxdist.cluster.facts.collect import HostFacts, collect_hosts
from mlxdist.cluster.hostfile.hosts import check_name
from mlxdist.cluster.hostfile.writing import write
from mlxdist.cluster.setup.addresses import Link, assign_addresses
from mlxdist.cluster.setup.configure import write_hostfile
from mlxdist.cluster.setup.ethernet import choose_addresses
from mlxdist.cluster.setup.make_hostfile import make_hostfile, rdma_notes
from mlxdist.cluster.setup.steps import plan_steps
from mlxdist.cluster.setup.undo import UndoFile, run_steps
from mlxdist.cluster.setup.verify import checks_of_links, verify
from mlxdist.cluster.ssh.ssh import SshConfig, run_everywhere
from mlxdist.cluster.topology.topology import build_topology


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    variable = os.environ.get
    parser.add_argument("--node0", default=variable("RMLX_NODE0"), help="one host, as ssh knows it")
    parser.add_argument("--node1", default=variable("RMLX_NODE1"), help="the other one")
    parser.add_argument("--node0-ip", default=variable("RMLX_NODE0_IP"), help="its address on the first cable")
    parser.add_argument("--node1-ip", default=variable("RMLX_NODE1_IP"), help="the other one's")
    parser.add_argument(
        "--remote-dir",
        default=variable("RMLX_REMOTE_DIR"),
        help="directory of mlxdist on both hosts, checked if given: its .venv must have mlxdist",
    )
    parser.add_argument("--cable", action="append", default=[], help="NODE0:INTERFACE=NODE1:INTERFACE, on Linux")
    parser.add_argument("--output", default="rmlx-hosts.json", help="hostfile to write (%(default)s)")
    parser.add_argument("--ssh", default="ssh", help="how to reach the hosts (%(default)s)")
    parser.add_argument("--wait", type=float, default=30.0, help="seconds before the second look (%(default)g)")
    parser.add_argument("--without-bridge", action="store_true", help="take the ports out of the Thunderbolt Bridge")
    parser.add_argument("--dry-run", action="store_true", help="look and show; run and write nothing")
    chosen = parser.parse_args()
    for option in ("node0", "node1"):
        if not getattr(chosen, option):
            parser.error(f"give --{option}, or set RMLX_{option.upper()}")
        if problem := check_name(getattr(chosen, option)):
            parser.error(f"--{option}: {problem}")
    if bool(chosen.node0_ip) != bool(chosen.node1_ip):
        parser.error("give both --node0-ip and --node1-ip, or neither")
    return chosen


def chosen_addresses(machines: list[HostFacts], links: list[Link], node0: str, node1: str) -> list[Link]:
    """The first cable gets the addresses that the user gives; without a length their subnet has two addresses."""
    try:
        a, b = (ipaddress.IPv4Interface(text if "/" in text else f"{text}/30") for text in (node0, node1))
    except ValueError as error:
        raise InvalidArgument(f"--node0-ip, --node1-ip: {error}; write them as 10.111.0.1/30") from None
    if a.network != b.network or a.ip == b.ip:
        raise InvalidArgument(f"--node0-ip {a} and --node1-ip {b} are not two addresses of one subnet")
    if {a.ip, b.ip} - set(a.network.hosts()):
        first, *_, last = a.network.hosts()
        raise InvalidArgument(f"--node0-ip, --node1-ip: hosts of the subnet {a.network} are {first} to {last}")
    if any(a.network.overlaps(link.a.network) for link in links[1:]):
        raise InvalidArgument(f"--node0-ip {a}: another cable has addresses of that subnet")
    for host, machine in enumerate(machines):
        for interface in machine.interfaces:
            taken = [has for has in interface.addresses if has.network.overlaps(a.network)]
            if taken and interface.name != links[0].cable.end(host).interface:
                raise InvalidArgument(
                    f"--node0-ip {a}: {interface.name} of {machine.name} has {taken[0]}, of the same subnet"
                )
    return [replace(links[0], a=a, b=b, kept=False), *links[1:]]


def set_up(
    machines: list[HostFacts], links: list[Link], chosen: argparse.Namespace, ssh_config: SshConfig
) -> list[str]:
    steps = plan_steps(machines, links, chosen.without_bridge)
    if chosen.dry_run:
        for step in steps:
            print(f"would run on {step.host}: {step}")
        return []
    return run_steps(steps, ssh_config, print, UndoFile.beside(chosen.output))


def check_remote_directory(chosen: argparse.Namespace, ssh_config: SshConfig) -> list[str]:
    words = ["sh", "-c", 'cd "$1" && .venv/bin/python -c "import mlxdist.version"', "sh", chosen.remote_dir]
    results = run_everywhere([chosen.node0, chosen.node1], words, ssh_config)
    advice = f"; clone mlxdist there, and `make setup` in {chosen.remote_dir}"
    return [f"{a.name}: {a.last_words}{advice}" for a in results if a.status]


def check(machines: list[HostFacts], links: list[Link], ssh_config: SshConfig, when: str) -> list[str]:
    """Collects the addresses again, and tries each cable both ways."""
    again, wrong = collect_hosts([machine.name for machine in machines], ssh_config)
    problems = list(wrong.values())
    for host, machine in enumerate(again if not wrong else ()):
        for link in links:
            end, address = link.cable.end(host), link.address(host)
            interface = machine.interface(end.interface)
            if interface is None or address not in interface.addresses:
                has = ", ".join(map(str, interface.addresses)) if interface and interface.addresses else "none"
                problems.append(f"{machine.name}: {end.interface} should have the address {address}, and has {has}")
    problems += verify(checks_of_links(machines, links), ssh_config) if not wrong else []
    print(f"{when}: {'the addresses hold, and both ways work' if not problems else 'not well'}")
    return problems


def main() -> int:
    chosen = parse_arguments()
    ssh_config = SshConfig(shlex.split(chosen.ssh))
    machines, wrong = collect_hosts([chosen.node0, chosen.node1], ssh_config)
    if wrong:
        return report(list(wrong.values()))
    for machine in machines:
        devices = ", ".join(machine.rdma.values()) or "none"
        print(f"{machine.name}: rdma_ctl {machine.rdma_ctl or 'is not there'}, devices {devices}")
    topology = build_topology(machines, chosen.cable)
    if not topology.cables:
        return report(
            [*topology.notes, f"no cable between {chosen.node0} and {chosen.node1} is seen; on Linux: --cable"]
        )
    links = assign_addresses(machines, topology)
    if chosen.node0_ip and links:
        links = chosen_addresses(machines, links, chosen.node0_ip, chosen.node1_ip)
    for link in links:
        print(f"{link.cable.a.port} {link.a} - {link.cable.b.port} {link.b}{' (there already)' if link.kept else ''}")
    problems = [*topology.notes, *rdma_notes(machines, topology)]
    problems += check_remote_directory(chosen, ssh_config) if chosen.remote_dir else []
    failed = set_up(machines, links, chosen, ssh_config)
    if chosen.dry_run or failed:
        return report(problems + failed)
    found = check(machines, links, ssh_config, "now")
    if not found:
        time.sleep(chosen.wait)
        found = check(machines, links, ssh_config, f"after {chosen.wait:g} s")
    text = write(make_hostfile(machines, topology, links, choose_addresses(machines)), "json")
    try:
        write_hostfile(chosen.output, text, print)
    except InvalidArgument as error:
        found.append(str(error))
    return report(problems + found)


def report(problems: list[str]) -> int:
    for problem in dict.fromkeys(problems):
        print(problem, file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InvalidArgument as problem:
        sys.exit(report([str(problem)]))
