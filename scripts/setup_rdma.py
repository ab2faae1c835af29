"""What sets up RDMA between two nodes: `mlxdist config`, with a second look at what it did."""

import ipaddress
import shlex
import sys
import time
from dataclasses import replace
from typing import Any

import click
from two_nodes import with_nodes

from mlxdist.base.errors import InvalidArgument
from mlxdist.cluster.facts.collect import HostFacts
from mlxdist.cluster.hostfile.options import HostSelection
from mlxdist.cluster.hostfile.parsing import parse
from mlxdist.cluster.setup.addresses import RANGE, Link
from mlxdist.cluster.setup.configure import Configuration, Options
from mlxdist.cluster.setup.make_hostfile import rdma_notes
from mlxdist.cluster.ssh.ssh import SshConfig, run_everywhere
from mlxdist.cluster.topology.topology import Topology


class TwoNodes(Configuration):
    """The first cable gets ``ips``, if any; a host without RDMA makes the exit status 1."""

    def __init__(self, chosen: HostSelection, options: Options, ips: tuple[str, str]) -> None:
        super().__init__(chosen, options)
        self._ips = ips

    def assign(self, machines: list[HostFacts], topology: Topology) -> list[Link]:
        for machine in machines:
            devices = ", ".join(machine.rdma.values()) or "none"
            print(f"{machine.name}: rdma_ctl {machine.rdma_ctl or 'is not there'}, devices {devices}")
        self._status |= bool(rdma_notes(machines, topology))
        links = super().assign(machines, topology)
        return chosen_addresses(machines, links, *self._ips) if all(self._ips) and links else links


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
                where = f"{interface.name} of {machine.name}"
                raise InvalidArgument(f"--node0-ip {a}: {where} has {taken[0]}, of the same subnet")
    return [replace(links[0], a=a, b=b, kept=False), *links[1:]]


@with_nodes(
    "setup_rdma.py",
    click.option("--cable", metavar="NODE0:IF=NODE1:IF", multiple=True, help="A cable, on Linux. May be repeated."),
    click.option("--output", default="rmlx-hosts.json", show_default=True, help="The hostfile to write."),
    click.option("--wait", default=30.0, show_default=True, help="Seconds before the second look."),
    click.option("--without-bridge", is_flag=True, help="Take the ports out of the Thunderbolt Bridge."),
    click.option("--dry-run", is_flag=True, help="Look and show; run and write nothing."),
)
def setup(
    node0: str, node1: str, node0_ip: str, node1_ip: str, remote_dir: str | None, python: str | None, ssh: str,
    cable: tuple[str, ...], wait: float, **own: Any,
) -> None:  # fmt: skip
    """Set up RDMA between two Macs (or two Linux hosts with a cable), and check that it holds.

    \b
        python scripts/setup_rdma.py --node0 studio-a --node1 studio-b
        python scripts/setup_rdma.py --node0 a --node1 b --node0-ip 10.9.0.1 --node1-ip 10.9.0.2 --dry-run

    This is `mlxdist config --auto-setup --verify`, which `mlxdist config --undo` takes back, and a second look after a
    while, because other software may give a port another address. With --remote-dir or --python it also looks whether
    both hosts have mlxdist there.

    The exit status is 0 if all is well, 1 if not, 2 if the options are wrong.
    """
    if bool(node0_ip) != bool(node1_ip):
        raise click.UsageError("give both --node0-ip and --node1-ip, or neither")
    options = Options(
        over="thunderbolt", named=cable, within=str(RANGE), auto_setup=not own["dry_run"], verifying=True, backend=None,
        envs=(), ignore_unreachable=False, dot=None, svg=None, as_json=False, **own,
    )  # fmt: skip
    try:
        chosen = HostSelection(parse(f"{node0}\n{node1}", "--node0, --node1"), tuple(shlex.split(ssh)))
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from None
    try:
        status = TwoNodes(chosen, options, (node0_ip, node1_ip)).run()
        if python := python or (remote_dir and f"{remote_dir}/.venv/bin/python"):
            status |= lacks_mlxdist([node0, node1], python, chosen.ssh_config)
        if not status and not options.dry_run:
            time.sleep(wait)
            status = Configuration(chosen, replace(options, auto_setup=False)).run()
    except InvalidArgument as error:
        raise click.ClickException(str(error)) from None
    sys.exit(status)


def lacks_mlxdist(nodes: list[str], python: str, ssh_config: SshConfig) -> bool:
    results = run_everywhere(nodes, [python, "-c", "import mlxdist.version"], ssh_config)
    failed = [result for result in results if result.status]
    for result in failed:
        click.echo(f"{result.name}: {result.last_words}; clone mlxdist there, and `make setup`", err=True)
    return bool(failed)


if __name__ == "__main__":
    setup()
