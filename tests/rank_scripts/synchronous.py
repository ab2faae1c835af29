"""One rank of test_synchronous.py: MLXDIST_SYNC=1 evaluates operations where they are called, and nothing else does.

Prints where the program was when the Mismatch came, and "as expected" at the end.
"""

import os
import traceback
from collections.abc import Callable

import mlx.core as mx

import mlxdist

sync = os.environ.get("MLXDIST_SYNC") == "1"
group = mlxdist.init()
rank, other = group.rank(), 1 - group.rank()
if "MLX_MPI_LIBNAME" in os.environ:  # its functions, too, are those of mx.distributed
    world = mx.distributed.init()
x = mx.array([1.0, 2.0])


def operations() -> int:
    """How many operations have ended; sends aside, which end when their receiver has come."""
    return sum(of["calls"] for name, of in group.stats_by_operation().items() if name != "send")


def check(name: str, call: Callable[[], mx.array], evaluated: bool) -> mx.array:
    before = operations()
    result = call()
    assert (operations() > before) == evaluated, name
    mx.eval(result)
    return result


CALLS = {
    "all_sum": lambda: mlxdist.all_sum(x, group=group),
    "all_sum with a timeout": lambda: mlxdist.all_sum(x, timeout=20),
    "all_max": lambda: mlxdist.all_max(x),
    "all_gather": lambda: mlxdist.all_gather(x),
    "sum_scatter": lambda: mlxdist.sum_scatter(x),
    "broadcast": lambda: mlxdist.broadcast(x),
    "all_to_all_v": lambda: mlxdist.all_to_all_v(x, [1, 1], [1, 1]),
    "sendrecv": lambda: mlxdist.sendrecv(x, other, other),
    "of MLX": lambda: mx.distributed.all_sum(x, group=group.mlx),
    "sum_scatter of MLX": lambda: mx.distributed.sum_scatter(x, group=group.mlx),
}
for name, call in CALLS.items():
    check(name, call, sync)

# Both ranks send first: a message is started, and not waited for.
sent = mlxdist.send(x + rank, other)
if not sync:
    mx.async_eval(sent)
received = check("recv", lambda: mlxdist.recv((2,), mx.float32, other), sync)
assert received.tolist() == [1 + other, 2 + other] and sent.tolist() == [1 + rank, 2 + rank]

# Through the MPI shim, whose sum_scatter MLX has not: it counts in another group.
assert mx.distributed.all_sum(x, group=world).tolist() == [2, 4]
assert mx.distributed.sum_scatter(x, group=world).tolist() == [2 * (rank + 1)]


def loss(x: mx.array) -> mx.array:
    total = check("in mx.grad", lambda: mlxdist.all_gather(x * 2), sync)
    return (total**2).sum()


# Tracers have values inside mx.grad, and none inside mx.compile and mx.vmap.
assert mx.grad(loss)(x).tolist() == [8, 16]
before = operations()


def step(x: mx.array) -> mx.array:
    return mlxdist.all_sum(x) + mlxdist.all_sum(mx.ones(2))


compiled = mx.compile(step)
for number in range(1, 4):
    assert compiled(x * number).tolist() == [2 * number + 2, 4 * number + 2]
    assert operations() == before + 2 * number, "an operation in a compiled function runs each time"
assert mx.vmap(mlxdist.all_sum)(mx.ones((3, 2))).tolist() == [[2, 2]] * 3

try:
    y = mlxdist.all_sum(mx.ones(3 + rank))  # the call
    mx.eval(y)  # the evaluation
    raise AssertionError("no error")
except mlxdist.Mismatch as error:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == __file__]
    assert (frames[-1].line or "").endswith("# the call" if sync else "# the evaluation"), frames
print("as expected")
