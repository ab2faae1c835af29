"""What the ranks of `mlxdist bench collectives` and `fragmentation` measure; see rank.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import mlxdist

from .bandwidth import algorithm_bandwidth, bus_bandwidth, least_copies
from .operations import CASES, Eager, Inputs, Lazy, add, count_wrong, storage
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


class Fragmentation:
    """Cases: operation, dtype, bytes; each gives two results, one message and several. Parameters: messages,
    repeats."""

    def __init__(self, world: mlxdist.Group, parameters: dict[str, Any]) -> None:
        self.world, self.messages = world, parameters["messages"]
        self.take = partial(interleave, repeats=parameters["repeats"])

    def __call__(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        world = self.world
        make, expected = FRAGMENTED[case["operation"]]
        data = Inputs(case["dtype"], case["bytes"] // 4, world.size())
        x, out, wanted = data[world.rank()], np.zeros(data.elements, np.float32), expected(data, world.rank())
        works, counters = {}, {}
        for count in (1, self.messages):
            call = make(world, np.array_split(x, count), np.array_split(out, count))
            out.fill(np.nan)
            before = world.stats()
            call()
            after = world.stats()
            counters[count] = {name: after[name] - before[name] for name in after}
            first = count_wrong(out, wanted)
            works[str(count)] = Work(call, wrong=partial(self._wrong, out, wanted, first))
        results = time_case(world, case, works, self.take, moved=x.nbytes)
        return [
            result | {"variant": OURS, "case": case | {"messages": count}, "counters": counters[count]}
            for count, result in zip(counters, results)
        ]

    @staticmethod
    def _wrong(out: np.ndarray, wanted: np.ndarray, first: int) -> int:
        """Of the first pass and of the last one."""
        return first + count_wrong(out, wanted)


def _stream(world: mlxdist.Group, given: list[np.ndarray], received: list[np.ndarray]) -> Callable[[], None]:
    """Rank 0 sends all messages to rank 1, which sends one back when it has the last."""
    reply = np.zeros(1, np.float32)

    def sender() -> None:
        for message in given:
            mlxdist.send(message, 1, group=world)
        mlxdist.recv_like(reply, 1, group=world, out=reply)

    def receiver() -> None:
        for message in received:
            mlxdist.recv_like(message, 0, group=world, out=message)
        mlxdist.send(reply, 0, group=world)

    return {0: sender, 1: receiver}.get(world.rank(), lambda: None)


def _sums(world: mlxdist.Group, given: list[np.ndarray], received: list[np.ndarray]) -> Callable[[], None]:
    def sums() -> None:
        for message, out in zip(given, received):
            mlxdist.all_sum(message, group=world, out=out)

    return sums


def _received(data: Inputs, rank: int) -> np.ndarray:
    """What `_stream` leaves: ranks that take no part keep what the array was filled with."""
    return data[0] if rank == 1 else np.full(data.elements, np.nan, np.float32)


# Name: what makes the call, and what is in the output after it.
FRAGMENTED = {"send_recv": (_stream, _received), "all_sum": (_sums, lambda data, rank: add(data))}
