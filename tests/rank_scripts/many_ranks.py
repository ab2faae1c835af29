"""A sequence of mixed collectives with changing sizes: ranks that are more than the cores stay in step."""

import numpy as np

import mlxdist

group = mlxdist.init()
rank, size = group.rank(), group.size()


def value(r: int, count: int) -> np.ndarray:
    return (np.arange(count) % 1009 + r).astype(np.int64)


def value_of_part(r: int, count: int) -> np.ndarray:
    """What rank r sends to this one of its array in which each element stands `size` times."""
    return np.repeat(value(r, count), size)[rank * count : (rank + 1) * count]


for turn, count in enumerate([1, 100, 5000, 3, 40_000, 0, 300_001, 17] * 3):
    inputs = [value(r, count) for r in range(size)]
    assert np.array_equal(mlxdist.all_sum(inputs[rank]), np.sum(inputs, axis=0))
    assert np.array_equal(mlxdist.all_gather(inputs[rank]), np.concatenate(inputs))
    assert np.array_equal(mlxdist.broadcast(inputs[rank], turn % size), inputs[turn % size])
    doubled = np.repeat(inputs[rank], size)
    assert np.array_equal(mlxdist.sum_scatter(doubled), np.repeat(np.sum(inputs, axis=0), size)[rank * count :][:count])
    root = (turn + 3) % size
    reduced = mlxdist.reduce(inputs[rank], "max", root)
    assert np.array_equal(reduced, inputs[-1] if rank == root else inputs[0][:0])
    gathered = mlxdist.gather(inputs[rank], root)
    assert np.array_equal(gathered, np.concatenate(inputs) if rank == root else inputs[0][:0])
    parts = np.concatenate([value(r, count) for r in range(size)]) if rank == root else np.zeros(count * size, np.int64)
    assert np.array_equal(mlxdist.scatter(parts, root), inputs[rank])
    assert np.array_equal(mlxdist.all_to_all(doubled), np.concatenate([value_of_part(r, count) for r in range(size)]))
    to, source = (rank + turn) % size, (rank - turn) % size
    if to != rank:
        assert np.array_equal(mlxdist.sendrecv(inputs[rank], to, source), inputs[source])
    mlxdist.barrier()
print("exact")
