"""A sequence of mixed collectives with changing sizes: ranks that are more than the cores stay in step."""

import numpy as np

import mlxdist

group = mlxdist.init()
rank, size = group.rank(), group.size()


def value(r: int, count: int) -> np.ndarray:
    return (np.arange(count) % 1009 + r).astype(np.int64)


for turn, count in enumerate([1, 100, 5000, 3, 40_000, 0, 300_001, 17] * 3):
    inputs = [value(r, count) for r in range(size)]
    assert np.array_equal(mlxdist.all_sum(inputs[rank]), np.sum(inputs, axis=0))
    assert np.array_equal(mlxdist.all_gather(inputs[rank]), np.concatenate(inputs))
    assert np.array_equal(mlxdist.broadcast(inputs[rank], turn % size), inputs[turn % size])
    doubled = np.repeat(inputs[rank], size)
    assert np.array_equal(mlxdist.sum_scatter(doubled), np.repeat(np.sum(inputs, axis=0), size)[rank * count :][:count])
    mlxdist.barrier()
print("exact")
