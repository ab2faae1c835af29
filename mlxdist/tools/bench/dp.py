"""`mlxdist bench dp`: how much of the gradients' communication is hidden behind the backward pass."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import click
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

import mlxdist
from mlxdist.base import tables

from .benchmark import Benchmark
from .operations import count_off
from .results import Comparison, Results, Row, Target, by_case, case_name
from .runner import Runner
from .sizes import SIZE
from .timing import CORES, Work
from .workload import BenchmarkWorkload, evaluated

__all__ = ["GradientOverlap", "dp", "targets"]

OVERLAPPED, AFTER, ALONE = "overlapped", "after", "alone"
HIDDEN = 0.6
TOLERANCE = 1e-5  # of the largest element: the same sums, in float32


class GradientOverlap(BenchmarkWorkload):
    """Cases: operation "step", layers, dims, rows, bucket. Parameters: pinned."""

    blocks = {"calls": 1}

    def __init__(self, world: mlxdist.Group, parameters: dict[str, Any]) -> None:
        super().__init__(world, parameters)
        fewest = len(CORES) // world.size()
        if parameters["pinned"] and hasattr(os, "sched_setaffinity"):
            # The runner keeps a rank on one core, its communication, too. Threads that begin later have these.
            cores = CORES[world.rank() % len(CORES) :: world.size()]
            os.sched_setaffinity(0, cores)
            fewest = len(cores)
        self.free = int(mlxdist.all_min(np.array([max(0, fewest - 1)]), group=world)[0])

    def __call__(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        mx.random.seed(0)
        dims = case["dims"]
        model = nn.Sequential(*(nn.Linear(dims, dims, bias=False) for _ in range(case["layers"])))
        x = mx.random.normal((case["rows"], dims), key=mx.random.key(self.world.rank()))
        mx.eval(model.parameters(), x)

        def loss(x: mx.array) -> mx.array:
            return mx.square(model(x)).mean()

        how: dict[str, Any] = {"group": self.world, "all_reduce_size": case["bucket"]}
        alone, overlapped = nn.value_and_grad(model, loss), mlxdist.train.value_and_grad(model, loss, **how)

        def after() -> Any:
            found = alone(x)[1]
            mx.eval(found)
            return mlxdist.average_gradients(found, **how)

        calls: dict[str, Callable[[], Any]] = {
            OVERLAPPED: lambda: overlapped(x)[1],
            AFTER: after,
            ALONE: lambda: alone(x)[1],
        }
        expected, got = (dict(tree_flatten(calls[name]())) for name in (AFTER, OVERLAPPED))
        wrong = sum(count_off(array, TOLERANCE, got[path]) for path, array in expected.items())
        nbytes = sum(array.nbytes for array in expected.values())
        del expected, got
        works = {name: Work(evaluated(call), wrong=wrong, copies=1) for name, call in calls.items()}
        counted = {"free_cores": self.free, "gradient_bytes": nbytes}
        return self.time(case, works, copied=nbytes, more=dict.fromkeys(works, counted))


def targets(results: Results) -> list[Target]:
    wanted = f"{HIDDEN:.0%} of the communication hidden or more"
    return [Target(_name(row), wanted, hidden(row), HIDDEN, at_least=True) for row in by_case(results)]


def hidden(row: Row) -> float | None:
    """The hidden share of the communication; None if the communication took no time, or a time was refused."""
    times = {name: result["microseconds"] for name, result in row.items()}
    if not all(times.values()):
        return None
    overlapped, after, alone = (times[name]["median"] for name in (OVERLAPPED, AFTER, ALONE))
    return (after - overlapped) / (after - alone) if after > alone else None


def _name(row: Row) -> str:
    free = row[ALONE]["free_cores"]
    return f"{case_name(row[ALONE]['case'])}; {free} {'core' if free == 1 else 'cores'} of each rank free"


def _title(results: Results) -> str:
    nbytes = results["cases"][0]["gradient_bytes"]
    return f"a step on {results['setup']['ranks']} ranks, {tables.size(nbytes)} of gradients"


def _percent(row: Row) -> str:
    share = hidden(row)
    return "-" if share is None else f"{share:.0%}"


@Benchmark(
    GradientOverlap,
    show=Comparison(
        _title,
        OVERLAPPED,
        (AFTER, ALONE),
        {"hidden": _percent, "free cores": lambda row: str(row[ALONE]["free_cores"])},
    ),
    targets=targets,
    repeats=9,
)
@click.option("--layers", type=click.IntRange(1, 256), default=12, show_default=True, help="Linear layers.")
@click.option("--dims", type=click.IntRange(16, 8192), default=768, show_default=True, help="In and out of a layer.")
@click.option("--rows", type=click.IntRange(1, 65536), default=4, show_default=True, help="Of a rank's batch.")
@click.option("--bucket", type=SIZE, default="8MiB", show_default=True, help="all_reduce_size.")
def dp(runner: Runner, layers: int, dims: int, rows: int, bucket: int) -> Results:
    """Time a step of data-parallel training in float32 on the CPU, with one thread that computes on each rank.

    Gradients by train.value_and_grad, whose messages travel while the backward pass goes on ("overlapped");
    by nn.value_and_grad and then average_gradients ("after"); and by nn.value_and_grad without any message ("alone").
    Hidden is (after - overlapped) / (after - alone). Communication needs a core, too: each rank has an equal
    share of its host's, and what it has beyond one is free for that.

    The exit status is 1 if a result was wrong, a time is shorter than the memory allows, or a file is not written.
    """
    return runner.run([{"operation": "step", "layers": layers, "dims": dims, "rows": rows, "bucket": bucket}])
