"""`mlxdist bench collectives`: time, bandwidth and correctness of every operation over sizes and dtypes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from mlxdist.base.output_file import OUTPUT_FILE
from mlxdist.cluster.hostfile.options import HostSelection, host_options

from .bandwidth import OPERATIONS
from .job import RANKS_OPTION, number_of_ranks, print_load, results_console, run, write_results
from .limits import LIMIT_COLUMNS, NARROW, explain_limits, limit_cells, times_limits
from .sizes import Size, check_range, check_sizes, format_size, size_range

DTYPES = (
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "bfloat16", "float32", "float64", "complex64",
)  # fmt: skip


class Names(click.ParamType):
    """Names separated by commas, each of them known; "all" is all of them."""

    name = "names"

    def __init__(self, known: tuple[str, ...]) -> None:
        self.known = known

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        names = list(self.known) if value == "all" else list(dict.fromkeys(value.split(",")))
        for name in names:
            if name not in self.known:
                self.fail(f"{name!r} is not one of {', '.join(self.known)}", param, ctx)
        return names


@click.command()
@RANKS_OPTION
@host_options
@click.option("--op", "operations", type=Names(tuple(OPERATIONS)), default="all", help="Operations [default: all].")
@click.option("--dtype", "dtypes", type=Names(DTYPES), default="float32", show_default=True, help="dtypes, or all.")
@click.option("--sizes", type=Size(many=True), help="These sizes, not those of --min and --max: 4KiB,1MiB.")
@click.option("--min", "smallest", type=Size(), default="4KiB", show_default=True, help="Smallest size.")
@click.option("--max", "largest", type=Size(), default="64MiB", show_default=True, help="Largest size, in steps of 4.")
@click.option(
    "--level",
    type=click.Choice(["mlx", "engine"]),
    default="mlx",
    show_default=True,
    help="Lazy operations on mx.array, up to 64 KiB 50 in a graph; or eager calls on NumPy arrays.",
)
@click.option("--rounds", type=click.IntRange(3, 1000), default=15, show_default=True, help="Blocks measured per case.")
@click.option("--pin/--no-pin", "pinned", default=True, help="Keep each rank on a core of its own, or not.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.option("--output", type=OUTPUT_FILE, help="Also write the results as JSON here.")
def collectives(
    chosen: HostSelection,
    ranks: int | None,
    operations: list[str],
    dtypes: list[str],
    sizes: list[int] | None,
    smallest: int,
    largest: int,
    level: str,
    rounds: int,
    pinned: bool,
    as_json: bool,
    output: Path | None,
) -> None:
    """Time the operations between ranks of this machine, or of several hosts, and check their results.

    Operations: all_sum, all_gather, sum_scatter, broadcast, all_to_all, send_recv (a message to and fro, time of one
    way). algbw and busbw are those of nccl-tests. Blocks of the operation alternate with the machine's own limits for
    as many bytes: from one core to another, and a plain copy by all ranks at once. Sizes from --min to --max are
    rounded down to what has a part for each rank; those of --sizes are measured as they are, or rejected.

    The exit status is 1 if an element was wrong, a time is shorter than the memory allows, or the file is not written.
    """
    chosen, ranks = number_of_ranks(chosen, ranks)
    if sizes is None and smallest > largest:
        raise click.BadParameter(f"{format_size(smallest)} is more than --max", param_hint="--min")
    cases = [(operation, dtype) for operation in operations for dtype in dtypes]
    check_sizes(sizes, cases, ranks) if sizes else check_range(smallest, cases, ranks)
    parameters = {
        "operations": operations,
        "dtypes": dtypes,
        "sizes": sizes or size_range(smallest, largest),
        "level": level,
        "rounds": rounds,
        "pinned": pinned,
    }
    steps = len(cases) * len(parameters["sizes"])
    module = "mlxdist.tools.bench.collectives_rank"
    results = run(module, parameters, ranks, steps, title="collectives", chosen=chosen)
    results |= {"benchmark": "collectives", "level": level, "rounds": rounds}
    results["cases"] = [withhold(case) for case in results["cases"]]
    written = write_results(results, as_json, output, _print)
    sys.exit(1 if not written or any(case["wrong"] or case["refused"] for case in results["cases"]) else 0)


def withhold(case: dict[str, Any]) -> dict[str, Any]:
    """The case without its numbers, if they cannot be: nobody shall find them in a file."""
    if not case["refused"]:
        return case
    return case | {"microseconds": None, "algbw": None, "busbw": None} | times_limits(None, case)


def _print(results: dict[str, Any]) -> None:
    console = results_console()
    where = f"{results['ranks']} ranks, level {results['level']}, {results['provider']}"
    title = f"{where}; times in microseconds, bandwidths in GB/s"
    table = Table(title=title, padding=(0, int(console.width >= NARROW)))
    for column in ("operation", "dtype"):
        table.add_column(column, no_wrap=True)
    for column in ("size", "algorithm", "median", "p99", "algbw", "busbw", "#wrong", *LIMIT_COLUMNS):
        table.add_column(column, justify="right", overflow="fold")  # a narrow terminal loses no digit
    for case in results["cases"]:
        row = [case["operation"], case["dtype"], format_size(case["bytes"]), case["algorithm"]]
        if case["refused"]:
            row += ["refused", "", "", "", str(case["wrong"])]
        else:
            times = case["microseconds"]
            row += [f"{times['median']:.1f}", f"{times['p99']:.1f}", f"{case['algbw']:.2f}", f"{case['busbw']:.2f}"]
            row += [str(case["wrong"]), *limit_cells(times["median"], case)]
        table.add_row(*row)
    console.print(table)
    if any(case["chain"] > 1 for case in results["cases"]):
        console.print("Up to 64 KiB, 50 operations are evaluated as one graph; times are those of one operation.")
    for line in explain_limits(results["cases"]):
        console.print(line)
    for case in results["cases"]:
        if case["refused"]:
            console.print(f"Refused: {case['refused']}.")
        if case["wrong"]:
            where = f"{case['operation']} of {format_size(case['bytes'])} {case['dtype']}"
            console.print(f"WRONG: {where}: {case['wrong']} elements of all ranks together are not what they must be.")
    print_load(results, console)
