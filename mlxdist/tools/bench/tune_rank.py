"""What each rank of `mlxdist bench tune` runs: every algorithm of every operation, in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import mlxdist
from mlxdist.runtime.native import check, ffi, lib
from mlxdist.runtime.tuning import ALGORITHMS, MAX_BYTES, TUNED, Row

from .job import serve
from .operations import Inputs, add, count_wrong, total_wrong
from .timing import Work, interleave, quantiles, slowest

DTYPE = "float32"
ROOT = 0


def measure(world: mlxdist.Group, parameters: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Parameters: sizes (bytes of the input; each rank's part is whole elements), rounds, sizeless (the operation that
    has none).
    """
    for operation in TUNED:
        for size in [0] if operation == parameters["sizeless"] else parameters["sizes"]:
            yield _case(world, operation, size, parameters["rounds"])


def _case(world: mlxdist.Group, operation: str, size: int, rounds: int) -> dict[str, Any]:
    elements = size // 4
    call, wrong = _operation(world, operation, elements)
    tune(world, [])
    default = world.algorithm(operation, elements * 4)
    works = {}
    for algorithm in ALGORITHMS:
        row = Row(operation, world.size(), MAX_BYTES, algorithm)
        tune(world, [row])
        if world.algorithm(operation, elements * 4) != algorithm:
            continue  # the operation does not have it
        call()
        if count := total_wrong(wrong(), world):
            raise RuntimeError(f"{operation} of {elements} elements by {algorithm}: {count} elements are wrong")
        works[algorithm] = Work(call, before=lambda row=row: tune(world, [row]))
    blocks = interleave(works, rounds, world)
    tune(world, [])
    # The mean of a block: what is sent ahead in one call shows in the next.
    medians = {name: quantiles(slowest(taken.mean(axis=1), world))["median"] for name, taken in blocks.items()}
    return {"operation": operation, "bytes": elements * 4, "default": default, "microseconds": medians}


def tune(world: mlxdist.Group, rows: list[Row]) -> None:
    """Replaces the table of the group. All ranks do so between the same two operations."""
    table = ffi.new("mlxdist_tuning[]", [row.native() for row in rows])
    check(lib.mlxdist_group_set_tuning(world._native, table, len(rows)))


def _operation(world: mlxdist.Group, operation: str, elements: int) -> tuple[Callable[[], object], Callable[[], int]]:
    """The call to time, and a function that counts the wrong elements after it."""
    if operation == "barrier":
        return world.barrier, lambda: 0
    wholes = Inputs(DTYPE, elements, world.size())
    rank, size = world.rank(), world.size()
    x, total = wholes[rank], add(wholes)
    if operation == "broadcast":
        x = wholes[rank].copy()
        return lambda: mlxdist.broadcast(x, ROOT, group=world, out=x), lambda: count_wrong(x, wholes[ROOT])
    expected = {
        "all_reduce": lambda: total,
        "all_gather": lambda: np.concatenate(list(wholes)),
        "reduce_scatter": lambda: total.reshape(size, -1)[rank],
        "reduce": lambda: total if rank == ROOT else np.zeros_like(total),
    }[operation]()
    out = np.zeros_like(expected)
    calls = {
        "all_reduce": lambda: mlxdist.all_reduce(x, "sum", group=world, out=out),
        "all_gather": lambda: mlxdist.all_gather(x, group=world, out=out),
        "reduce_scatter": lambda: mlxdist.reduce_scatter(x, "sum", group=world, out=out),
        "reduce": lambda: mlxdist.reduce(x, "sum", ROOT, group=world, out=out if rank == ROOT else None),
    }
    return calls[operation], lambda: count_wrong(out, expected)


if __name__ == "__main__":
    serve(measure, limits=True)
