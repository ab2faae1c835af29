"""`mlxdist bench checkpoint`: what a save costs the steps of a training."""

from __future__ import annotations

import tempfile
from typing import Any

import click
from rich.console import Console

from mlxdist.base.user_path import UserPath

from .results import Target, by_case, case_name, comparison_table
from .runner import ONE_THREAD, Report, Runner, benchmark
from .sizes import multiples_of

__all__ = ["checkpoint", "targets"]

STEPS, ASYNCHRONOUS, WAITING = "no save", "asynchronous", "waiting"
LOST = 0.05  # of the time of a step


@benchmark(repeats=7, two_ranks_here=True)
@click.option("--hidden", type=multiples_of(8), default="1024", show_default=True, help="Widths of the layers.")
@click.option("--layers", type=click.IntRange(1, 64), default=4, show_default=True, help="Linear layers of a model.")
@click.option("--rows", type=click.IntRange(1, 65536), default=8, show_default=True, help="Of a batch of one rank.")
@click.option("--steps", type=click.IntRange(1, 10000), default=20, show_default=True, help="For each save.")
@click.option("--directory", type=UserPath(file_okay=False), help="Where to save.  [default: a temporary one]")
def checkpoint(runner: Runner, hidden: list[int], layers: int, rows: int, steps: int, directory: str | None) -> Report:
    """Time data-parallel steps of two ranks of this machine, with AdamW in float32, without a save and with one.

    "asynchronous": a save before the first step is written while the steps go on; "waiting": the steps wait for it.
    Both make one checkpoint of model and optimizer for --steps steps, and all times are of one step. The last
    checkpoint is loaded and compared. With --pin, a rank's thread that writes shares the core with its steps.

    The exit status is 1 if an element was wrong, or the file is not written.
    """
    cases = [{"operation": "step", "hidden": size, "layers": layers, "rows": rows, "steps": steps} for size in hidden]
    target = "mlxdist.tools.bench.checkpoint_saves:CheckpointSaves"
    with tempfile.TemporaryDirectory(prefix="mlxdist-bench-", dir=directory) as path:
        results = runner.run(target, cases, variables=ONE_THREAD, directory=path)
    results["targets"] = [target.judged() for target in targets(results)]
    return Report(results, _show)


def targets(results: dict[str, Any]) -> list[Target]:
    return [
        Target(
            f"{case_name(row[STEPS]['case'])}: step time lost", f"{LOST:.0%} or less", _lost(row, ASYNCHRONOUS), LOST
        )
        for row in by_case(results)
    ]


def _lost(row: dict[str, dict[str, Any]], name: str) -> float | None:
    """The share by which the save makes a step longer."""
    saving, plain = row[name]["microseconds"], row[STEPS]["microseconds"]
    return saving["median"] / plain["median"] - 1 if saving and plain else None


def _show(results: dict[str, Any], console: Console) -> None:
    columns = {
        "MB saved": lambda row: f"{row[ASYNCHRONOUS]['saved'] / 1e6:.0f}",
        "lost": lambda row: f"{_lost(row, ASYNCHRONOUS) or 0:.1%}",
        "lost, waiting": lambda row: f"{_lost(row, WAITING) or 0:.1%}",
    }
    console.print(comparison_table(results, "a step of two ranks", console, ASYNCHRONOUS, (STEPS, WAITING), columns))
