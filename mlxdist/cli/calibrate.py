"""The command line of `mlxdist calibrate`. It must be cheap to import: `mlxdist --help` does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxdist.base import tables, tuning_file
from mlxdist.base.errors import ResourceError
from mlxdist.base.output_file import try_to_open
from mlxdist.base.user_path import UserPath
from mlxdist.cluster.hostfile.options import HostSelection, host_options
from mlxdist.tools.bench.sizes import SIZE, names_of

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["calibrate"]

PARTS = ("hosts", "algorithms", "experts")


@click.command()
@host_options
@click.option(
    "-n", "-np", "each", type=click.IntRange(1), help="Ranks of algorithms and experts, on each host.  [default: 2]"
)
@click.option("--only", "parts", type=names_of(PARTS), default="all", metavar="A,B", help=f"Of {', '.join(PARTS)}.")
@click.option(
    "--seconds",
    type=click.FloatRange(0.1, 3600),
    default=12.0,
    show_default=True,
    help="To measure the hosts, all at once; then again for all links together.",
)
@click.option("--min", "smallest", type=SIZE, default="1KiB", show_default=True, help="Smallest input of algorithms.")
@click.option("--max", "largest", type=SIZE, default="16MiB", show_default=True, help="Largest input, in steps of 4.")
@click.option(
    "--repeats", type=click.IntRange(3, 1000), default=9, show_default=True, help="Blocks measured per algorithm."
)
@click.option(
    "--output",
    type=UserPath(dir_okay=False, path_type=Path),
    help="File to save to [default: MLXDIST_TUNING_FILE, else ~/.config/mlxdist/tuning.json].",
)
@click.option("--dry-run", is_flag=True, help="Measure and show, and save nothing.")
@click.option("--force", is_flag=True, help="Save what was measured while other processes used the CPU, too.")
@click.option("--json", "as_json", is_flag=True, help="Print everything that was measured as JSON.")
def calibrate(
    selection: HostSelection,
    each: int | None,
    parts: list[str],
    seconds: float,
    smallest: int,
    largest: int,
    repeats: int,
    output: Path | None,
    dry_run: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Measure hosts, algorithms and exchanges of tokens, and save what jobs need in the tuning file.

    \b
        mlxdist calibrate                                        this machine, two ranks
        mlxdist calibrate --hostfile rmlx-hosts.json             a cluster
        mlxdist calibrate -n 4 --only algorithms                 four ranks; the rows for two stay

    hosts: how fast each host computes, reads memory and talks to the others. The measurements become the shares of
    ranks on machines of unequal speed: rank_shares="memory" or "compute" where a plan or layer takes rank_shares, and
    `mlxdist shard MODEL --hostfile FILE`. algorithms: the fastest algorithm of each operation, by size, for this number
    of ranks and hosts. experts: what exchanges of tokens cost, for expert parallelism with mode="auto", and for
    `mlxdist serve` to choose which ranks share layers. The file keeps what it says of other hosts and numbers of ranks
    and hosts. Other work on the hosts spoils the numbers.

    The exit status is 1, and nothing is saved, if a host cannot be measured, if a result is wrong or cannot be true, or
    if other processes used more than 5 % of the CPU meanwhile (--force saves all the same).
    """
    path = None if dry_run else _prepared(output)
    if smallest > largest:
        raise click.BadParameter(f"{tables.size(smallest)} is more than --max", param_hint="--min")
    # Only now: rich and MLX take half a second to load.
    from mlxdist.tools.bench.results import QUIET_ADVICE, foreign_load, print_results, results_console
    from mlxdist.tools.bench.runner import Runner, with_ranks
    from mlxdist.tools.calibrate import algorithms, hosts

    if parts != ["hosts"]:
        each = each or (2 if sum(host.slots for host in selection.hosts()) == 1 else None)
        runner = Runner("algorithms", *with_ranks(selection, each), repeats)
    sections: dict[str, Any] = {}
    found: dict[str, Any] = {}
    loads: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    show: list[Callable[[Console], None]] = []
    if "hosts" in parts:
        measured, links = hosts.measure_hosts(selection, seconds)
        loads |= {host.name: {"foreign_cpu_share": host.foreign_cpu_share} for host in measured} | {"links": links}
        found |= hosts.as_json(selection, measured, links)
        problems += [f"{host.name}: {problem}" for host in measured for problem in host.problems]
        if not problems:
            sections["hosts"] = {host.name: host.measured.as_json() for host in measured}
            show.append(lambda console: hosts.show_hosts(selection, measured, console))
    if "algorithms" in parts:
        results = algorithms.measure_algorithms(runner, smallest, largest)
        refused = [result for result in results["cases"] if result["refused"]]
        problems += [f"{r['case']['operation']} by {r['variant']}: {r['refused']}" for r in refused]
        loads["algorithms"], found["algorithms"] = results["setup"], results
        if not refused:
            sections["algorithms"] = algorithms.choose(results)
            table = partial(algorithms.show_algorithms, rows=sections["algorithms"])
            show.append(lambda console: print_results(results, table, console))
    if "experts" in parts:
        # MLXDIST_TUNING_FILE may name the file that this command makes, which does not exist yet.
        variables = {"MLXDIST_TUNING_FILE": "none"}
        runner = replace(runner, target="mlxdist.tools.calibrate.ranks:ExpertLinks")
        of_experts = runner.run([{}], variables=variables)
        loads["experts"], links = of_experts["setup"], of_experts["cases"]
        found["experts"] = sections["expert_links"] = links
        show += [partial(_show_exchanges, link) for link in links]
    if as_json:
        click.echo(json.dumps(found, indent=2))
    elif not problems:
        for print_part in show:
            print_part(results_console())
    if problems:
        raise ResourceError("\n".join(["these are no results, and nothing is saved:", *problems]))
    if path is None:
        return
    disturbed = [f"{name}: {load}" for name, part in loads.items() if (load := foreign_load(part))]
    if disturbed and not force:
        raise ResourceError(f"nothing is saved to {path}: {'; '.join(disturbed)}; {QUIET_ADVICE}")
    tuning_file.update(path, _merged(path, sections))
    click.echo(f"Saved to {path}.", err=True)


