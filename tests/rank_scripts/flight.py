"""One rank of test_flight.py. Argument: the scenario."""

import os
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np

import mlxdist
from mlxdist import nn
from mlxdist.runtime.group.group import engine_of

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from waiting import late, wait_for

group = mlxdist.init()
rank, size = group.rank(), group.size()
x, lazy = np.ones((3, 4), np.float32), mx.ones((3, 4))


def show() -> None:
    """Writes the record as it is now, for the test to read."""
    engine_of(group).world.recorder.dump("the test")


def operations() -> None:
    """Of every kind; the test looks for the comments."""
    mlxdist.all_sum(x)  # eager
    mlxdist.all_gather(x, async_op=True).wait()  # started
    group.barrier()  # barrier
    mx.eval(mlxdist.broadcast(lazy, root=1))  # ours
    result = nn.gather_from_sequence_parallel_region(lazy)  # ours, in nn
    mx.eval(result)
    late(0.001)
    result = mx.distributed.all_sum(lazy, group=group.mlx)  # of MLX
    mx.eval(result)
    part = group.split(rank % 2)  # split
    mlxdist.sendrecv(x, (rank + 1) % size, (rank - 1) % size)  # sendrecv
    if part.size() > 1:
        mlxdist.all_max(x, group=part)  # part
    show()


def many() -> None:
    """An operation in progress is not lost behind 1500 others, which end before it."""
    part = group.split(0)
    handle = None
    if rank == 0:
        handle = mlxdist.all_sum(x, group=part, async_op=True)
    for _ in range(1500):
        mlxdist.all_sum(x)
    if rank == 0:
        show()
    group.barrier()
    if handle is None:
        handle = mlxdist.all_sum(x, group=part, async_op=True)
    handle.wait()


def fails() -> None:
    """Rank 1 comes too late, and every rank prints the path of its record."""
    if rank == 1:
        late(1.5)
    try:
        mlxdist.all_sum(x) if sys.argv[2] == "numpy" else mx.eval(mlxdist.all_sum(lazy))
    except mlxdist.Error as error:
        print(f"{type(error).__name__}; {'; '.join(getattr(error, '__notes__', ()))}", flush=True)
        print(f"written {Path(os.environ.get('MLXDIST_FLIGHT_DIR', '.'), f'flight-{rank}.json').exists()}", flush=True)
        raise


def asked() -> None:
    """Rank 1 computes while the others wait in an evaluation, until the test has asked them."""
    mx.eval(mlxdist.all_sum(lazy))
    print(f"ready {os.environ['MLXDIST_JOB']} {os.getpid()}", flush=True)
    if rank == 1:
        assert wait_for(Path(sys.argv[2]).exists, 120)  # the test makes it
    mx.eval(mlxdist.all_sum(lazy))


globals()[sys.argv[1]]()
