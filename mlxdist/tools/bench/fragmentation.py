"""`mlxdist bench fragmentation`: what it costs to send the same bytes as many messages instead of one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from mlxdist.base.output_file import OUTPUT_FILE
from mlxdist.cluster.hostfile.options import HostSelection, host_options

from .job import RANKS_OPTION, number_of_ranks, print_load, results_console, run, write_results
from .limits import LIMIT_COLUMNS, NARROW, explain_limits, limit_cells
from .sizes import Size, format_size

SHOWN = ("messages_sent", "header_bytes_sent", "payload_bytes_sent", "control_messages_sent")


@click.command()
@RANKS_OPTION
@host_options
@click.option("--bytes", "size", type=Size(), default="16MiB", show_default=True, help="Bytes in all.")
@click.option("--pieces", type=click.IntRange(2, 100_000), default=1000, show_default=True, help="Messages, not one.")
@click.option("--rounds", type=click.IntRange(3, 1000), default=9, show_default=True, help="Blocks measured per case.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.option("--output", type=OUTPUT_FILE, help="Also write the results as JSON here.")
def fragmentation(
    chosen: HostSelection, ranks: int | None, size: int, pieces: int, rounds: int, as_json: bool, output: Path | None
) -> None:
    """Send the same bytes as 1 message and as 1000, with send and recv and with all_sum.

    Times are those of all the bytes; the counters are rank 0's, for one pass over all the bytes.
    """
    chosen, ranks = number_of_ranks(chosen, ranks)
    if size % 4:
        raise click.BadParameter(f"{format_size(size)} are no whole number of float32", param_hint="--bytes")
    if size // 4 < pieces:
        problem = f"{format_size(size)} are too few for {pieces} pieces of float32"
        raise click.BadParameter(problem, param_hint="--bytes")
    parameters = {"bytes": size, "pieces": pieces, "rounds": rounds}
    module = "mlxdist.tools.bench.fragmentation_rank"
    results = run(module, parameters, ranks, 4, title="fragmentation", chosen=chosen) | {"benchmark": "fragmentation"}
    written = write_results(results, as_json, output, _print)
    sys.exit(1 if not written or any(case["wrong"] for case in results["cases"]) else 0)


def _print(results: dict[str, Any]) -> None:
    console = results_console()
    first = results["cases"][0]
    where = f"{results['ranks']} ranks, {results['provider']}"
    title = f"{where}; {format_size(first['bytes'])} of float32 in all; times in microseconds"
    table = Table(title=title, padding=(0, int(console.width >= NARROW)))
    table.add_column("operation", no_wrap=True)
    sent = ("messages", "headers", "payload", "control")
    for column in ("pieces", "median", "p99", "times as one", *sent, "#wrong", *LIMIT_COLUMNS):
        table.add_column(column, justify="right", overflow="fold")  # a narrow terminal loses no digit
    for case in results["cases"]:
        whole = next(c for c in results["cases"] if c["operation"] == case["operation"] and c["pieces"] == 1)
        whole_time = whole["microseconds"]["median"]
        times, counted = case["microseconds"], case["counters"]
        table.add_row(
            case["operation"],
            str(case["pieces"]),
            f"{times['median']:.0f}",
            f"{times['p99']:.0f}",
            f"{times['median'] / whole_time:.2f}",
            *(str(counted[name]) for name in SHOWN),
            str(case["wrong"]),
            *limit_cells(times["median"], case),
        )
    console.print(table)
    for line in explain_limits(results["cases"]):
        console.print(line)
    console.print("messages, headers and payload (bytes), control messages: sent by rank 0 in one pass over all bytes.")
    print_load(results, console)
