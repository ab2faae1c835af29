"""One rank of the job that measures links. Argument: seconds for all of it. Rank 0 prints what was found, as JSON.

One pair of ranks after the other, each way by itself. A block of messages begins when the receiver asks for it and ends
when it has the last one, so that nothing is under way when its clock starts. Then it looks at every byte.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

import mlxdist
from mlxdist.base.environment import Environment

from ..bench.timing import ForeignLoad

__all__ = ["main"]

BYTES = 4 << 20
MESSAGES = 4  # in a block
LEAST, MOST = 3, 50  # blocks that count, after one that does not
FIGURES = ("median", "min", "max", "wrong", "memcpy")


def main() -> None:
    seconds = float(sys.argv[1])
    world = mlxdist.init()
    ranks, rank = world.size(), world.rank()
    wires = Environment.read().topology
    pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b and (wires is None or (a, b) in wires)]
    foreign = ForeignLoad(world)
    found = np.zeros((ranks, ranks, len(FIGURES)))
    for source, target in pairs:
        world.barrier()
        if rank == source:
            _send(target)
        elif rank == target:
            found[source, target] = _receive(source, seconds / len(pairs))
    found = mlxdist.all_sum(found)
    share = foreign.share()
    if rank == 0:
        links = [{"from": a, "to": b} | dict(zip(FIGURES, map(float, found[a, b]))) for a, b in pairs]
        provider = f"{world.provider}: {world.provider_reason}"
        print(json.dumps({"links": links, "provider": provider, "foreign_cpu_share": share}), flush=True)


def _messages(target: int) -> list[np.ndarray]:
    """Those of a block: each another one, and another one to each rank."""
    numbers = np.arange(BYTES // 4, dtype=np.uint32)
    return [numbers * np.uint32(2 * target + 1) + np.uint32(number) for number in range(MESSAGES)]


def _send(target: int) -> None:
    messages, more = _messages(target), np.zeros(1, np.int32)
    while mlxdist.recv((1,), np.int32, target, out=more)[0]:
        for message in messages:
            mlxdist.send(message, target)


def _receive(source: int, seconds: float) -> tuple[float, ...]:
    """GB/s: median, least and most of the blocks; wrong elements; GB/s at which this rank copies as much, at best."""
    expected = _messages(mlxdist.init().rank())
    got = [np.empty_like(message) for message in expected]
    clock, times, wrong = time.perf_counter, [], 0
    end = clock() + seconds
    while len(times) < 1 + LEAST or (clock() < end and len(times) < MOST):
        for array in got:
            array.fill(0xFFFFFFFF)
        begin = clock()
        mlxdist.send(np.ones(1, np.int32), source)
        for array in got:
            mlxdist.recv(array.shape, array.dtype, source, out=array)
        times.append(clock() - begin)
        wrong += sum(int(np.sum(a != b)) for a, b in zip(got, expected))
    mlxdist.send(np.zeros(1, np.int32), source)
    rates = BYTES * MESSAGES / 1e9 / np.array(times[1:])
    return float(np.median(rates)), float(rates.min()), float(rates.max()), float(wrong), _memcpy(expected, got)


def _memcpy(source: list[np.ndarray], target: list[np.ndarray]) -> float:
    times = []
    for _ in range(LEAST):
        begin = time.perf_counter()
        for a, b in zip(source, target):
            np.copyto(b, a)
        times.append(time.perf_counter() - begin)
    return BYTES * MESSAGES / 1e9 / min(times)


if __name__ == "__main__":
    main()
