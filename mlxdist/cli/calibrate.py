"""The command line of `mlxdist calibrate`. It must be cheap to import: `mlxdist --help` does."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxdist.base.errors import InvalidArgument, ResourceError
from mlxdist.cluster.hostfile.options import HostSelection, host_options
from mlxdist.tools.calibrate.parts import ALL, PRODUCTS

if TYPE_CHECKING:
    from rich.table import Table

    from mlxdist.cluster.hostfile import Hostfile
    from mlxdist.tools.calibrate.measurements import Figures

__all__ = ["calibrate"]

_START_SECONDS = 120.0  # a host may have to load MLX from a slow disk
UNSTEADY = 0.15  # spread of a figure that is worth no plan
_LATEST = 10  # so many times what a part should take, and _START_SECONDS, is too late


@click.command()
@host_options
@click.option("--output", metavar="FILE", help="Write the hostfile with the figures; may be the one of --hostfile.")
@click.option(
    "--force", is_flag=True, help="Write it even where FILE is another hostfile, or other processes used the CPU, too."
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.1, 3600),
    default=12.0,
    show_default=True,
    help="To measure the hosts, all at once; then again for all links together.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything that was measured as JSON.")
def calibrate(chosen: HostSelection, output: str | None, force: bool, seconds: float, as_json: bool) -> None:
    """Measure how fast hosts compute, read memory and talk to each other.

    \b
        mlxdist calibrate                                            this machine
        mlxdist calibrate --hostfile rmlx-hosts.json --output rmlx-hosts.json

    Written to the hostfile, the figures become the shares of ranks on machines of unequal speed: rank_shares="memory"
    or "compute" wherever a plan or layer takes rank_shares, and `mlxdist shard MODEL --hostfile FILE`. Without --output
    nothing is written. Other work on the hosts spoils the numbers.

    The exit status is 1, and nothing is written, if a host cannot be measured, if its figures cannot be true, or if
    other processes used more than 5 % of its CPU meanwhile (--force writes all the same).
    """
    try:
        whole = _whole_hostfile(chosen)
        if output is not None and not force:
            _refuse_other(Path(output), whole)
        hosts, job = _measure(chosen, seconds)
        found = _with_figures(whole, hosts) if not any(host.problems for host in hosts) else None
        if as_json:
            click.echo(json.dumps(_plain(hosts, found, job["provider"]), indent=2))
        elif found is not None:
            _show(hosts, found)
        if found is None:
            lines = [f"{host.name}: {problem}" for host in hosts for problem in host.problems]
            raise ResourceError("\n".join(["these are no results, and nothing is written:", *lines]))
        if output is not None:
            _refuse_disturbed(hosts, job, force, output)
            _save(found, output)
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from None
    except (ResourceError, OSError) as error:
        raise click.ClickException(str(error)) from None


def _whole_hostfile(chosen: HostSelection) -> Hostfile:
    """With the hosts that are not to be measured now, and as it stands in the file."""
    from mlxdist.cluster.hostfile import Hostfile, read

    if chosen.hostfile is None:
        return Hostfile(tuple(chosen.hosts()), source="this machine")
    return read(chosen.hostfile.source) if "--hostfile" in chosen.arguments else chosen.hostfile


def _refuse_other(output: Path, whole: Hostfile) -> None:
    """Before the hosts work for it: where writing would lose something that stands in the file."""
    from mlxdist.cluster.hostfile import read

    if not output.exists():
        if not output.absolute().parent.is_dir():
            raise InvalidArgument(f"--output {output}: there is no folder {output.absolute().parent}")
        return
    there = read(output)
    why = None
    if there.format != "json":
        why = f"it has the format {there.format}, which has no place for figures"
    elif _without_figures(there) != _without_figures(whole):
        why = f"it is another hostfile than {whole.source}"
    elif there.warnings:
        why = f"{there.warnings[0]}, and would be lost"
    if why is not None:
        raise InvalidArgument(f"--output {output} is there: {why}; name another file, or give --force")


def _without_figures(found: Hostfile) -> tuple[Any, ...]:
    return found.backend, found.envs, tuple(replace(host, measured=None, line=0) for host in found.hosts)


def _measure(chosen: HostSelection, seconds: float) -> tuple[list[Figures], dict[str, Any]]:
    """The figures of the chosen hosts, and what rank 0 of link_rank.py has printed."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from mlxdist.cluster.ssh.rpc_client import Connections
    from mlxdist.tools.calibrate.links import measure_links
    from mlxdist.tools.calibrate.measurements import figures_of

    names = [host.name for host in chosen.hosts()]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("connecting", total=1 + len(ALL) + (len(names) > 1))
        with Connections(names, chosen.ssh_config) as connections:
            machines = _all_of(connections.call("calibrate.machine", seconds=_START_SECONDS))
            _check_machines(names, machines)
            parts: list[dict[str, Any]] = [{} for _ in names]
            for part in ALL:
                progress.update(task, advance=1, description=f"products in {part}" if part in PRODUCTS else part)
                share = seconds / len(ALL)
                arguments = {"part": part, "seconds": share}
                found = connections.call("calibrate.measure", arguments, seconds=_START_SECONDS + _LATEST * share)
                for of_host, one in zip(parts, _all_of(found)):
                    of_host[part] = one
        job: dict[str, Any] = {"links": [], "provider": None, "foreign_cpu_share": None}
        if len(names) > 1:
            progress.update(task, advance=1, description="links")
            job = measure_links(chosen, seconds)
    return figures_of(names, machines, parts, job["links"]), job


