"""What the programs of the check share: each runs on every rank, on MLX's default device, and reports figures."""

import ctypes
import functools
import glob
import json
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

import mlxdist

__all__ = ["LARGE", "driver_calls", "group", "made", "median_seconds", "rank", "report", "require", "size"]

LARGE = mx.default_device().type == mx.DeviceType.gpu  # else the CPU backend in CI: small sizes, the same code
group = mlxdist.init()
rank, size = group.rank(), group.size()


def report(**figures: Any) -> None:
    """Figures of this concern, for the JSON: of rank 0, and the peak of MLX's memory on every rank."""
    peaks = mlxdist.all_gather(np.array([mx.get_peak_memory()]))
    if rank == 0:
        print("FIGURES", json.dumps(figures | {"peak_memory_bytes": [int(peak) for peak in peaks]}), flush=True)


def require(found: mx.array, wanted: Any, what: str, tolerance: float = 0.0) -> None:
    """The largest difference is at most ``tolerance`` of the largest number."""
    found, wanted = np.array(found.astype(mx.float32)), np.array(wanted)
    assert found.shape == wanted.shape, f"{what} on rank {rank}: {found.shape}, not {wanted.shape}"
    error, largest = np.abs(found - wanted).max(initial=0), np.abs(wanted).max(initial=0)
    assert error <= tolerance * largest, f"{what} on rank {rank}: off by {error} of {largest}"


def made(x: mx.array) -> mx.array:
    """The same elements where a kernel of the default device has written them, behind the beginning of a buffer."""
    return mx.stack([x, x])[1]


def median_seconds(call: Callable[[], Any], repeats: int = 7) -> float:
    """Of a call that evaluates what it computes; after two that warm up."""
    times = []
    for _ in range(repeats + 2):
        group.barrier()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


@contextmanager
def driver_calls() -> Iterator[Counter[str]]:
    """Counts what is submitted to CUDA meanwhile, by the names of its driver; nothing where there is no CUPTI."""
    counter: Counter[str] = Counter()
    counting = _counting()
    if counting is None:
        yield counter
        return
    for number in range(_MAX_NAMES):
        counting.take_count(number)
    yield counter
    mx.synchronize()
    for number in range(_MAX_NAMES):
        if count := counting.take_count(number):
            counter[counting.name_of(number).decode()] = count


_MAX_NAMES = 512  # of driver_calls.c


@functools.cache
def _counting() -> Any:
    """driver_calls.c, subscribed to CUPTI; never unsubscribed, since other threads may be in it."""
    folders = (Path(mx.__file__).parents[1] / "nvidia" / "*" / "lib", "/usr/local/cuda/extras/CUPTI/lib64")
    found = [name for folder in folders for name in glob.glob(f"{folder}/libcupti.so*")]
    if not found or not LARGE or not mx.cuda.is_available():
        return None
    source = Path(__file__).with_name("driver_calls.c")
    library = Path(tempfile.mkdtemp(), "driver_calls.so")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    counting, cupti, subscriber = ctypes.CDLL(str(library)), ctypes.CDLL(found[0]), ctypes.c_void_p()
    counting.name_of.restype, counting.take_count.restype = ctypes.c_char_p, ctypes.c_long
    for status in (
        cupti.cuptiSubscribe(ctypes.byref(subscriber), counting.count_call, None),
        cupti.cuptiEnableDomain(1, subscriber, 1),  # of the driver
    ):
        assert status == 0, f"CUPTI returns {status}"
    return counting
