"""The algorithms of `mlxdist calibrate`: measures them, and chooses one for each operation and size."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import click
from rich.console import Console

from mlxdist.base import tables
from mlxdist.cluster.facts.collect import collect_here
from mlxdist.runtime.group.tuning import ALGORITHMS, MAX_BYTES, OPERATIONS, TUNED, Row

from ..bench.results import by_case, table_of
from ..bench.runner import Runner
from ..bench.sizes import size_range

__all__ = ["choose", "measure_algorithms", "measured_sizes", "show_algorithms"]

# Times whose ratio is smaller count as equal: then the built-in choice stays, or that of the next smaller size.
ALIKE = 1.1


def measure_algorithms(runner: Runner, smallest: int, largest: int) -> dict[str, Any]:
    """Measures each operation, size and algorithm. Returns the results of the benchmark runner."""
    sizes = measured_sizes(smallest, largest, runner.ranks)
    _check_memory(sizes[-1], runner.ranks)
    cases = [{"operation": name, "bytes": size} for name in TUNED if name != "barrier" for size in sizes]
    # A file or a variable of the user would replace the built-in choice, with which the algorithms are compared.
    variables = {"MLXDIST_TUNING_FILE": "none", "MLXDIST_ALGO": "auto"}
    runner = replace(runner, target="mlxdist.tools.calibrate.ranks:Algorithms")
    return runner.run([*cases, {"operation": "barrier"}], variables=variables, with_limits=True)


def measured_sizes(smallest: int, largest: int, ranks: int) -> list[int]:
    """The sizes of `size_range`, rounded up to a multiple of one element per rank."""
    unit = 4 * ranks
    return sorted({-(-size // unit) * unit for size in size_range(smallest, largest)})


def _check_memory(largest: int, ranks: int) -> None:
    """Raises click.BadParameter if the results of all_gather, and their expected values, do not fit into memory."""
    memory = collect_here().memory.total
    if memory is not None and (most := memory // (2 * ranks**2)) < largest:
        raise click.BadParameter(
            f"all_gather of {tables.size(largest)} by {ranks} ranks, and its check, takes {ranks} x {ranks} x 2 times "
            f"that, and this machine has {memory / (1 << 30):.0f} GiB; "
            f"write {tables.size(1 << (most.bit_length() - 1))} or less, or fewer ranks",
            param_hint="--max",
        )


def choose(results: dict[str, Any]) -> list[Row]:
    """The rows of the table: the fastest algorithm at each size, up to the geometric mean of it and the next size."""
    ranks, hosts = results["setup"]["ranks"], results["setup"]["host_count"]
    rows: list[Row] = []
    for operation in OPERATIONS:
        measured = [row for row in by_case(results) if _case(row)["operation"] == operation]
        best = None
        for row, following in zip(measured, [*measured[1:], None]):
            medians = {name: result["microseconds"]["median"] for name, result in row.items()}
            best = _fastest(medians, [next(iter(row.values()))["default"], best])
            # The geometric mean is the middle of two sizes, because sizes grow by factors.
            end = MAX_BYTES if following is None else math.isqrt(_case(row)["bytes"] * _case(following)["bytes"])
            if rows and (rows[-1].operation, rows[-1].algorithm) == (operation, best):
                rows.pop()
            rows.append(Row(operation, ranks, hosts, end, best))
    return rows


def _case(row: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return next(iter(row.values()))["case"]


def _fastest(medians: dict[str, float], preferred: list[str | None]) -> str:
    least = min(medians.values())
    for algorithm in preferred:
        if algorithm in medians and medians[algorithm] <= least * ALIKE:
            return algorithm
    return min(medians, key=medians.__getitem__)


def show_algorithms(results: dict[str, Any], console: Console, rows: list[Row]) -> None:
    lines = []
    for row in by_case(results):
        case = _case(row)
        size = case.get("bytes", 0)
        medians = [f"{row[name]['microseconds']['median']:.1f}" if name in row else "" for name in ALGORITHMS]
        best = next(r.algorithm for r in rows if r.operation == case["operation"] and size <= r.bytes)
        default = next(iter(row.values()))["default"]
        lines.append([case["operation"], tables.size(size) if size else "", *medians, default, best])
    columns = ["operation", "input", *ALGORITHMS, "by default", "in the file"]
    setup = results["setup"]
    title = f"{setup['ranks']} ranks, hosts: {setup['host_count']}; microseconds per operation: median"
    console.print(table_of(title, columns, lines))
