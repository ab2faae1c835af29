"""What each rank of the doctor's job runs: are the values right, and how fast is each pair of hosts.

Its argument is JSON: {"hosts": for each rank the number of its host, "links": whether to measure them}. Rank 0 prints
one line of JSON behind `MARK`.
"""

import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np

import mlxdist

from ..bench.operations import Inputs, add, count_wrong

__all__ = ["MARK", "main", "rounds"]

MARK = "mlxdist-doctor-result:"
# bfloat16 as its bits.
_DTYPES = ("float32", "float16", "bfloat16", "int32")
_ELEMENTS = (1, 1000, 262_147)
_ONE_BY_ONE = 8  # up to this number of hosts each pair has the network to itself
_ROUND_TRIPS = 60
_WARM_UP = 10
_BYTES = 4 << 20
_MESSAGES = 6
_SECONDS = 0.5  # for one direction of a pair, if it is so slow that not all messages fit in


def main() -> None:
    parameters = json.loads(sys.argv[1])
    world = mlxdist.init()
    wrong, tested = _values(world)
    hosts: Sequence[int] = parameters["hosts"]
    leaders = [hosts.index(host) for host in range(max(hosts) + 1)]
    links = _links(world, leaders) if parameters["links"] and len(leaders) > 1 else []
    if world.rank() == 0:
        found = {"wrong": wrong, "tested": tested, "provider": world.provider, "reason": world.provider_reason}
        print(MARK + json.dumps(found | {"links": links}), flush=True)


def _values(world: mlxdist.Group) -> tuple[list[str], int]:
    """Sums of every dtype and size, and the largest of every rank's number; what was wrong, of all ranks together."""
    wrong, tested = [], 0
    for dtype, elements in itertools.product(_DTYPES, _ELEMENTS):
        inputs = Inputs(dtype, elements, world.size())
        bits = "bfloat16" if dtype == "bfloat16" else None
        result = mlxdist.all_sum(inputs[world.rank()], group=world, dtype=bits)
        counts = mlxdist.all_gather(np.array([count_wrong(result, add(inputs))], np.int64), group=world)
        tested += 1
        for rank in np.flatnonzero(counts):
            wrong.append(f"all_sum of {elements} {dtype}: {counts[rank]} elements are wrong on rank {rank}")
    return wrong, tested


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """All pairs of ``count`` hosts, each once: one after the other, or of many hosts as many at once as can be."""
    if count <= _ONE_BY_ONE:
        yield from ([pair] for pair in itertools.combinations(range(count), 2))
        return
    # The circle method: one stays, the others move on.
    ring = list(range(count)) + [-1] * (count % 2)
    for _ in range(len(ring) - 1):
        pairs = zip(ring[: len(ring) // 2], reversed(ring[len(ring) // 2 :]))
        yield [(min(pair), max(pair)) for pair in pairs if -1 not in pair]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def _links(world: mlxdist.Group, leaders: Sequence[int]) -> list[list[float]]:
    """[from, to, microseconds one way, bytes a second] for each pair of hosts, both ways; on every rank."""
    count = len(leaders)
    found = np.zeros((count, count, 2))
    for pairs in rounds(count):
        world.barrier()
        for a, b in pairs:
            if world.rank() in (leaders[a], leaders[b]):
                first = world.rank() == leaders[a]
                peer = leaders[b] if first else leaders[a]
                latency = _latency(world, peer, first)
                there = _bandwidth(world, peer, first, latency)
                back = _bandwidth(world, peer, not first, latency)
                if first:  # one of both, so that the sum below has each once
                    found[a, b], found[b, a] = (latency * 1e6, there), (latency * 1e6, back)
    found = mlxdist.all_sum(found, group=world)
    return [[a, b, *map(float, found[a, b])] for a in range(count) for b in range(count) if a != b]


def _latency(world: mlxdist.Group, peer: int, first: bool) -> float:
    """Seconds one way: half of the median round trip of 8 bytes. The same on both sides."""
    data, taken = np.zeros(8, np.uint8), []
    for _ in range(_WARM_UP + _ROUND_TRIPS):
        begin = time.perf_counter()
        if first:
            mlxdist.send(data, peer, group=world)
        mlxdist.recv_like(data, peer, group=world, out=data)
        if not first:
            mlxdist.send(data, peer, group=world)
        taken.append(time.perf_counter() - begin)
    return _agree(world, peer, first, statistics.median(taken[_WARM_UP:]) / 2)


def _bandwidth(world: mlxdist.Group, peer: int, sends: bool, latency: float) -> float:
    """Bytes a second in one direction. The clock stops when the receiver has confirmed that it has all."""
    data = np.arange(_BYTES, dtype=np.uint32).astype(np.uint8)
    receive, done = np.zeros_like(data), np.zeros(1, np.uint8)
    messages = 1
    for last in (False, True):  # the first one warms up, and says how many fit into the time
        begin = time.perf_counter()
        for _ in range(messages):
            if sends:
                mlxdist.send(data, peer, group=world)
            else:
                mlxdist.recv_like(receive, peer, group=world, out=receive)
        if sends:
            mlxdist.recv_like(done, peer, group=world, out=done)
        else:
            mlxdist.send(done, peer, group=world)
        took = _agree(world, peer, sends, time.perf_counter() - begin)
        if last:
            break
        messages = max(1, min(_MESSAGES, int(_SECONDS / took)))
    if not sends and not np.array_equal(receive, data):
        raise RuntimeError(f"what rank {world.rank()} has received from rank {peer} is not what was sent")
    return messages * _BYTES / max(took - latency, 1e-9)


def _agree(world: mlxdist.Group, peer: int, sends: bool, value: float) -> float:
    """The value of the side that sends it, on both."""
    agreed = np.array([value])
    if sends:
        mlxdist.send(agreed, peer, group=world)
    else:
        mlxdist.recv_like(agreed, peer, group=world, out=agreed)
    return float(agreed[0])


if __name__ == "__main__":
    main()
