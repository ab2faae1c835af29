"""One rank of test_finalize.py: an array of a failed world raises that world's error in the next one as well, and
arrays of the next one raise their own. Prints "as expected" at the end.
"""

import time

import mlx.core as mx

import mlxdist

group = mlxdist.init()
rank = group.rank()
if rank == 0:
    time.sleep(0.3)
    group.abort("the first failure")
    group.finalize()
else:
    pending = mx.distributed.all_sum(mx.ones(3), group=group.mlx)
    mx.async_eval(pending)
    try:
        group.finalize()  # it fails meanwhile, and no evaluation raises that
    except mlxdist.Aborted as error:
        assert "the first failure" in str(error), error
    else:
        raise AssertionError("finalize() raised nothing")

second = mlxdist.init()
if rank != 0:
    try:
        raise AssertionError(f"no error, but {pending.tolist()}")
    except mlxdist.Aborted as error:
        assert "the first failure" in str(error), error
for x in (mx.ones(3), mx.ones(3)):
    assert mx.distributed.all_sum(x, group=second.mlx).tolist() == [second.size()] * 3
mismatched = mx.distributed.all_sum(mx.ones(3 + rank), group=second.mlx)
second.barrier()  # what is built after another rank has failed raises that error at once
for _ in range(2):
    try:
        raise AssertionError(f"no error, but {mismatched.tolist()}")
    except mlxdist.Mismatch as error:
        assert "the first failure" not in str(error), error
second.finalize()
print("as expected")
