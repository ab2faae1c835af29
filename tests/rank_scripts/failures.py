"""One rank of test_failures.py: a job in which one rank does something else than the others.

Arguments: the scenario, and "numpy" or "mlx". Prints the class and the text of the error that this rank got.
"""

import os
import signal
import sys
import time

import mlx.core as mx
import numpy as np

import mlxdist

scenario, kind = sys.argv[1], sys.argv[2]
group = mlxdist.init()
rank, size = group.rank(), group.size()
odd_one = rank == size - 1


def array(shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray | mx.array:
    return np.ones(shape, dtype) if kind == "numpy" else mx.ones(shape, getattr(mx, dtype))


def run(result: np.ndarray | mx.array) -> None:
    if kind == "mlx":
        mx.eval(result)


def shape() -> None:
    run(mlxdist.all_sum(array((3, 4) if odd_one else (4, 3))))


def size_of_another_queue_pair() -> None:
    run(mlxdist.all_sum(array((100_000,) if odd_one else (10,))))


def dtype() -> None:
    run(mlxdist.all_sum(array((8,), "int32" if odd_one else "float32")))


def operation() -> None:
    x = array((8,))
    run(mlxdist.all_gather(x) if odd_one else mlxdist.all_max(x))


def root() -> None:
    run(mlxdist.broadcast(array((8,)), root=1 if odd_one else 0))


def order() -> None:
    large, small = array((50_000,)), array((5,))
    for x in (large, small) if odd_one else (small, large):
        run(mlxdist.all_sum(x))


def leaving_early() -> None:
    if not odd_one:
        run(mlxdist.all_sum(array((8,))))
    group.finalize()


def raises() -> None:
    if odd_one:
        raise ValueError("this rank's own mistake")
    run(mlxdist.all_sum(array((8,))))


def killed() -> None:
    if odd_one:
        os.kill(os.getpid(), signal.SIGKILL)
    run(mlxdist.all_sum(array((8,))))


def aborts() -> None:
    if odd_one:
        group.abort("there is no point in going on")
    run(mlxdist.all_sum(array((8,))))


def late() -> None:
    """The timeout is 1 s; the others wait for one that computes for longer."""
    if odd_one:
        time.sleep(3)
    run(mlxdist.all_sum(array((8,))))


begin = time.monotonic()
try:
    run(mlxdist.all_sum(array((8,))))  # all is well before; a rank that has it first may fail while others are in it
    begin = time.monotonic()
    globals()[scenario]()
except mlxdist.Error as error:
    print(f"{type(error).__name__} after {time.monotonic() - begin:.1f} s: {error}", flush=True)
    try:
        run(mlxdist.all_sum(array((8,))))
    except mlxdist.Error as again:
        print(f"again {type(again).__name__}: {again}", flush=True)
    sys.exit(1)
print("no error")
