"""One rank of test_topology.py. Arguments: "ring" (of cables, in MLXDIST_TOPOLOGY) or "line" (no ring)."""

import os
import sys
from pathlib import Path

import numpy as np

import mlxdist

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import reference

group = mlxdist.init()
rank, size = group.rank(), group.size()


def wired(a: int, b: int) -> bool:
    pairs = os.environ["MLXDIST_TOPOLOGY"].split(",")
    return f"{a}-{b}" in pairs or f"{b}-{a}" in pairs


def require(result: np.ndarray, expected: np.ndarray) -> None:
    assert reference.same(result, expected), (rank, result.shape, expected.shape)


def operations(group: mlxdist.Group, count: int) -> None:
    """Integers: any order of the sum gives the same."""
    me, n = group.rank(), group.size()
    inputs = [reference.distinct(count * n, "int32", r) for r in range(n)]
    x, root = inputs[me], n - 1
    total = reference.all_reduce(inputs, "int32")
    require(mlxdist.all_sum(x, group=group), total)
    require(mlxdist.sum_scatter(x, group=group), np.split(total, n)[me])
    require(mlxdist.all_gather(x, group=group), np.concatenate(inputs))
    require(mlxdist.broadcast(x, root, group=group), inputs[root])
    require(mlxdist.reduce(x, root=root, group=group), total if me == root else total[:0])
    require(mlxdist.gather(x, root=root, group=group), np.concatenate(inputs) if me == root else x[:0])
    require(mlxdist.scatter(x, root=root, group=group), np.split(inputs[root], n)[me])
    group.barrier()


def line() -> None:
    mlxdist.all_sum(np.ones(3))


def ring() -> None:
    for count in (0, 1, 1000, 300_001):
        operations(group, count)
    operations(group.split(0, key=-rank), 1000)
    # Neighbours alone are connected.
    neighbours = min(2, size - 1)
    assert group.stats()["slab_bytes"] <= neighbours * (2 << 20), group.stats()["slab_bytes"]
    x = np.arange(size * 3)
    if all(wired(a, b) for a in range(size) for b in range(a)):
        mlxdist.all_to_all(x)
    else:
        for other in range(size):
            if other != rank and not wired(rank, other):
                try:
                    mlxdist.send(x, other)
                except mlxdist.InvalidArgument as error:
                    assert "no link joins ranks" in str(error)
        try:
            mlxdist.all_to_all(x)
        except mlxdist.InvalidArgument as error:
            assert "needs a link between every two ranks" in str(error)
        else:
            raise AssertionError("all_to_all without all cables")
    print("exact")


try:
    {"ring": ring, "line": line}[sys.argv[1]]()
except mlxdist.Error as error:
    print(f"{type(error).__name__}: {error}")
    raise SystemExit(1) from None
