"""One rank of test_failed_arrays.py: what has been computed from an operation that failed is never read.

Arguments: how the operation fails (SCENARIOS), and "mlx" for the groups of mlxdist.init() or "mpi_shim".
Prints "as expected" at the end.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np

import mlxdist

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from waiting import late

scenario, mpi_shim = sys.argv[1], sys.argv[2] == "mpi_shim"
group = mlxdist.init()
rank, size = group.rank(), group.size()
odd_one = rank == size - 1
world = mx.distributed.init() if mpi_shim else group.mlx


def all_sum(x: mx.array, **stream: mx.Stream) -> mx.array:
    return mx.distributed.all_sum(x, group=world, **stream)


def expect(what: str, function: Callable[[], object]) -> None:
    try:
        result = function()
    except KINDS[scenario] as error:
        assert type(error) is KINDS[scenario], f"{what}: {type(error)}"
    else:
        raise AssertionError(f"{what} on rank {rank}: no error, but {result}")


def fails(x: mx.array, **stream: mx.Stream) -> mx.array:
    """A sum that fails once it is evaluated; what it is of is unfit in size on the odd rank, or comes late or never."""
    if scenario == "mismatch" and odd_one:
        x = mx.concatenate([x, x])
    result = all_sum(x, **stream)
    group.barrier()  # what is built after another rank has failed raises that error at once
    if scenario == "timeout":
        group.timeout = 0.5
        if odd_one:
            late(1.5)
    if scenario == "lost" and odd_one:
        late(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    return result


KINDS = {"mismatch": mlxdist.Mismatch, "timeout": mlxdist.Timeout, "lost": mlxdist.PeerLost}
READERS = {
    "eval": mx.eval,
    "tolist": lambda x: x.tolist(),
    "item": lambda x: x.flatten()[0].item(),
    "repr": repr,
    "np.array": np.array,
    "np.asarray": np.asarray,
    "sum": lambda x: mx.sum(x.astype(mx.int32)).item(),
    "a graph of good and failed": lambda x: mx.eval(good * 2, x + good[0], good * 3),
    "async_eval": lambda x: (mx.async_eval(y := x.flatten()[:1] + 1), y.tolist()),
    "compiled": lambda x: mx.eval(mx.compile(lambda x: x * 2 + 1)(x)),
    "another stream": lambda x: mx.eval(mx.add(x, 1, stream=mx.new_stream(mx.cpu))),
    "a collective": lambda x: mx.eval(all_sum(x)),
}


def check(arrays: dict[str, mx.array], readers: list[str]) -> None:
    for name, x in arrays.items():
        for reader in readers:
            for attempt in range(2):
                expect(f"{reader} of {name}, attempt {attempt}", lambda: READERS[reader](x))


good, parameter = mx.array([1.0, 2, 3, 4]), mx.array([1.0] * 4)  # from memory: MLX has not computed them
assert all_sum(good).tolist() == [i * size for i in range(1, 5)]

# One evaluation with what follows, on this stream and on another; integers show no NaN.
other = mx.new_stream(mx.cpu)
a = fails(good * 1)
whole = mx.sum(a).astype(mx.int32)
arrays = {"the result": a, "what follows": a * 2 + 1, "an integer": whole, "a comparison": a[:4] > good}
arrays["another stream"] = mx.multiply(a, 2, stream=other)
expect("the first reader", lambda: mx.eval(*arrays.values()))
check(arrays, list(READERS))

# The buffer itself: MLX raises that by itself, as a RuntimeError with the text.
for x in arrays.values():
    try:
        raise AssertionError(f"no error, but {memoryview(x)}")
    except RuntimeError as error:
        assert "[mlxdist" in str(error), error

# What was right is right, and what does not depend on the failed one can be computed.
assert good.tolist() == [1, 2, 3, 4] and (good * 2).tolist() == [2, 4, 6, 8]
assert mx.compile(lambda x: x + 1)(good).tolist() == [2, 3, 4, 5]

# Parameters updated from failed gradients, which were built before the error or after it.
update = parameter - 0.1 * mx.grad(lambda p: (p * a[:4]).sum())(parameter)
check({"an update": update, "an update's sum": update.sum()}, ["eval", "tolist", "item"])
assert parameter.tolist() == [1] * 4

# A thread that has had no error.
caught = []
thread = threading.Thread(target=lambda: (check({"the result": a}, ["tolist"]), caught.append(True)))
thread.start()
thread.join()
assert caught
print("as expected")
