"""What the ranks of `mlxdist bench collectives` measure; see rank.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlxdist

from .bandwidth import algorithm_bandwidth, bus_bandwidth, least_copies
from .operations import CASES, Eager, Inputs, Lazy, storage
from .rank import time_case
from .timing import Work, interleave

OURS = "mlxdist"
APIS = {"mlx": Lazy, "engine": Eager}


class Collectives:
    """Cases: operation, dtype, bytes. Parameters: api ("mlx", "engine"), repeats."""

    def __init__(self, world: mlxdist.Group, parameters: dict[str, Any]) -> None:
        self.world, self.api = world, APIS[parameters["api"]]
        self.take = partial(interleave, repeats=parameters["repeats"])

    def __call__(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        operation, dtype, size, ranks = CASES[case["operation"]], case["dtype"], case["bytes"], self.world.size()
        called = self.api(operation, Inputs(dtype, size // storage(dtype).itemsize, ranks), self.world)
        copies = least_copies(case["operation"], ranks)
        work = Work(called.call, called.operations, wrong=called.count_wrong, copies=copies)
        results = time_case(self.world, case, {OURS: work}, self.take, moved=size)
        algorithm = self.world.algorithm(case["operation"], called.input_bytes) if operation.choice else "direct"
        return [
            result | {"chain": called.chain, "algorithm": algorithm} | bandwidths(result, ranks) for result in results
        ]


def bandwidths(result: dict[str, Any], ranks: int, operation: str | None = None) -> dict[str, float | None]:
    """algbw and busbw of a result; ``operation``: its name in bandwidth.py, where that is another one."""
    size, times = result["case"]["bytes"], result["microseconds"]
    if not times:
        return {"algbw": None, "busbw": None}
    bus = bus_bandwidth(operation or result["case"]["operation"], ranks, size, times["median"])
    return {"algbw": algorithm_bandwidth(size, times["median"]), "busbw": bus}
