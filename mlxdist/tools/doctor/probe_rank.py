"""A rank of the doctor's job: checks values, and measures the link between each pair of hosts.

Its argument is JSON: {"hosts": for each rank the number of its host, "links": whether to measure them}. Rank 0 prints
one line of JSON after `MARK`.
"""

import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np

import mlxdist
from mlxdist.base.json_reader import parse_json
from mlxdist.runtime.group.group import engine_of

from ..bench.operations import Inputs, add, count_wrong
from ..calibrate.links import measure_link

__all__ = ["MARK", "main", "rounds"]

MARK = "mlxdist-doctor-result:"  # of late_rank.py, too
# bfloat16 arrays hold the bits as uint16, because NumPy has no such dtype.
_DTYPES = ("float32", "float16", "bfloat16", "int32")
_ELEMENTS = (1, 1000, 262_147)
_ONE_BY_ONE = 8  # up to this number of hosts each pair has the network to itself
_ROUND_TRIPS = 60
_WARM_UP = 10
_SECONDS, _BLOCKS = 0.5, (1, 3)  # for one direction of a pair


def main() -> None:
    parameters = parse_json(sys.argv[1])
    world = mlxdist.init()
    wrong, tested = _values(world)
    hosts: Sequence[int] = parameters["hosts"]
    leaders = [hosts.index(host) for host in range(max(hosts) + 1)]
    links = _links(world, leaders) if parameters["links"] and len(leaders) > 1 else []
    if world.rank() == 0:
        found = {"wrong": wrong, "tested": tested, "provider": world.provider, "reason": world.provider_reason}
        print(MARK + json.dumps(found | {"links": links}), flush=True)


def _values(world: mlxdist.Group) -> tuple[list[str], int]:
    """Checks sums of every dtype and size on all ranks. Returns the errors, and the number of sums."""
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
    """All pairs of ``count`` hosts, once each: one at a time, or, with many hosts, as many at a time as possible."""
    if count <= _ONE_BY_ONE:
        yield from ([pair] for pair in itertools.combinations(range(count), 2))
        return
    # The circle method of round-robin tournaments: the first host stays in place, the others rotate.
    ring = list(range(count)) + [-1] * (count % 2)
    for _ in range(len(ring) - 1):
        pairs = zip(ring[: len(ring) // 2], reversed(ring[len(ring) // 2 :]))
        yield [(min(pair), max(pair)) for pair in pairs if -1 not in pair]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def _links(world: mlxdist.Group, leaders: Sequence[int]) -> list[list[float]]:
    """[from, to, microseconds one way, bytes per second, `Path`, fields of `Ports`] for each pair of hosts, in both
    directions; on every rank."""
    count = len(leaders)
    found = np.zeros((count, count, 5))
    native_group = engine_of(world).world.native_group
    for pairs in rounds(count):
        world.barrier()
        for pair in pairs:
            ends = [leaders[host] for host in pair]
            if world.rank() not in ends:
                continue
            latency = _latency(world, *ends)
            for source, target in (pair, pair[::-1]):
                link = measure_link(world, leaders[source], leaders[target], _SECONDS, _BLOCKS)
                if link is None:
                    continue
                if link["wrong"]:
                    what = f"what rank {world.rank()} has received from rank {leaders[source]} is not what was sent"
                    raise RuntimeError(what)
                peer = leaders[source]
                path, ports = native_group.paths[peer], native_group.ports[peer]
                # on one rank, so the sum has each once
                found[source, target] = latency * 1e6, link["median"] * 1e9, path, *ports
    found = mlxdist.all_sum(found, group=world)
    return [[a, b, *map(float, found[a, b])] for a in range(count) for b in range(count) if a != b]


def _latency(world: mlxdist.Group, a: int, b: int) -> float:
    """The latency in seconds: half of the median round trip of 8 bytes."""
    first, peer = world.rank() == a, b if world.rank() == a else a
    data, taken = np.zeros(8, np.uint8), []
    for _ in range(_WARM_UP + _ROUND_TRIPS):
        begin = time.perf_counter()
        if first:
            mlxdist.send(data, peer, group=world)
        mlxdist.recv_like(data, peer, group=world, out=data)
        if not first:
            mlxdist.send(data, peer, group=world)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[_WARM_UP:]) / 2


if __name__ == "__main__":
    main()
