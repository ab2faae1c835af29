"""One rank of test_group.py: prints how each operation moves its data, after it has moved some."""

import numpy as np

import mlxdist

group = mlxdist.init()
rank, size = group.rank(), group.size()
x = np.arange(30_000.0).reshape(3, 10_000) + rank
total = sum(np.arange(30_000.0).reshape(3, 10_000) + r for r in range(size))

assert np.array_equal(mlxdist.all_sum(x), total)
assert np.array_equal(mlxdist.reduce_scatter(x), np.split(total, size)[rank])
assert np.array_equal(mlxdist.all_gather(x)[3:6], x - rank + 1)
assert np.array_equal(mlxdist.broadcast(x, 2), x - rank + 2)
reduced = mlxdist.reduce(x, root=1)
assert np.array_equal(reduced, total if rank == 1 else total[:0])
gathered = mlxdist.gather(x[0], root=1)
assert np.array_equal(gathered, np.concatenate([x[0] - rank + r for r in range(size)]) if rank == 1 else x[0][:0])
assert np.array_equal(mlxdist.scatter(x, root=2), np.split(x - rank + 2, size)[rank])
mlxdist.barrier()
for name in ("all_sum", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter", "barrier"):
    print(name, group.algorithm(name, x))
