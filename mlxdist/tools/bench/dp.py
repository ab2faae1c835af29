"""`mlxdist bench dp`: how much of the gradients' communication is hidden behind the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from rich.console import Console

from .results import Result, Target, by_case, case_name, comparison_table
from .runner import ONE_THREAD, Report, Runner, benchmark
from .sizes import SIZE, format_size

__all__ = ["dp", "targets"]

OVERLAPPED, AFTER, ALONE = "overlapped", "after", "alone"
HIDDEN = 0.6


@benchmark(repeats=9)
@click.option("--layers", type=click.IntRange(1, 256), default=12, show_default=True, help="Linear layers.")
@click.option("--dims", type=click.IntRange(16, 8192), default=768, show_default=True, help="In and out of a layer.")
@click.option("--rows", type=click.IntRange(1, 65536), default=4, show_default=True, help="Of a rank's batch.")
@click.option("--bucket", type=SIZE, default="8MiB", show_default=True, help="all_reduce_size.")
def dp(runner: Runner, layers: int, dims: int, rows: int, bucket: int) -> Report:
    """Time a step of data-parallel training in float32 on the CPU, with one thread that computes on each rank.

    Gradients by train.value_and_grad, whose messages travel while the backward pass goes on ("overlapped");
    by nn.value_and_grad and then average_gradients ("after"); and by nn.value_and_grad without any message ("alone").
    Hidden is (after - overlapped) / (after - alone). Communication needs a core, too: each rank has an equal
    share of its host's, and what it has beyond one is free for that.

    The exit status is 1 if a result was wrong, a time is shorter than the memory allows, or a file is not written.
    """
    cases = [{"operation": "step", "layers": layers, "dims": dims, "rows": rows, "bucket": bucket}]
    target = "mlxdist.tools.bench.gradient_overlap:GradientOverlap"
    results = runner.run(target, cases, with_limits=True, variables=ONE_THREAD)
    results["targets"] = [target.judged() for target in targets(results)]
    return Report(results, _show)


def targets(results: dict[str, Any]) -> list[Target]:
    wanted = f"{HIDDEN:.0%} of the communication hidden or more"
    return [Target(_name(row), wanted, hidden(row), HIDDEN, at_least=True) for row in by_case(results)]


def hidden(row: dict[str, Result]) -> float | None:
    """The share of the communication; None where nothing of it was to be seen, or a time was refused."""
    times = {name: result["microseconds"] for name, result in row.items()}
    if not all(times.values()):
        return None
    overlapped, after, alone = (times[name]["median"] for name in (OVERLAPPED, AFTER, ALONE))
    return (after - overlapped) / (after - alone) if after > alone else None


def _name(row: dict[str, Result]) -> str:
    free = row[ALONE]["free_cores"]
    return f"{case_name(row[ALONE]['case'])}; {free} {'core' if free == 1 else 'cores'} of each rank free"


def _show(results: dict[str, Any], console: Console) -> None:
    row = by_case(results)[0]
    title = f"a step on {results['setup']['ranks']} ranks, {format_size(row[ALONE]['gradient_bytes'])} of gradients"
    columns: dict[str, Callable[..., str]] = {"hidden": _percent, "free cores": _free}
    console.print(comparison_table(results, title, console, OVERLAPPED, (AFTER, ALONE), columns))


def _percent(row: dict[str, Result]) -> str:
    share = hidden(row)
    return "-" if share is None else f"{share:.0%}"


def _free(row: dict[str, Result]) -> str:
    return str(row[ALONE]["free_cores"])
