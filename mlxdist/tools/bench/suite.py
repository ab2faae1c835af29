"""`mlxdist bench suite`: all communication, by mlxdist and by MLX's own backends, on one machine or several."""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from mlxdist.base.output_file import OUTPUT_FILE

from .machine import describe_command
from .results import comparison_table, hosts_of
from .runner import ONE_THREAD, Report, Runner, benchmark, has_mpirun, require_package
from .sizes import SIZES, check_sizes, names_of, size_range, sized_cases

__all__ = ["plan", "suite"]

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


@benchmark()
@click.option("--only", type=names_of(MEASURED), default="all", metavar="A,B", help=f"Of {', '.join(MEASURED)}.")
@click.option(
    "--backends",
    type=names_of(BACKENDS),
    default="all",
    metavar="A,B",
    help=f"Of {', '.join(BACKENDS)}.  [default: all]",
)
@click.option("--sizes", type=SIZES, help="Sizes of operations.  [default: 4KiB to 16MiB, in steps of 4]")
@click.option("--quick", is_flag=True, help="Two sizes, 5 iterations: to see that it works.")
@click.option("--device", type=click.Choice(["auto", "cpu", "gpu"]), default="auto", help="Where layers compute.")
@click.option("--html", type=OUTPUT_FILE, help="Write a report with plots here.")
def suite(
    runner: Runner,
    only: list[str],
    backends: list[str],
    sizes: list[int] | None,
    quick: bool,
    device: str,
    html: Path | None,
) -> Report:
    """Time all communication between the ranks, by mlxdist and by MLX's own backends, and check every result.

    \b
        mlxdist bench suite --quick
        mlxdist bench suite --hostfile rmlx-hosts.json --output today.json --html today.html
        mlxdist bench compare yesterday.json today.json

    10 iterations to warm up, then 30 that count, a barrier before each; the time is that of the slowest rank, and of a
    message the time until it has arrived. Backends alternate in the same processes; Open MPI, which needs mpirun, has
    its own. docs/benchmarks.md says what each case is and how to read the numbers.

    The exit status is 1 if a result was wrong, a time is shorter than the memory allows, nothing could be measured, or
    a file could not be written; the table is printed all the same.
    """
    if sizes:
        check_sizes(sizes, [(name, dtype) for name in only for dtype in SIZED.get(name, ())], runner.ranks)
    if html:
        require_package("matplotlib", "bench")
    cases = plan(only, sizes or (QUICK_SIZES if quick else size_range(SMALLEST, LARGEST)), quick, runner.ranks)
    parameters = {"device": device, "quick": quick, "python": platform.python_version()}
    parameters["warm_up"] = QUICK_WARM_UP if quick else WARM_UP
    parameters["iterations"] = QUICK_ITERATIONS if quick else ITERATIONS
    results = _measure(runner, cases, backends, parameters)

    def write(path: Path) -> None:
        from .report import write_report

        write_report(results, path)

    return Report(results, _show, {html: write} if html else {})


def plan(only: list[str], sizes: list[int], quick: bool, ranks: int) -> list[dict[str, Any]]:
    """The cases: operation, dtype and bytes, or operation and tokens."""
    cases: list[dict[str, Any]] = []
    for operation in only:
        if operation in SIZED:
            cases += sized_cases([(operation, dtype) for dtype in SIZED[operation]], sizes, ranks)
        else:
            cases += [{"operation": operation, "tokens": count} for count in TOKENS[operation][: 1 if quick else None]]
    return cases


def _measure(
    runner: Runner, cases: list[dict[str, Any]], backends: list[str], parameters: dict[str, Any]
) -> dict[str, Any]:
    setup, begin = describe_command(), time.monotonic()
    jobs, absent = [], []
    target = "mlxdist.tools.bench.suite_workload:Suite"
    # Open MPI's ranks must be started by mpirun, so it has a job of its own.
    for names in [name for name in backends if name != "mpi"], [name for name in backends if name == "mpi"]:
        try:
            if "mpi" in names and not has_mpirun():
                raise click.ClickException("there is no mpirun on the path (Debian: apt install openmpi-bin)")
            if names:
                jobs.append(runner.job(target, cases, backends=names, variables=ONE_THREAD, **parameters))
        except click.ClickException as error:
            if "mpi" not in names or not jobs:
                raise
            absent.append({"variant": "mpi", "absent": error.message})
    device = jobs[0]["device"]
    results = runner.results(
        jobs, cases, setup | parameters | {"device": device, "seconds": time.monotonic() - begin, "backends": backends}
    )
    results["absent"] += absent
    return results


def _show(results: dict[str, Any], console: Console) -> None:
    console.print(comparison_table(results, f"{results['setup']['ranks']} ranks on {hosts_of(results)}", console))
