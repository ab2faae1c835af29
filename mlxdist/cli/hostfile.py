"""The command line of `mlxdist hostfile`."""

import datetime
import json
import os
import sys
from dataclasses import asdict, astuple
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from mlxdist.base.environment import MAX_RANKS
from mlxdist.base.errors import InvalidArgument
from mlxdist.base.user_path import USER_PATH
from mlxdist.cluster.hostfile.hosts import FORMATS, Hostfile
from mlxdist.cluster.hostfile.parsing import parse, read
from mlxdist.cluster.hostfile.rank_shares import measured_hosts
from mlxdist.cluster.hostfile.slurm import from_slurm
from mlxdist.cluster.hostfile.writing import left_out, save, write

__all__ = ["hostfile"]

_FILE = click.argument("file", type=USER_PATH, metavar="FILE")


@click.group()
def hostfile() -> None:
    """Check, show and convert hostfiles.

    A hostfile is MLX's JSON ([{"ssh": ..., "ips": [...], "rdma": [...]}] or {"backend", "envs", "hosts"}), lines of
    `host slots=N` (Open MPI, Horovod, DeepSpeed) or `host:N` (MPICH), or the addresses of MLX_HOSTFILE. FILE may be -
    for standard input.
    """


@hostfile.command()
@_FILE
def check(file: str) -> None:
    """Report everything that is wrong with FILE, with its line. Exit status 2 if anything is."""
    found = _read(file)
    _warn(found)
    click.echo(f"{file}: {_summary(found)}")


@hostfile.command()
@_FILE
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def show(file: str, as_json: bool) -> None:
    """Show the hosts of FILE: ranks, addresses, and which device leads where."""
    found = _read(file)
    _warn(found)
    if as_json:
        click.echo(json.dumps(_plain(found), indent=2))
        return
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(_table(found))
    for setting in found.envs:
        console.print(f"env {setting}", highlight=False, markup=False)
    console.print(_summary(found), highlight=False, markup=False)


@hostfile.command()
@_FILE
@click.option("--to", "format", type=click.Choice(FORMATS), required=True, help="The format to write.")
@click.option("--output", type=USER_PATH, metavar="PATH", help="Where to write.  [default: standard output]")
def convert(file: str, format: str, output: str | None) -> None:
    """Write FILE in another format. Content that the format has no place for is an error, with two exceptions. A ring's
    ports are left out: the launcher chooses them. The format ring has only addresses: all else is left out, and
    printed by name.

    \b
        mlxdist hostfile convert hosts.txt --to json --output rmlx-hosts.json
    """
    found = _read(file)
    _warn(found)
    if lost := left_out(found, format):
        text = f"left out, for {format} has no place for it: {', '.join(lost)}"
        click.secho(f"hostfile {found.source}: {text}", fg="yellow", err=True)
    _emit(found, format, output)


@hostfile.command()
@_FILE
@click.argument("host")
@click.option("--reason", default="", metavar="TEXT", help="Why; people who start jobs see it.")
def deny(file: str, host: str, reason: str) -> None:
    """Let no command use HOST of FILE, a hostfile of JSON, until `mlxdist hostfile allow`: it has failed too often.

    The date goes into the file, too. Only --include HOST still takes it, as for `mlxdist doctor`.

    \b
        mlxdist hostfile deny rmlx-hosts.json studio3 --reason "resets its GPU"
    """
    since = datetime.date.today().isoformat()
    _change(file, host, f"{since}: {reason}" if reason else since)


@hostfile.command()
@_FILE
@click.argument("host")
def allow(file: str, host: str) -> None:
    """Let commands use HOST of FILE again, after `mlxdist hostfile deny`.

    \b
        mlxdist hostfile allow rmlx-hosts.json studio3
    """
    _change(file, host, "")


def _change(file: str, host: str, denied: str) -> None:
    found = read(file)
    if found.format != "json":
        raise InvalidArgument(
            f"{file}: only a hostfile of JSON has a place for it; `mlxdist hostfile convert {file} --to json`"
        )
    save(found.with_denied(host, denied), file)
    click.echo(f"{file}: {host} {f'is denied since {denied}' if denied else 'is allowed'}", err=True)


