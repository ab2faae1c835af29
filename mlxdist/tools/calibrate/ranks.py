"""What the ranks of `mlxdist calibrate` measure: links, algorithms, and exchanges of tokens; see `bench.rank`."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np

import mlxdist
from mlxdist.base.environment import Environment
from mlxdist.nn.experts.policy import calibrate
from mlxdist.runtime.native import check, ffi, lib
from mlxdist.runtime.tuning import ALGORITHMS, MAX_BYTES, Row

from ..bench.operations import CASES, SAME_AS, Eager, Inputs
from ..bench.rank import time_case
from ..bench.timing import Work, copy_work, exchange, interleave

__all__ = ["Algorithms", "ExpertLinks", "Links"]

DTYPE = "float32"
LINK_BYTES = 4 << 20
MESSAGES = 4  # in a block
MIN_BLOCKS, MAX_BLOCKS = 3, 50  # that count, after one that does not


class Links:
    """Cases: source and target. Parameters: seconds for each.

    A block of messages begins when the receiver asks for it and ends when it has the last one, so that nothing is under
    way when its clock starts. Then the receiver looks at every byte.
    """

    def __init__(self, world: mlxdist.Group, parameters: dict[str, Any]) -> None:
        self.world, self.seconds = world, parameters["seconds"]
        self.pairs = Environment.read().topology

    def __call__(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        """The link as the receiver saw it; none where the two are not adjacent."""
        source, target = case["source"], case["target"]
        if self.pairs is not None and (source, target) not in self.pairs:
            return []
        found = None
        self.world.barrier()
        if self.world.rank() == source:
            self._send(target)
        elif self.world.rank() == target:
            found = self._receive(source)
        return [case | exchange(found, self.world)[target]]

    def _messages(self, target: int) -> list[np.ndarray]:
        """Those of a block: each another one, and another one to each rank."""
        numbers = np.arange(LINK_BYTES // 4, dtype=np.uint32)
        return [numbers * np.uint32(2 * target + 1) + np.uint32(number) for number in range(MESSAGES)]

    def _send(self, target: int) -> None:
        messages, more = self._messages(target), np.zeros(1, np.int32)
        while mlxdist.recv((1,), np.int32, target, out=more)[0]:
            for message in messages:
                mlxdist.send(message, target)

    def _receive(self, source: int) -> dict[str, float]:
        """GB/s of the blocks and of a copy of as much by this rank, at best; wrong elements."""
        expected = self._messages(self.world.rank())
        got = [np.empty_like(message) for message in expected]
        clock, wrong = time.perf_counter, 0
        times: list[float] = []
        end = clock() + self.seconds
        while len(times) < 1 + MIN_BLOCKS or (clock() < end and len(times) < MAX_BLOCKS):
            for array in got:
                array.fill(0xFFFFFFFF)
            begin = clock()
            mlxdist.send(np.ones(1, np.int32), source)
            for array in got:
                mlxdist.recv(array.shape, array.dtype, source, out=array)
            times.append(clock() - begin)
            wrong += sum(int(np.sum(a != b)) for a, b in zip(got, expected))
        mlxdist.send(np.zeros(1, np.int32), source)
        rates = LINK_BYTES * MESSAGES / 1e9 / np.array(times[1:])
        memcpy = LINK_BYTES / 1e3 / min(copy_work(LINK_BYTES).block(MIN_BLOCKS))
        spread = {"median": np.median(rates), "min": rates.min(), "max": rates.max(), "memcpy": memcpy}
        return {name: float(value) for name, value in spread.items()} | {"wrong": wrong}


class Algorithms:
    """Cases: operation, and bytes of the input for all but a barrier. Parameters: repeats."""

    def __init__(self, world: mlxdist.Group, parameters: dict[str, Any]) -> None:
        self.world = world
        self.take = partial(interleave, repeats=parameters["repeats"])

    def __call__(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        """A result for each algorithm that the operation has, with the one that it has by default."""
        operation, size, world = case["operation"], case.get("bytes", 0), self.world
        called = None
        if operation != "barrier":
            called = Eager(CASES[SAME_AS.get(operation, operation)], Inputs(DTYPE, size // 4, world.size()), world)
        call = called.call if called else world.barrier
        self._tune([])
        default = world.algorithm(operation, size)
        works = {}
        for algorithm in ALGORITHMS:
            row = Row(operation, world.size(), MAX_BYTES, algorithm)
            self._tune([row])
            if world.algorithm(operation, size) != algorithm:
                continue  # the operation does not have it
            wrong = called.try_once() if called else 0
            works[algorithm] = Work(call, before=partial(self._tune, [row]), wrong=partial(int, wrong))
        results = time_case(world, case, works, self.take, means=True)
        self._tune([])
        return [result | {"default": default} for result in results]

    def _tune(self, rows: list[Row]) -> None:
        """Replaces the table of the group. All ranks do so between the same two operations."""
        table = ffi.new("mlxdist_tuning[]", [row.native() for row in rows])
        check(lib.mlxdist_group_set_tuning(self.world._native, table, len(rows)))


class ExpertLinks:
    """One case, without fields: what `mlxdist.nn.experts.policy.calibrate` measures."""

    def __init__(self, world: mlxdist.Group, parameters: dict[str, Any]) -> None:
        self.world = world

    def __call__(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        link = calibrate(self.world)
        costs = {name: vars(cost) for name, cost in link.costs.items()}
        return [{"provider": link.provider, "ranks": link.ranks, "plan": link.plan, "costs": costs}]
