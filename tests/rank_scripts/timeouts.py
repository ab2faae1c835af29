"""One rank of test_timeouts.py: rank 0 comes late to every operation. Argument: what.

The group's deadline is shorter than rank 0 is late: an operation that forgets the one of its own fails.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np

import mlxdist

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from waiting import late, seconds_of

GROUP, LATE, OWN = 0.1, 0.25, 30

group = mlxdist.init(timeout=GROUP)
rank, size = group.rank(), group.size()
other = 1 - rank

OPERATIONS = {
    "all_sum": lambda x, **k: mlxdist.all_sum(x, **k),
    "all_max": lambda x, **k: mlxdist.all_max(x, **k),
    "all_min": lambda x, **k: mlxdist.all_min(x, **k),
    "product": lambda x, **k: mlxdist.all_reduce(x, "prod", **k),
    "all_gather": lambda x, **k: mlxdist.all_gather(x, **k),
    "sum_scatter": lambda x, **k: mlxdist.sum_scatter(x, **k),
    "reduce_scatter": lambda x, **k: mlxdist.reduce_scatter(x, "max", **k),
    "broadcast": lambda x, **k: mlxdist.broadcast(x, 0, **k),
    "reduce": lambda x, **k: mlxdist.reduce(x, "sum", 1, **k),
    "gather": lambda x, **k: mlxdist.gather(x, 1, **k),
    "scatter": lambda x, **k: mlxdist.scatter(x, 0, **k),
    "all_to_all": lambda x, **k: mlxdist.all_to_all(x, **k),
    "all_to_all_v": lambda x, **k: mlxdist.all_to_all_v(x, [1, 1], [1, 1], **k),
    "sendrecv": lambda x, **k: mlxdist.sendrecv(x, other, other, **k),
    "recv_like": lambda x, **k: mlxdist.recv_like(x, 0, **k) if rank else mlxdist.send(x, 1, **k),
    "recv": lambda x, **k: mlxdist.recv(x.shape, x.dtype, 0, **k) if rank else mlxdist.send(x, 1, **k),
    "send": lambda x, **k: large_to_late(x, **k),
}


def large_to_late(x: np.ndarray | mx.array, **keywords: object) -> np.ndarray | mx.array:
    """A message that its sender is not rid of before the receiver comes."""
    large = type(x)(np.ones((4, 1 << 20), np.float32)) if isinstance(x, mx.array) else np.ones((4, 1 << 20), x.dtype)
    return mlxdist.send(large, 0, **keywords) if rank else mlxdist.recv_like(large, 1, **keywords)


def rank_0_is_late() -> None:
    if rank == 0:
        late(LATE)


def array(kind: str) -> np.ndarray | mx.array:
    return np.ones((2, 3), np.float32) if kind == "numpy" else mx.ones((2, 3))


def fails(function: Callable[[], object]) -> None:
    rank_0_is_late()
    try:
        function()
    except mlxdist.Timeout as error:
        print(f"{error.operation} #{error.sequence} of rank {error.rank} on {error.host}: {error}", flush=True)
        sys.exit(1)
    raise AssertionError("no timeout")


def all_operations(kind: str) -> None:
    """Each with its own; the next one without has the group's again."""
    for name, operation in OPERATIONS.items():
        rank_0_is_late()
        waited, _ = seconds_of(lambda: mx.eval(operation(array(kind), timeout=OWN)))
        assert rank == 0 or waited > GROUP, f"{name} did not wait"
    fails(lambda: mlxdist.all_sum(array("numpy")) if kind == "numpy" else mx.eval(mlxdist.all_sum(array("mlx"))))


def gradients() -> None:
    """An operation's backward pass has its deadline, too."""
    for operation in (mlxdist.sum_scatter, mlxdist.broadcast, mlxdist.all_to_all):
        gradient = mx.grad(lambda x, operation=operation: operation(x, timeout=OWN).sum())(mx.ones((2, 3)))
        rank_0_is_late()
        mx.eval(gradient)
    group.timeout = OWN  # or the end of the program, where ranks wait for each other, has the group's


def handles() -> None:
    begun = mlxdist.all_sum(array("numpy"), async_op=True, timeout=OWN) if rank else None
    rank_0_is_late()
    if rank == 0:
        begun = mlxdist.all_sum(array("numpy"), async_op=True)
    assert np.all(begun.wait() == size)
    fails(lambda: mlxdist.all_sum(array("numpy"), async_op=True).wait())


def barriers() -> None:
    started = lambda timeout: mlxdist.barrier(async_op=True, timeout=timeout).wait()
    for barrier in (mlxdist.barrier, group.barrier, started):
        rank_0_is_late()
        barrier(timeout=OWN)
    fails(group.barrier)


def groups() -> None:
    part = group.split(0)
    assert part.timeout == group.timeout == GROUP
    group.timeout = OWN
    assert part.timeout == GROUP and group.timeout == OWN
    rank_0_is_late()
    mx.eval(mx.distributed.all_sum(mx.ones(3), group=group.mlx))  # MLX's own have the group's
    group.timeout = 0
    rank_0_is_late()
    mlxdist.all_sum(array("numpy"))
    fails(lambda: mx.eval(mx.distributed.all_sum(mx.ones(3), group=part.mlx)))


globals()[sys.argv[1]](*sys.argv[2:])
