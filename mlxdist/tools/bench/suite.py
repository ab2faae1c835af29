"""`mlxdist bench suite`: all communication, by mlxdist and by MLX's own backends, on one machine or several."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mlxdist.base.output_file import OUTPUT_FILE
from mlxdist.cluster.hostfile.options import HostSelection, host_options

from .collectives import Names
from .job import RANKS_OPTION, has_mpirun, number_of_ranks, print_load, results_console, run, write_results
from .limits import LIMIT_COLUMNS, explain_limits
from .machine import describe_command, relevant
from .results import (
    BENCHMARK,
    COMPUTING,
    SCHEMA,
    backends_of,
    by_name,
    case_name,
    hosts_of,
    limits_of,
    size_of,
    spread,
    times_of,
)
from .sizes import Size, check_sizes, size_range, unit_of

__all__ = ["failed", "notes", "plan", "print_suite", "suite"]

BACKENDS = ("mlxdist", "ring", "mpi", "jaccl")
# The dtypes of each, by size; and the tokens of what has layers or rows of tokens.
SIZED = {
    "sendrecv": ["float32"],
    "all_reduce": ["float16", "float32"],
    "all_gather": ["float32"],
    "all_to_all": ["float32"],
    "broadcast": ["float32"],
    "reduce_scatter": ["float32"],
}
TOKENS = {"ep_transport": [8, 128], "ep_pipeline": [8, 64], "tp_decode": [1], "tp_prefill": [32]}
MEASURED = (*SIZED, *TOKENS)
SMALLEST, LARGEST = 4 << 10, 16 << 20
QUICK_SIZES = [4 << 10, 256 << 10]
WARM_UP, ITERATIONS = 10, 30
QUICK_WARM_UP, QUICK_ITERATIONS = 2, 5
# Columns of the terminal that the table needs to show ranges.
WIDTH, WIDTH_OF_BACKEND = 90, 42
# A BLAS with threads of its own would take the other ranks' cores.
ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")} | {"VECLIB_MAXIMUM_THREADS": "1"}


@click.command()
@RANKS_OPTION
@host_options
@click.option("--only", type=Names(MEASURED), default="all", metavar="A,B", help=f"Of {', '.join(MEASURED)}.")
@click.option(
    "--backends", type=Names(BACKENDS), default="all", metavar="A,B", help=f"Of {', '.join(BACKENDS)}.  [default: all]"
)
@click.option("--sizes", type=Size(many=True), help="Sizes of operations.  [default: 4KiB to 16MiB, in steps of 4]")
@click.option("--quick", is_flag=True, help="Two sizes, 5 iterations: to see that it works.")
@click.option("--device", type=click.Choice(["auto", "cpu", "gpu"]), default="auto", help="Where layers compute.")
@click.option("--pin/--no-pin", "pinned", default=True, help="Keep each rank on a core of its own, or not.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.option("--output", type=OUTPUT_FILE, help="Also write the results as JSON here.")
@click.option("--html", type=OUTPUT_FILE, help="Write a report with plots here.")
def suite(
    chosen: HostSelection,
    ranks: int | None,
    only: list[str],
    backends: list[str],
    sizes: list[int] | None,
    quick: bool,
    device: str,
    pinned: bool,
    as_json: bool,
    output: Path | None,
    html: Path | None,
) -> None:
    """Time all communication between the ranks, by mlxdist and by MLX's own backends, and check every result.

    \b
        mlxdist bench suite --quick
        mlxdist bench suite --hostfile rmlx-hosts.json --output today.json --html today.html
        mlxdist bench compare yesterday.json today.json

    10 iterations to warm up, then 30 that count, a barrier before each; the time is that of the slowest rank, and of a
    message the time until it has arrived. Backends take turns in the same processes; Open MPI, which needs mpirun, has
    its own. docs/benchmarks.md says what each case is and how to read the numbers.

    The exit status is 1 if a result was wrong, a time is shorter than the memory allows, nothing could be measured, or
    a file could not be written; the table is printed all the same.
    """
    chosen, ranks = number_of_ranks(chosen, ranks)
    if sizes:
        check_sizes(sizes, [(name, dtype) for name in only for dtype in SIZED.get(name, ())], ranks)
    if html and importlib.util.find_spec("matplotlib") is None:
        raise click.ClickException("--html needs matplotlib: pip install 'mlxdist[bench]'")
    parameters = {
        "plan": plan(only, sizes or (QUICK_SIZES if quick else size_range(SMALLEST, LARGEST)), quick, ranks),
        "device": device,
        "quick": quick,
        "warm_up": QUICK_WARM_UP if quick else WARM_UP,
        "iterations": QUICK_ITERATIONS if quick else ITERATIONS,
        "pinned": pinned,
    }
    results = _measure(chosen, ranks, backends, parameters)
    written = write_results(results, as_json, output, lambda found: print_suite(found, results_console()))
    if html:
        from .report import write_report  # only now: matplotlib takes a second to load

        written = write_report(results, html) and written
    sys.exit(1 if failed(results) or not written else 0)


def plan(only: list[str], sizes: list[int], quick: bool, ranks: int) -> list[dict[str, Any]]:
    """What is measured, line by line: operation, dtype and bytes, or operation and tokens.

    Sizes are rounded down to what has a part for each rank.
    """
    lines: list[dict[str, Any]] = []
    for operation in only:
        if operation in SIZED:
            for dtype in SIZED[operation]:
                unit = unit_of(operation, dtype, ranks)
                lines += [{"operation": operation, "dtype": dtype, "bytes": size // unit * unit} for size in sizes]
        else:
            lines += [{"operation": operation, "tokens": count} for count in TOKENS[operation][: 1 if quick else None]]
    return lines


def failed(results: dict[str, Any]) -> bool:
    """Whether a case is no result, or there is none at all."""
    return any(case["refused"] for case in results["cases"]) or not results["cases"]


def _measure(chosen: HostSelection, ranks: int, backends: list[str], parameters: dict[str, Any]) -> dict[str, Any]:
    setup, begin = describe_command(), time.monotonic()
    jobs, absent = [], {}
    if together := [name for name in backends if name != "mpi"]:
        jobs.append(_run(chosen, ranks, together, parameters))
    if "mpi" in backends:
        try:
            jobs.append(_run_mpi(chosen, ranks, parameters))
        except click.ClickException as error:
            if not jobs:
                raise
            absent["mpi"] = error.message
    seconds = time.monotonic() - begin
    facts = [job["cases"].pop(0) for job in jobs]
    for fact in facts:
        absent |= fact["absent"]
    loads = [job["foreign_cpu_share"] for job in jobs if job["foreign_cpu_share"] is not None]
    names = ("ranks", "provider", "pinned", "mlxdist", "mlx")
    setup |= {name: jobs[0][name] for name in names} | {name: facts[0][name] for name in ("device", "machines")}
    setup |= {name: parameters[name] for name in ("warm_up", "iterations", "quick", "plan")}
    setup |= {
        "seconds": seconds,
        "python": platform.python_version(),
        "environment": relevant(os.environ),
        "hosts": _hosts(chosen, ranks),
        "foreign_cpu_share": max(loads, default=None),
    }
    return {
        "benchmark": BENCHMARK,
        "schema": SCHEMA,
        "setup": setup,
        "backends": {name: {"absent": absent.get(name)} for name in backends},
        "cases": _flat(jobs, "cases", backends),
        "absent": _flat(jobs, "absent", backends),
    }


def _flat(jobs: list[dict[str, Any]], kind: str, backends: list[str]) -> list[dict[str, Any]]:
    """In the order of the plan, and within a line of it in that of the backends."""
    found = []
    for steps in zip(*(job["cases"] for job in jobs)):
        parts = [part for step in steps for part in step[kind]]
        found += sorted(parts, key=lambda part: backends.index(part["backend"]))
    return found


def _hosts(chosen: HostSelection, ranks: int) -> list[dict[str, Any]]:
    if chosen.hostfile is None:
        return [{"name": "localhost", "slots": ranks, "ips": [], "rdma": []}]
    return [
        {"name": host.name, "slots": host.slots, "ips": list(host.ips), "rdma": [list(row) for row in host.rdma]}
        for host in chosen.hosts()
    ]


def _run(
    chosen: HostSelection, ranks: int, backends: list[str], parameters: dict[str, Any], *, under_mpirun: bool = False
) -> dict[str, Any]:
    """One job; its first case is what the ranks say of themselves."""
    return run(
        "mlxdist.tools.bench.suite_rank",
        parameters | {"backends": backends},
        ranks,
        1 + len(parameters["plan"]),
        title="suite, under mpirun" if under_mpirun else "suite",
        under_mpirun=under_mpirun,
        variables=ONE_THREAD,
        chosen=chosen,
    )


def _run_mpi(chosen: HostSelection, ranks: int, parameters: dict[str, Any]) -> dict[str, Any]:
    if not has_mpirun():
        raise click.ClickException("there is no mpirun on the path (Debian: apt install openmpi-bin)")
    return _run(chosen, ranks, ["mpi"], parameters, under_mpirun=True)


def print_suite(results: dict[str, Any], console: Console) -> None:
    setup, names = results["setup"], backends_of(results)
    title = f"{setup['ranks']} ranks on {hosts_of(results)}; microseconds: median [range]"
    wide = console.width >= WIDTH + WIDTH_OF_BACKEND * len(names)
    table = Table(title=escape(title if wide else title.removesuffix(" [range]")))
    table.add_column("operation", no_wrap=True)  # words of the other columns can be broken
    for column in ("dtype", "size"):
        table.add_column(column, justify="right")
    for name in names:
        table.add_column(name, justify="right")
        table.add_column("GB/s", justify="right")
    for name in names[1:]:
        table.add_column(f"{name} / {names[0]}", justify="right")
    for column in LIMIT_COLUMNS if names else ():
        table.add_column(f"{names[0]} {column}", justify="right")
    for cases in by_name(results).values():
        first = next(iter(cases.values()))
        row = [first["operation"], first["dtype"], size_of(first)]
        for name in names:
            row += _cells(cases.get(name), wide)
        for name in names[1:]:
            ratio = times_of(cases.get(name), cases.get(names[0]))
            row.append("" if ratio is None else f"{ratio:.2f}")
        row += limits_of(cases.get(names[0]))
        table.add_row(*map(escape, row))
    console.print(table)
    for line in notes(results):
        console.print(line, markup=False, highlight=False)
    print_load(setup, console)


def _cells(case: dict[str, Any] | None, wide: bool) -> list[str]:
    if case is None:
        return ["-", ""]
    if case["refused"]:
        return ["refused", ""]
    times = spread(case["microseconds"])
    return [times if wide else times.partition(" ")[0], "" if case.get("tokens") else f"{case['gbps']:.2f}"]


def notes(results: dict[str, Any]) -> list[str]:
    """What a reader of the table has to know besides it."""
    setup = results["setup"]
    lines = [
        f"{setup['warm_up']} iterations to warm up, {setup['iterations']} timed, a barrier before each; the time of "
        "the slowest rank. GB/s: size over time.",
        f"mlxdist {setup['mlxdist']} on {setup['provider']}; MLX {setup['mlx']}; layers on the {setup['device']}.",
    ]
    lines += explain_limits([case for case in results["cases"] if case["operation"] not in COMPUTING])
    described = dict.fromkeys((c["operation"], c["described"]) for c in results["cases"] if c.get("described"))
    lines += [f"{operation}: {words}" for operation, words in described]
    lines += [f"{name} was not measured: {why['absent']}" for name, why in results["backends"].items() if why["absent"]]
    reasons: dict[tuple[str, str], list[str]] = {}
    for entry in results["absent"]:
        known = reasons.setdefault((entry["backend"], entry["why"]), [])
        if entry["operation"] not in known:
            known.append(entry["operation"])
    lines += [f"{backend} has no {', '.join(names)}: {why}" for (backend, why), names in reasons.items()]
    lines += [
        f"REFUSED: {case_name(case)} by {case['backend']}: {case['refused']}"
        for case in results["cases"]
        if case["refused"]
    ]
    return lines
