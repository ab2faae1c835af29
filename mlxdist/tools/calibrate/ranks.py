"""Measurements by the ranks of `mlxdist calibrate`: links, algorithms, exchanges of tokens; see `bench.workload`."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlxdist
from mlxdist.base.environment import Environment
from mlxdist.nn.expert_parallel.links import RankLinks
from mlxdist.nn.expert_parallel.policy import SMALL, calibrate
from mlxdist.runtime.group.group import engine_of
from mlxdist.runtime.group.tuning import ALGORITHMS, MAX_BYTES, Row
from mlxdist.runtime.native import check, ffi, lib

from ..bench.operations import CASES, SAME_AS, Eager, Inputs
from ..bench.timing import Work, copy_work, exchange
from ..bench.workload import BenchmarkWorkload
from .links import MESSAGE_BYTES, measure_link

__all__ = ["Algorithms", "ExpertLinks", "Links"]

DTYPE = "float32"
BLOCKS = (3, 50)  # of messages over a link
COPIES = 3


class Links(BenchmarkWorkload):
    """Measures links. A case has source and target; ``parameters`` has the seconds for each."""

    def __init__(self, world: mlxdist.Group, parameters: dict[str, Any]) -> None:
        super().__init__(world, parameters)
        self.pairs = Environment.read().topology

    def __call__(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        """The link, and the speed of a copy of as many bytes by the receiver; empty where the two are not adjacent."""
        source, target = case["source"], case["target"]
        if self.pairs is not None and (source, target) not in self.pairs:
            return []
        self.world.barrier()
        found = measure_link(self.world, source, target, self.parameters["seconds"], BLOCKS)
        if found is not None:
            found["memcpy"] = MESSAGE_BYTES / 1e3 / min(copy_work(MESSAGE_BYTES).block(COPIES))
        return [case | exchange(found, self.world)[target]]


class Algorithms(BenchmarkWorkload):
    """Measures algorithms. A case has operation and, except for barrier, bytes."""

    def __init__(self, world: mlxdist.Group, parameters: dict[str, Any]) -> None:
        super().__init__(world, parameters)
        self.summary["host_count"] = engine_of(world).hosts

    def __call__(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        """A result for each algorithm of the operation, with the default algorithm; empty where there is one alone, or
        none, in a ring of cables."""
        operation, size, world = case["operation"], case.get("bytes", 0), self.world
        # Without a table, the engine reports its built-in choice.
        self._tune([])
        default = world.algorithm(operation, size)
        if default == "auto":
            return []
        called = None
        if operation != "barrier":
            called = Eager(CASES[SAME_AS.get(operation, operation)], Inputs(DTYPE, size // 4, world.size()), world)
        call = called.call if called else world.barrier
        works = {}
        for algorithm in ALGORITHMS:
            row = Row(operation, world.size(), self.summary["host_count"], MAX_BYTES, algorithm)
            self._tune([row])
            if world.algorithm(operation, size) != algorithm:
                continue  # the operation does not have it
            wrong = called.try_once() if called else 0
            works[algorithm] = Work(call, before=partial(self._tune, [row]), wrong=wrong)
        results = self.time(case, works, means=True) if len(works) > 1 else []
        self._tune([])
        return [result | {"default": default} for result in results]

    def _tune(self, rows: list[Row]) -> None:
        """Replaces the table of the group. All ranks do so between the same two operations."""
        table = ffi.new("mlxdist_tuning[]", [row.native() for row in rows])
        check(lib.mlxdist_group_set_tuning(engine_of(self.world).native, table, len(rows)))


class ExpertLinks(BenchmarkWorkload):
    """Measures exchanges of tokens, by `mlxdist.nn.expert_parallel.policy.calibrate`. Its only case has no fields."""

    def __call__(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        """The costs in the group of all ranks; then in groups of equal sizes, neighbors each, as the ranks of a stage
        are: all groups of a size at once, of those of a kind the slowest."""
        world, links = self.world, RankLinks.of(group=self.world)
        slowest: dict[tuple[str, int, int], dict[str, Any]] = {}
        for size in (size for size in range(world.size(), 1, -1) if world.size() % size == 0):
            first = world.rank() - world.rank() % size
            found = calibrate(group=world.split(first))
            costs = {name: vars(cost) for name, cost in found.costs.items()}
            entry = dict(zip(("provider", "ranks", "hosts"), links.shape(range(first, first + size))))
            for other in exchange(entry | {"plan": found.plan, "costs": costs}, world):
                shape = other["provider"], other["ranks"], other["hosts"]
                slowest[shape] = max(slowest.get(shape, other), other, key=_of_a_row)
        return list(slowest.values())


def _of_a_row(link: dict[str, Any]) -> float:
    """Seconds in which ranks add up a row of a decode step, most of which is latency."""
    cost = link["costs"]["all_sum"]
    return float(cost["latency"] + SMALL / cost["bandwidth"])
