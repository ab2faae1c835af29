"""`mlxdist bench collectives`: time, bandwidth and correctness of every operation over sizes and dtypes."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console

from mlxdist.base import tables

from .bandwidth import OPERATIONS, bandwidths, least_copies
from .benchmark import Benchmark
from .limits import LIMIT_COLUMNS, NARROW, limit_cells
from .operations import CASES, Eager, Inputs, Lazy, storage
from .results import Results, table_of
from .runner import Runner
from .sizes import SIZE, SIZES, check_range, check_sizes, names_of, size_range, sized_cases
from .timing import Work
from .workload import OURS, BenchmarkWorkload

__all__ = ["Collectives", "collectives"]

APIS = {"mlx": Lazy, "engine": Eager}
DTYPES = (
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "bfloat16", "float32", "float64", "complex64",
)  # fmt: skip


class Collectives(BenchmarkWorkload):
    """Cases: operation, dtype, bytes. Parameters: api ("mlx", "engine")."""

    def __call__(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        world, operation, dtype, size = self.world, CASES[case["operation"]], case["dtype"], case["bytes"]
        data = Inputs(dtype, size // storage(dtype).itemsize, world.size())
        called = APIS[self.parameters["api"]](operation, data, world)
        copies = least_copies(case["operation"], world.size())
        work = Work(called.call, called.operations, wrong=called.count_wrong, copies=copies)
        results = self.time(case, {OURS: work}, moved=size)
        algorithm = world.algorithm(case["operation"], called.input_bytes) if operation.choice else "direct"
        described = {"chain": called.chain, "algorithm": algorithm}
        return [result | described | bandwidths(result, world.size()) for result in results]


def _show(results: Results, console: Console) -> None:
    rows = []
    for result in results["cases"]:
        case, times = result["case"], result["microseconds"]
        row = [case["operation"], case["dtype"], tables.size(case["bytes"]), result["algorithm"]]
        speeds = [f"{result[name]:.2f}" for name in ("algbw", "busbw")] if times else ["", ""]
        row += [f"{times[name]:.1f}" for name in ("median", "p99")] if times else ["refused", ""]
        rows.append([*row, *speeds, str(result["wrong"]), *limit_cells(result)])
    columns = ["operation", "dtype", "size", "algorithm", "median", "p99", "algbw", "busbw", "#wrong", *LIMIT_COLUMNS]
    title = f"{results['setup']['ranks']} ranks, API {results['setup']['api']}; microseconds, bandwidths in GB/s"
    console.print(table_of(title, columns, rows, padding=(0, int(console.width >= NARROW))))
    if any(result["chain"] > 1 for result in results["cases"]):
        console.print("Up to 64 KiB, 50 operations are evaluated as one graph; times are those of one operation.")


@Benchmark(Collectives, show=_show, repeats=15, parameters={})
@click.option("--op", "operations", type=names_of(tuple(OPERATIONS)), default="all", help="Operations [default: all].")
@click.option("--dtype", "dtypes", type=names_of(DTYPES), default="float32", show_default=True, help="dtypes, or all.")
@click.option("--sizes", type=SIZES, help="These sizes, not those of --min and --max: 4KiB,1MiB.")
@click.option("--min", "smallest", type=SIZE, default="4KiB", show_default=True, help="Smallest size.")
@click.option("--max", "largest", type=SIZE, default="64MiB", show_default=True, help="Largest size, in steps of 4.")
@click.option(
    "--api",
    type=click.Choice(["mlx", "engine"]),
    default="mlx",
    show_default=True,
    help="Lazy operations on mx.array, up to 64 KiB 50 in a graph; or eager calls on NumPy arrays.",
)
def collectives(
    runner: Runner,
    operations: list[str],
    dtypes: list[str],
    sizes: list[int] | None,
    smallest: int,
    largest: int,
    api: str,
) -> Results:
    """Time the operations between ranks of this machine, or of several hosts, and check their results.

    Operations: all_sum, all_max, all_gather, sum_scatter, broadcast, reduce, gather, scatter, all_to_all, all_to_all_v
    (parts of two sizes), send_recv (a message to and fro, time of one way). algbw and busbw are those of nccl-tests.
    Blocks of the operation alternate with the machine's own limits for as many bytes: from one core to another, and a
    plain copy by all ranks at once. Sizes from --min to --max are rounded down to what has a part for each rank; those
    of --sizes are measured as they are, or rejected.

    The exit status is 1 if an element was wrong, a time is shorter than the memory allows, or the file is not written.
    """
    if sizes is None and smallest > largest:
        raise click.BadParameter(f"{tables.size(smallest)} is more than --max", param_hint="--min")
    kinds = [(operation, dtype) for operation in operations for dtype in dtypes]
    check_sizes(sizes, kinds, runner.ranks) if sizes else check_range(smallest, kinds, runner.ranks)
    cases = sized_cases(kinds, sizes or size_range(smallest, largest), runner.ranks)
    return runner.run(cases, api=api)
