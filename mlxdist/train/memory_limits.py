"""Memory that a job must leave free, of a host and of MLX's device: a job that ends before it runs out can save."""

import gc
import math

import mlx.core as mx
import numpy as np

from mlxdist.base.errors import InvalidArgument
from mlxdist.cluster.facts.memory import memory_now
from mlxdist.runtime.device_memory import device_limit

__all__ = ["MemoryLimits"]


class MemoryLimits:
    """The limits that `Control` compares with the memory of the worst rank; see its arguments. ``None``: no limit."""

    def __init__(self, max_host: float | None, min_device: int | None) -> None:
        if max_host is not None and not (isinstance(max_host, float) and 0 < max_host <= 1):
            raise InvalidArgument(
                f"Control: max_host_memory is {max_host!r}, not the share that may be in use, such as 0.95"
            )
        if min_device is not None and (type(min_device) is not int or min_device < 0):
            raise InvalidArgument(f"Control: min_device_memory is {min_device!r}, not a number of bytes")
        self._max_host, self._min_device = max_host, min_device

    def measure(self) -> tuple[float, float]:
        """The share of this host's memory that is in use, and the bytes that MLX has left here."""
        return _host_share() if self._max_host is not None else 0.0, self._device_bytes()

    def exceeded(self, host: np.ndarray, device: np.ndarray) -> list[str]:
        """Describes the memory that is too full, on the worst rank. ``host``, ``device``: measured by each rank."""
        found = []
        if self._max_host is not None and host.max() > self._max_host:
            where = f"the host of rank {int(np.argmax(host))}"
            found.append(f"{where} has {host.max():.1%} of its memory in use, and the limit is {self._max_host:.1%}")
        if self._min_device is not None and device.min() < self._min_device:
            free, least = (f"{number / 2**20:.0f} MiB" for number in (device.min(), self._min_device))
            found.append(f"the device of rank {int(np.argmin(device))} has {free} left, and {least} is the least")
        return found

    def _device_bytes(self) -> float:
        if self._min_device is None:
            return math.inf
        if _device_left() < self._min_device:
            gc.collect()  # a cycle may hold arrays
            mx.clear_cache()
        return _device_left()


def _device_left() -> float:
    return float(device_limit() - mx.get_active_memory())


def _host_share() -> float:
    memory = memory_now()
    if not memory.total or memory.available is None:
        return 0.0
    return 1 - memory.available / memory.total
