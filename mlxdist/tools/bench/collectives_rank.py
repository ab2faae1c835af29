"""What each rank of `mlxdist bench collectives` runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlxdist

from .bandwidth import algorithm_bandwidth, bus_bandwidth, impossible
from .job import serve
from .limits import times_limits
from .limits_rank import limit_works, take_limits
from .operations import CASES, Inputs, storage, total_wrong
from .sizes import unit_of
from .through import Eager, Lazy
from .timing import Work, interleave, quantiles, slowest

LEVELS = {"mlx": Lazy, "engine": Eager}


def measure(world: mlxdist.Group, parameters: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Parameters: operations, dtypes, sizes (bytes), level ("mlx", "engine"), rounds."""
    for operation in parameters["operations"]:
        for dtype in parameters["dtypes"]:
            for size in parameters["sizes"]:
                yield _case(world, operation, dtype, size, parameters["level"], parameters["rounds"])


def _case(world: mlxdist.Group, operation: str, dtype: str, size: int, level: str, rounds: int) -> dict[str, Any]:
    case, unit = CASES[operation], unit_of(operation, dtype, world.size())
    size = size // unit * unit
    elements = size // storage(dtype).itemsize
    through = LEVELS[level](case, Inputs(dtype, elements, world.size()), world)
    works = {"operation": Work(through.call, through.operations)} | limit_works(size, world)
    times = {name: quantiles(slowest(taken, world)) for name, taken in interleave(works, rounds, world).items()}
    limits = take_limits(times)
    median = times["operation"]["median"]
    return {
        "operation": operation,
        "dtype": dtype,
        "bytes": size,
        "chain": through.chain,
        "algorithm": world.algorithm(operation, through.input_bytes) if case.choice else "direct",
        "microseconds": times["operation"],
        **limits,
        "algbw": algorithm_bandwidth(size, median),
        "busbw": bus_bandwidth(operation, world.size(), size, median),
        **times_limits(median, limits),
        "wrong": total_wrong(through.count_wrong(), world),
        "refused": impossible(operation, world.size(), size, median, limits["memcpy"]["min"]),
    }


if __name__ == "__main__":
    serve(measure)
