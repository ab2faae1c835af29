"""Measures this host, one part at a time; `mlxdist calibrate` calls it through mlxdist.cluster.ssh.

Products of several shapes measure computing. A copy, sums and a product of one row, all on arrays larger than any
cache, measure reading of memory. Every result is compared with NumPy's on samples.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from mlxdist.base.host_identity import host_identity
from mlxdist.cluster.facts.collect import collect_here

from ..bench.machine import describe_machine
from ..bench.operations import count_wrong
from ..bench.timing import ForeignLoad, Work, quantiles

__all__ = ["machine", "measure"]

PRODUCTS = ("float32", "float16", "bfloat16")  # dtypes of matrix products

# Rows, inner dimension and columns, the smaller shapes first, because later ones that would take too long are left out.
# Squares, and a prompt of 512 tokens through an MLP.
SHAPES = {
    "gpu": [(1024, 1024, 1024), (2048, 2048, 2048), (512, 4096, 14336), (4096, 4096, 4096), (8192, 8192, 8192)],
    "cpu": [(256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (512, 2048, 2048), (2048, 2048, 2048)],
}
ARRAY_BYTES = {"gpu": 1 << 30, "cpu": 128 << 20}
SHARE_OF_MEMORY = 16  # an array is at most this part of it
COLUMNS = 4096
WARM_UP, MIN_CALLS, MAX_CALLS = 1, 3, 1000
SAMPLES = 8  # rows and columns of a product that are compared
EVERY = 997  # one row of this many of an array is compared

# Relative to the typical size of such a sum of products. Some devices round float32 inputs to as few as 10 bits;
# float16 results have 11 bits, bfloat16 results 8.
TOLERANCE = {"float32": 1e-2, "float16": 1e-2, "bfloat16": 5e-2}


def machine() -> dict[str, Any]:
    """MLX's default device, and the other facts that the measurements depend on."""
    info = getattr(mx, "device_info", None) or mx.metal.device_info
    device = str(info().get("device_name", platform.machine()))
    return describe_machine() | {"device": device, "kind": _kind(), "identity": host_identity()}


def measure(part: str, seconds: float) -> dict[str, Any] | None:
    """Measures one part: "float32", "float16" or "bfloat16" for products; "copy", "sum" or "row" for memory.

    Returns the `quantiles` of TFLOPS or GB/s, the number of compared elements that are "wrong", and the
    "foreign_cpu_share" meanwhile. None for a dtype that the device only emulates.
    """
    foreign = ForeignLoad(None)
    found = _measured(part, seconds)
    return None if found is None else found | {"foreign_cpu_share": foreign.share()}


def _measured(part: str, seconds: float) -> dict[str, Any] | None:
    mx.set_cache_limit(4 * ARRAY_BYTES[_kind()])  # else results are mapped again each time, which dominates
    if part in PRODUCTS:
        return _products(part, seconds) if part == "float32" or _kind() == "gpu" else None
    work, moved, wrong = _memory(part)
    return quantiles(moved / 1e9 / _times(work, seconds)) | {"bytes": moved, "wrong": wrong()}


def _kind() -> str:
    return "gpu" if mx.default_device().type == mx.DeviceType.gpu else "cpu"


def _products(dtype: str, seconds: float) -> dict[str, Any]:
    """The result of the fastest shape, with the results of all shapes."""
    shapes, end = SHAPES[_kind()], time.perf_counter() + seconds
    found: list[dict[str, Any]] = []
    slowest = 0.0  # seconds for each operation, of the shape before
    for number, shape in enumerate(shapes):
        operations = 2.0 * shape[0] * shape[1] * shape[2]
        left = end - time.perf_counter()
        if found and (WARM_UP + MIN_CALLS) * operations * slowest > left:
            continue
        a, b = (_random(size, dtype) for size in (shape[:2], shape[1:]))
        product = Evaluated(partial(mx.matmul, a, b))
        times = _times(product, left / (len(shapes) - number))
        slowest = float(np.median(times)) / operations
        wrong = _count_wrong(a, b, product.result, dtype)
        found.append({"shape": list(shape), "wrong": wrong} | quantiles(operations / 1e12 / times))
    best = max(found, key=lambda one: one["median"])
    return best | {"dtype": dtype, "wrong": sum(one["wrong"] for one in found), "shapes": found}


class Evaluated:
    """Calls a function and keeps only the last result, so that the memory of the previous one is free for the next."""

    def __init__(self, function: Callable[[], mx.array]) -> None:
        self._function, self.result = function, mx.zeros(0)

    def __call__(self) -> None:
        self.result = self._function()
        mx.eval(self.result)


def _memory(part: str) -> tuple[Evaluated, int, Callable[[], int]]:
    """The work, the number of bytes that it moves, and a function that counts wrong elements among those compared.

    "copy" copies an array; "sum" adds each row by itself, so that whole numbers stay exact; "row" multiplies one row,
    as a linear layer does for one token.
    """
    if part == "row":
        dtype = "float16" if _kind() == "gpu" else "float32"
        rows = _array_bytes() // getattr(mx, dtype).size // COLUMNS
        row, weight = _random((1, COLUMNS), dtype), _random((rows, COLUMNS), dtype)
        product = Evaluated(lambda: row @ weight.T)
        return product, weight.nbytes, lambda: _count_wrong(row, weight.T, product.result, dtype)
    x, copies = _counted(), part == "copy"
    work, some = Evaluated((lambda: x + 1) if copies else lambda: x.sum(axis=1)), np.array(x[::EVERY])
    expected = some + 1 if copies else some.sum(axis=1)
    return work, x.nbytes * (2 if copies else 1), lambda: count_wrong(np.array(work.result[::EVERY]), expected)


def _array_bytes() -> int:
    memory = collect_here().memory.total
    return min(ARRAY_BYTES[_kind()], memory // SHARE_OF_MEMORY if memory else ARRAY_BYTES[_kind()])


def _counted() -> mx.array:
    """An array of whole numbers, small enough that the sum of a row is exact."""
    rows = _array_bytes() // 4 // COLUMNS
    x = (mx.arange(rows)[:, None] + mx.arange(COLUMNS)[None]).astype(mx.float32) % 7
    mx.eval(x)
    return x


def _random(shape: tuple[int, ...], dtype: str) -> mx.array:
    x = mx.random.uniform(-1, 1, shape).astype(getattr(mx, dtype))
    mx.eval(x)
    return x


def _count_wrong(a: mx.array, b: mx.array, product: mx.array, dtype: str) -> int:
    """The number of wrong elements in a sample of a @ b, compared with float64."""
    if product.shape != (a.shape[0], b.shape[1]):
        return a.shape[0] * b.shape[1]
    random = np.random.default_rng()
    rows, columns = (mx.array(random.integers(0, n, min(n, SAMPLES))) for n in product.shape)
    left, right, got = (
        np.array(x.astype(mx.float32)).astype(np.float64) for x in (a[rows], b[:, columns], product[rows][:, columns])
    )
    size = np.sqrt((left**2) @ (right**2))
    return int(np.sum(~(np.abs(got - left @ right) <= TOLERANCE[dtype] * size)))  # so that nan is wrong


def _times(work: Callable[[], object], seconds: float) -> np.ndarray:
    """The seconds of each call: calls for about ``seconds``, but at least MIN_CALLS."""
    end = time.perf_counter() + seconds
    once = Work(work)
    once.block(WARM_UP)
    times: list[float] = []
    while len(times) < MIN_CALLS or (time.perf_counter() < end and len(times) < MAX_CALLS):
        times += once.block(1)
    return np.array(times) / 1e6
