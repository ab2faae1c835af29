"""`mlxdist bench tune`: measures which algorithm is fastest, by operation and size, and saves the tuning table."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from mlxdist.base.environment import MAX_RANKS, Environment
from mlxdist.base.errors import EnvironmentVariableError, InvalidArgument
from mlxdist.base.output_file import OUTPUT_FILE, is_written, try_to_open
from mlxdist.runtime import tuning

from .job import QUIET_ADVICE, foreign_load, print_load, results_console, run, write_results
from .limits import limits_line
from .sizes import Size, format_size, size_range

# Algorithms whose times differ by less are alike: then the built-in choice stays, or that of the next smaller size.
ALIKE = 1.1
SIZELESS = "barrier"


@click.command()
@click.option("-n", "ranks", type=click.IntRange(2, MAX_RANKS), default=2, show_default=True, help="Number of ranks.")
@click.option("--min", "smallest", type=Size(), default="1KiB", show_default=True, help="Smallest input.")
@click.option("--max", "largest", type=Size(), default="16MiB", show_default=True, help="Largest input, in steps of 4.")
@click.option("--rounds", type=click.IntRange(3, 1000), default=9, show_default=True, help="Blocks measured per case.")
@click.option(
    "--table",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to save to [default: MLXDIST_TUNING_FILE, else ~/.config/mlxdist/tuning.json].",
)
@click.option("--force", is_flag=True, help="Save what was measured while other processes used the CPU, too.")
@click.option("--json", "as_json", is_flag=True, help="Print the measurements as JSON.")
@click.option("--output", type=OUTPUT_FILE, help="Also write them as JSON here.")
def tune(
    ranks: int,
    smallest: int,
    largest: int,
    rounds: int,
    table: Path | None,
    force: bool,
    as_json: bool,
    output: Path | None,
) -> None:
    """Find the fastest algorithm of each operation, by size, and save them for later jobs.

    The table is for this number of ranks; what it says of other numbers is kept. Jobs read it on rank 0, from the file
    that MLXDIST_TUNING_FILE names or from the default one.

    The exit status is 1, and nothing is saved, if other processes used more than 5 % of the CPU meanwhile (--force
    saves all the same), or if a file cannot be written.
    """
    if smallest > largest:
        raise click.BadParameter(f"{format_size(smallest)} is more than --max", param_hint="--min")
    sizes = measured_sizes(smallest, largest, ranks)
    _check_memory(sizes[-1], ranks)
    path = table or _configured_path()
    try:
        old = tuning.read(path) if path.exists() else []
    except InvalidArgument as error:
        raise click.ClickException(f"{error} (or remove the file)") from None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try_to_open(path)
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error.strerror}; name another file with --table") from None
    parameters = {"sizes": sizes, "rounds": rounds, "sizeless": SIZELESS}
    steps = (len(tuning.TUNED) - 1) * len(sizes) + 1
    variables = {
        "MLXDIST_TUNING_FILE": "none",
        "MLXDIST_ALGO": "auto",
    }  # both would be mistaken for the built-in choice
    module = "mlxdist.tools.bench.tune_rank"
    results = run(module, parameters, ranks, steps, title="tune", variables=variables)
    rows = choose(results["cases"], ranks)
    results |= {"benchmark": "tune", "table": str(path), "rows": [vars(row) for row in rows]}
    refused = None if force else foreign_load(results)
    saved = not refused and is_written(path, lambda path: tuning.write(path, tuning.merge(old, rows)))
    written = write_results(results, as_json, output, _print)
    if refused:
        click.echo(f"Error: nothing is saved to {path}: {refused}; {QUIET_ADVICE}", err=True)
    elif saved and not as_json:
        click.echo(f"Saved to {path}.")
    sys.exit(0 if saved and written else 1)


def measured_sizes(smallest: int, largest: int, ranks: int) -> list[int]:
    """Those of `size_range`, rounded up to an element of each rank's part."""
    unit = 4 * ranks
    return sorted({-(-size // unit) * unit for size in size_range(smallest, largest)})


def _check_memory(largest: int, ranks: int) -> None:
    """Raises click.BadParameter where the results of all_gather, and what they must be, do not fit into memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if (most := memory // (2 * ranks**2)) < largest:
        raise click.BadParameter(
            f"all_gather of {format_size(largest)} by {ranks} ranks, and its check, takes {ranks} x {ranks} x 2 times "
            f"that, and this machine has {memory / (1 << 30):.0f} GiB; "
            f"write {format_size(1 << (most.bit_length() - 1))} or less, or fewer ranks",
            param_hint="--max",
        )


def _configured_path() -> Path:
    try:
        setting = Environment.read(os.environ).tuning_file
    except EnvironmentVariableError as error:
        raise click.ClickException(str(error)) from None
    if setting == "none":
        raise click.ClickException("MLXDIST_TUNING_FILE=none: there is no file to save to; unset it, or give --table")
    return Path(setting) if setting else tuning.default_path()


def choose(cases: list[dict[str, Any]], ranks: int) -> list[tuning.Row]:
    """The rows of the table: the fastest algorithm at each size, up to the middle between it and the next size."""
    rows: list[tuning.Row] = []
    for operation in tuning.TUNED:
        measured = sorted((case for case in cases if case["operation"] == operation), key=lambda case: case["bytes"])
        chosen = None
        for case, following in zip(measured, [*measured[1:], None]):
            chosen = _fastest(case["microseconds"], [case["default"], chosen])
            end = tuning.MAX_BYTES if following is None else math.isqrt(case["bytes"] * following["bytes"])
            if rows and (rows[-1].operation, rows[-1].algorithm) == (operation, chosen):
                rows.pop()
            rows.append(tuning.Row(operation, ranks, end, chosen))
    return rows


def _fastest(medians: dict[str, float], preferred: list[str | None]) -> str:
    least = min(medians.values())
    for algorithm in preferred:
        if algorithm in medians and medians[algorithm] <= least * ALIKE:
            return algorithm
    return min(medians, key=medians.__getitem__)


def _print(results: dict[str, Any]) -> None:
    console = results_console()
    console.print(limits_line(results["limits"]))
    table = Table(title=f"{results['ranks']} ranks, {results['provider']}; microseconds per operation: median")
    table.add_column("operation")
    table.add_column("input", justify="right")
    for name in tuning.ALGORITHMS:
        table.add_column(name, justify="right")
    table.add_column("by default")
    table.add_column("in the table")
    for case in results["cases"]:
        medians = case["microseconds"]
        shown = [f"{medians[name]:.1f}" if name in medians else "" for name in tuning.ALGORITHMS]
        size = "" if case["operation"] == SIZELESS else format_size(case["bytes"])
        chosen = next(
            row["algorithm"]
            for row in results["rows"]
            if row["operation"] == case["operation"] and case["bytes"] <= row["bytes"]
        )
        table.add_row(case["operation"], size, *shown, case["default"], chosen)
    console.print(table)
    print_load(results, console)
