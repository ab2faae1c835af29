"""The operations of `mlxdist bench suite` by mlxdist and by MLX's own backends, each with its data and its check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx
import numpy as np

import mlxdist

from .operations import CASES, Inputs, count_wrong, from_mlx, to_mlx

__all__ = ["OURS", "Absent", "Way", "collective", "sendrecv"]

OURS = "mlxdist"
# Their names in operations.py and bandwidth.py. Two messages at once move no fewer bytes than one to and fro.
KNOWN_AS = {
    "sendrecv": "send_recv",
    "all_reduce": "all_sum",
    "all_gather": "all_gather",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "reduce_scatter": "sum_scatter",
}
# Backends of MLX that can send in one thread and receive in another; MPI has been started without threads.
BOTH_WAYS = ("ring",)


class Absent(Exception):
    """A backend does not have an operation; the text says why."""


class Way:
    """One case by one backend.

    Args:
        start: makes the graph: the result, and what else has to be evaluated, which is not timed. Nothing, on a rank
            that takes no part.
        check: the wrong elements of a result.
    """

    def __init__(self, start: Callable[[], Sequence[mx.array]], check: Callable[[mx.array], int]) -> None:
        self._start, self._check = start, check
        self._outputs: Sequence[mx.array] = ()
        self.wrong = 0

    def call(self) -> None:
        """What is timed: until the result is there."""
        self._outputs = self._start()
        if len(self._outputs) > 1:
            mx.async_eval(self._outputs[1:])
        mx.eval(self._outputs[:1])

    def after(self) -> None:
        """What is not timed: until all is done and checked."""
        mx.eval(self._outputs)
        if self._outputs:
            self.wrong += self._check(self._outputs[0])
        self._outputs = ()


def exactly(expected: np.ndarray, result: mx.array) -> int:
    """Elements that are not bit for bit what they must be."""
    found = from_mlx(result)
    if found.shape == expected.shape and found.dtype == expected.dtype:
        bits = f"u{found.dtype.itemsize}"
        if np.array_equal(found.view(bits), expected.view(bits)):  # count_wrong takes ten times as long
            return 0
    return max(1, count_wrong(found, expected))


def collective(operation: str, data: Inputs, world: mlxdist.Group, backend: str, group: mx.distributed.Group) -> Way:
    """``group``: of the backend; not used for mlxdist.

    Raises:
        Absent: MLX has no such operation.
    """
    name = KNOWN_AS[operation]
    case = CASES[name]
    x = to_mlx(case.given(data, world.rank()), data.dtype)
    mx.eval(x)
    if backend == OURS:
        function = partial(case.lazy, x, world)
    elif hasattr(mx.distributed, name):
        function = partial(getattr(mx.distributed, name), x, group=group)
    else:
        raise Absent(f"mx.distributed has no {operation}")
    return Way(lambda: [function()], partial(exactly, case.expected(data, world.rank())))


def sendrecv(data: Inputs, world: mlxdist.Group, backend: str, group: mx.distributed.Group) -> Way:
    """Messages of neighbours, 0 with 1, 2 with 3 and so on, both directions at once.

    Raises:
        Absent: the backend cannot do that.
    """
    partner = world.rank() ^ 1
    if backend != OURS and backend not in BOTH_WAYS:
        raise Absent(f"MLX's {backend} cannot send and receive at the same time")
    if partner >= world.size():
        return Way(lambda: [], lambda result: 0)
    x = to_mlx(data[world.rank()], data.dtype)
    mx.eval(x)
    if backend == OURS:

        def start() -> list[mx.array]:
            return [mlxdist.sendrecv(x, partner, partner, group=world)]

    else:
        # Two streams, or each would wait for the other's receive before it begins its own.
        receiving, sending = mx.new_stream(mx.cpu), mx.new_stream(mx.cpu)

        def start() -> list[mx.array]:
            received = mx.distributed.recv_like(x, partner, group=group, stream=receiving)
            return [received, mx.distributed.send(x, partner, group=group, stream=sending)]

    return Way(start, partial(exactly, data[partner]))