@hostfile.command("from-slurm")
@click.argument("nodes", required=False)
@click.option("--slots", type=click.IntRange(1, MAX_RANKS), help="Ranks on each host.  [default: SLURM's tasks, or 1]")
@click.option("--to", "format", type=click.Choice(FORMATS), default="json", show_default=True, help="Format to write.")
@click.option("--output", type=USER_PATH, metavar="PATH", help="Where to write.  [default: standard output]")
def from_slurm_command(nodes: str | None, slots: int | None, format: str, output: str | None) -> None:
    """Write the hosts of a SLURM allocation, or of a compact list NODES, as a hostfile.

    \b
        mlxdist hostfile from-slurm --output rmlx-hosts.json          inside salloc or sbatch
        mlxdist hostfile from-slurm 'node-[21,23-26]' --slots 2
    """
    _emit(from_slurm({"SLURM_JOB_NODELIST": nodes} if nodes else os.environ, slots), format, output)


def _read(file: str) -> Hostfile:
    return parse(sys.stdin.read(), "-") if file == "-" else read(file)


def _warn(found: Hostfile) -> None:
    for warning in found.warnings:
        click.secho(f"hostfile {found.source}, {warning}", fg="yellow", err=True)


def _emit(found: Hostfile, format: str, output: str | None) -> None:
    if output is None:
        click.echo(write(found, format), nl=False)
        return
    save(found, output, format)
    click.echo(f"wrote {output}: {_summary(found)}", err=True)


def _summary(found: Hostfile) -> str:
    hosts, cables = len({host.name for host in found.hosts}), sum(map(len, _cables(found))) // 2
    parts = [f"{hosts} host{'s' * (hosts != 1)}", f"{found.ranks} rank{'s' * (found.ranks != 1)}"]
    parts += [f"{cables} cable{'s' * (cables != 1)}"] * bool(cables)
    parts += [f"backend {found.backend}"] * bool(found.backend)
    return ", ".join(parts)


def _cables(found: Hostfile) -> list[list[str]]:
    return [[device for row in host.rdma for device in row] for host in found.hosts]


def _table(found: Hostfile) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("ranks", justify="right")
    for title in ("host", "addresses"):
        table.add_column(title, overflow="fold")
    has_devices = any(host.rdma for host in found.hosts)
    if has_devices:
        table.add_column("devices", overflow="fold")
    measured = measured_hosts()
    is_measured = any(host.name in measured for host in found.hosts)
    for title in ("TFLOPS", "memory GB/s", "link GB/s") * is_measured:
        table.add_column(title, justify="right")
    is_denied = any(host.denied for host in found.hosts)
    if is_denied:
        table.add_column("denied since", overflow="fold")
    first = 0
    for host in found.hosts:
        ranks = str(first) if host.slots == 1 else f"{first}-{first + host.slots - 1}"
        devices = ", ".join(f"{'+'.join(row)} to {found.hosts[to].name}" for to, row in enumerate(host.rdma) if row)
        row = [ranks, host.name, ", ".join(host.ips), *([devices] if has_devices else [])]
        if is_measured:
            values = astuple(measured[host.name]) if host.name in measured else (None, None, None)
            row += ["" if value is None else f"{value:g}" for value in values]
        row += [host.denied] if is_denied else []
        table.add_row(*(cell.replace("[", "\\[") for cell in row))
        first += host.slots
    return table


def _plain(found: Hostfile) -> dict[str, Any]:
    measured = measured_hosts()
    hosts = []
    for host in found.hosts:
        fields = asdict(host)
        del fields["ports"]
        known = asdict(measured[host.name]) if host.name in measured else None
        hosts.append({"ssh": fields.pop("name")} | fields | {"measured": known})
    return asdict(found) | {"ranks": found.ranks, "hosts": hosts}
