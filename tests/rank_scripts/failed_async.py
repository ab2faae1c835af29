"""One rank of test_failed_arrays.py: a failed operation with more under way behind it, as in a generation.

Argument: "mlx" or "mpi_shim". Prints "as expected" at the end.
"""

import sys
import threading

import mlx.core as mx
import numpy as np

import mlxdist

group = mlxdist.init()
rank, size = group.rank(), group.size()
world = mx.distributed.init() if sys.argv[1] == "mpi_shim" else group.mlx


def expect(what: str, x: mx.array) -> None:
    try:
        result = x.tolist()
    except mlxdist.Mismatch:
        return
    raise AssertionError(f"{what} on rank {rank}: no error, but {result}")


def run() -> None:
    """No operation of ours is behind the first evaluation, whose error is read while the second one still computes."""
    good = mx.array(np.ones((700, 700), np.float32))  # from memory, not evaluated
    failed = mx.distributed.all_sum(mx.full((700 + rank, 700), 2.0), group=world)
    behind = failed[:700]
    for _ in range(5):
        behind = behind @ good / 700
    tokens = mx.argmax(behind, axis=1)
    try:
        mx.async_eval(failed)  # raises where the other rank has failed by then
        mx.async_eval(behind, tokens)
        mx.eval(failed)
    except mlxdist.Mismatch:
        for attempt in range(3):
            for name, x in {"the result": failed, "behind it": behind, "tokens": tokens}.items():
                expect(f"{name}, attempt {attempt}", x)
        expect("computed from it", behind + 1)
        assert (good[0, :2] + 1).tolist() == [2, 2]
        done.append(True)


done: list[bool] = []
if sys.argv[2] == "main":
    run()
else:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
assert done
print("as expected")