def _refuse_disturbed(hosts: list[Figures], job: dict[str, Any], force: bool, output: str) -> None:
    from mlxdist.tools.bench.job import QUIET_ADVICE, foreign_load

    loads = [(host.name, foreign_load({"foreign_cpu_share": host.foreign_cpu_share})) for host in hosts]
    found = [f"{name}: {load}" for name, load in [*loads, ("links", foreign_load(job))] if load]
    if found and not force:
        raise ResourceError(f"nothing is saved to {output}: {'; '.join(found)}; {QUIET_ADVICE}")


def _all_of(answers: list[Any]) -> list[Any]:
    """All answers, or everything that is wrong with any."""
    from mlxdist.cluster.ssh.rpc_client import CallError

    errors = [answer for answer in answers if isinstance(answer, CallError)]
    if errors:
        raise ResourceError("\n".join(f"{one.name}: {one}" if one.connected else str(one) for one in errors))
    return answers


def _check_machines(names: list[str], machines: list[dict[str, Any]]) -> None:
    from mlxdist.version import __version__

    for name, machine in zip(names, machines):
        if machine["mlxdist"] != __version__:
            raise ResourceError(f"{name} has mlxdist {machine['mlxdist']!r:.40}, and this machine {__version__}")
    for number, (name, machine) in enumerate(zip(names, machines)):
        same = [other for other, one in zip(names[:number], machines) if one["identity"] == machine["identity"]]
        if same:
            raise ResourceError(f"{same[0]} and {name} are one machine; give it once, with slots for its ranks")


def _with_figures(whole: Hostfile, hosts: list[Figures]) -> Hostfile:
    """Hosts that were left out keep what they had."""
    figures = {host.name: host.measured for host in hosts}
    entries = (replace(host, measured=figures.get(host.name, host.measured)) for host in whole.hosts)
    return replace(whole, hosts=tuple(entries), format="json")


def _save(found: Hostfile, output: str) -> None:
    from mlxdist.cluster.hostfile import save

    save(found, output)
    missing = [host.name for host in found.hosts if host.measured is None]
    rest = f"; not measured yet: {', '.join(missing)}" if missing else ""
    click.echo(f"wrote {output}{rest}", err=True)


def _weights(hosts: list[Figures], found: Hostfile, by: str) -> dict[str, float]:
    """Of the ranks of each host that was measured now."""
    from mlxdist.cluster.hostfile import speeds

    measured = found.only([host.name for host in hosts])
    names = [host.name for host in measured.hosts for _ in range(host.slots)]
    return dict(zip(names, speeds(measured, by)))


def _show(hosts: list[Figures], found: Hostfile) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(_table(hosts, found))
    if any(host.slow for host in hosts):
        console.print("! more than 15% below others of its kind: look at what else runs there, power and cables")
    if any(_spread(found) > UNSTEADY for host in hosts for found in (host.product, host.parts["row"])):
        advice = "other work disturbs it; measure again, or for longer with --seconds"
        console.print(f"\N{PLUS-MINUS SIGN} above {UNSTEADY:.0%}: {advice}")


def _table(hosts: list[Figures], found: Hostfile) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("host", overflow="fold", no_wrap=True)
    table.add_column("device", overflow="fold", min_width=8)
    for title in ("TFLOPS", "in", "one row\nGB/s", "array\nGB/s", "link\nGB/s", "weights:\nmem/comp"):
        table.add_column(title, justify="left" if title == "in" else "right", no_wrap=True)
    memory, compute = (_weights(hosts, found, by) for by in ("memory", "compute"))
    for host in hosts:
        link = min(host.links, key=lambda link: link.gbps, default=None)
        cells = [
            _cell(host.product, "tflops" in host.slow),
            host.product["dtype"],
            _cell(host.parts["row"], "memory_gbps" in host.slow),
            f"{max(host.parts[part]['median'] for part in ('copy', 'sum')):.3g}",
            _cell({"median": link.gbps, "min": link.least, "max": link.most}, "link_gbps" in host.slow) if link else "",
            f"{memory[host.name]:.2f}/{compute[host.name]:.2f}",
        ]
        table.add_row(escape(host.name), escape(host.machine["device"]), *cells)
    return table


def _cell(found: dict[str, Any], slow: bool = False) -> str:
    return f"{'! ' * slow}{found['median']:.3g} \N{PLUS-MINUS SIGN}{_spread(found):.0%}"


def _spread(found: dict[str, Any]) -> float:
    """Half of what lies between the least and the most, as a share of the median."""
    return (found["max"] - found["min"]) / 2 / found["median"]


def _plain(hosts: list[Figures], found: Hostfile | None, provider: str | None) -> dict[str, Any]:
    from dataclasses import asdict

    from mlxdist.cluster.hostfile import MEASUREMENTS

    return {
        "hosts": [
            {
                "host": host.name,
                "machine": host.machine,
                "measured": None if host.problems else asdict(host.measured),
                "parts": host.parts,
                "slow": sorted(host.slow),
                "problems": host.problems,
            }
            for host in hosts
        ],
        "links": [asdict(link) for host in hosts for link in host.links if link.target == host.name],
        "provider": provider,
        "weights": None if found is None else {by: _weights(hosts, found, by) for by in MEASUREMENTS},
    }