def _show_exchanges(link: dict[str, Any], console: Console) -> None:
    from mlxdist.tools.bench.results import table_of

    shape = f"{link['ranks']} ranks, hosts: {link['hosts']}, {link['provider']}"
    cells = [[n, f"{c['latency'] * 1e6:.1f}", f"{c['bandwidth'] / 1e9:.2f}"] for n, c in link["costs"].items()]
    title = f"{shape}: exchanges of experts; plan {link['plan'] * 1e6:.1f} us"
    console.print(table_of(title, ["collective", "us", "+ bytes / GB/s"], cells))


def _prepared(output: Path | None) -> Path:
    """The path of the file to save to, after a test that it can be written, which precedes the measurements."""
    setting = tuning_file.setting()
    if output is None and setting == "none":
        raise ResourceError(
            "MLXDIST_TUNING_FILE=none: there is no file to save to; unset it, or give --output or --dry-run"
        )
    path = output or (Path(setting) if setting else tuning_file.default_path())
    _merged(path, {})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try_to_open(path)
    except OSError as error:
        raise ResourceError(f"{path} cannot be written: {error.strerror}; name another file with --output") from None
    return path


def _merged(path: Path, new: dict[str, Any]) -> dict[str, Any]:
    """The sections of the file, in which new measurements replace those of the same hosts, or as many ranks and hosts.

    Raises:
        InvalidArgument: the existing file is malformed.
    """
    from mlxdist.cluster.hostfile.rank_shares import check_hosts
    from mlxdist.runtime.group import tuning

    hosts, old = {}, tuning.Tuning()
    if path.exists():
        hosts, old = tuning_file.read_section(path, "hosts", check_hosts, {}), tuning.read(path)
    measured = [_shape(link) for link in new.get("expert_links", [])]
    links = [link for link in old.expert_links if _shape(link) not in measured]
    rows = tuning.merge(old.algorithms, new.get("algorithms", []))
    merged = tuning.sections(tuning.Tuning(rows, [*links, *new.get("expert_links", [])]))
    return merged | {"hosts": {name: host.as_json() for name, host in hosts.items()} | new.get("hosts", {})}


def _shape(link: dict[str, Any]) -> tuple[str, int, int]:
    return link["provider"], link["ranks"], link["hosts"]
