"""One rank of test_finalize.py: mlxdist.init() again after finalize(), and what is left of the worlds before.

The last world ends at exit. Prints "as expected" at the end.
"""

import os
from collections.abc import Callable

import mlx.core as mx
import numpy as np

import mlxdist

WORLDS = 3


def refused(*uses: Callable[[], object]) -> None:
    for use in uses:
        try:
            use()
        except mlxdist.InvalidArgument as error:
            assert "has been finalized" in str(error), error
        else:
            raise AssertionError("it was not refused")


def use(group: mlxdist.Group, number: int) -> None:
    rank, size = group.rank(), group.size()
    total = sum(range(size)) + size * number
    assert np.array_equal(mlxdist.all_sum(np.full(70_000, rank + number)), np.full(70_000, total))
    assert mlxdist.all_gather(mx.array([rank])).tolist() == list(range(size))
    assert mx.distributed.all_sum(mx.array(1), group=group.mlx).item() == size
    handle = mlxdist.all_sum(np.ones(3), async_op=True)
    assert handle.wait().tolist() == [size] * 3
    backwards = group.split(0, size - rank)
    assert mlxdist.broadcast(np.array(rank), group=backwards).item() == size - 1
    assert group.stats()["collectives"] < 10, "the counters began at 0"


left = []
for number in range(WORLDS):
    group = mlxdist.init()
    assert mlxdist.init() is group and not any(group is before for before, _, _ in left)
    use(group, number)
    for before, part, pending in left:
        refused(before.barrier, lambda: mlxdist.all_sum(np.ones(3), group=before), lambda: before.mlx)
        if group.size() > 1:  # alone, a result is its input
            refused(part.barrier, lambda: mx.eval(pending))
    if number == WORLDS - 1:
        if group.rank() == 0:
            left[-1][0].finalize()  # it has been, and the last world still ends by itself
        break
    pending = mx.distributed.all_sum(mx.ones(3), group=group.mlx) + mlxdist.broadcast(mx.ones(3))
    left.append((group, group.split(0), pending))
    group.finalize()
    if group.size() > 1:
        refused(lambda: mlxdist.all_sum(np.ones(3)), mlxdist.get_rank)  # these do not make another world
        if (child := os.fork()) == 0:
            try:
                mlxdist.init()
            except mlxdist.InvalidArgument as error:
                os._exit(0 if "forked" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0, "a child is no rank of the next world"
print("as expected")
