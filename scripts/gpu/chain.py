"""A chain of all_sum between kernels of the device: what an operation costs, from the device to the host and back."""

import statistics
import time

import mlx.core as mx
import numpy as np
from common import LARGE, driver_calls, group, median_seconds, rank, report, require, size

import mlxdist

LENGTH = 200
BYTES = (4 << 10, 64 << 10, 1 << 20, 16 << 20) if LARGE else (4 << 10, 64 << 10)


def kernels(x: mx.array) -> mx.array:
    return x * 0.5 + 1


def chain(x: mx.array, between: object, length: int) -> mx.array:
    for _ in range(length):
        x = between(kernels(x))
    return x


BETWEEN = {
    "kernels alone": lambda x: x,
    "an operation of MLX on the CPU": lambda x: mx.negative(x, stream=mx.cpu),
    "all_sum": lambda x: mx.distributed.all_sum(x, group=group.mlx) / size,
}
figures = {}
for count in BYTES:
    length = LENGTH if count < 16 << 20 else LENGTH // 10
    x = mx.full((count // 4,), float(rank))
    mx.eval(x)
    wanted = np.arange(size, dtype=np.float32)
    for _ in range(length):
        wanted = np.full(size, (wanted * np.float32(0.5) + 1).mean(), np.float32)
    require(chain(x, BETWEEN["all_sum"], length), np.full(count // 4, wanted[rank]), f"chain of {count} bytes", 1e-5)
    for name, between in BETWEEN.items():
        seconds = median_seconds(lambda x=x, between=between, length=length: mx.eval(chain(x, between, length)), 5)
        figures[f"{name}, {count} bytes, us a link"] = round(seconds / length * 1e6, 2)
    group.barrier()
    if rank == 0:  # the other rank leaves the device alone
        for name in ("kernels alone", "an operation of MLX on the CPU"):
            times = []
            for _ in range(5):
                begin = time.perf_counter()
                mx.eval(chain(x, BETWEEN[name], length))
                times.append(time.perf_counter() - begin)
            figures[f"{name}, {count} bytes, one process on the device, us a link"] = round(
                statistics.median(times) / length * 1e6, 2
            )
    group.barrier()
    for name, between in BETWEEN.items():
        with driver_calls() as calls:
            mx.eval(chain(x, between, 20))
        figures[f"{name}, {count} bytes, driver calls of 20 links"] = dict(calls.most_common(8))
    # On the host alone: what of that is the engine.
    host = np.ones(count // 4, np.float32)
    figures[f"all_sum of NumPy, {count} bytes, us"] = round(
        median_seconds(lambda host=host: [mlxdist.all_sum(host) for _ in range(20)], 5) / 20 * 1e6, 2
    )
report(**figures)
