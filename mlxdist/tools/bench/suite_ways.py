"""Operations of `mlxdist bench suite`, by mlxdist and by MLX's own backends, each with its data and its check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx
import numpy as np

import mlxdist

from .operations import CASES, SAME_AS, Inputs, count_wrong, from_mlx, to_mlx
from .timing import Work
from .workload import OURS

__all__ = ["Absent", "Way", "collective", "exactly", "sendrecv"]

# Backends of MLX that can send in one thread and receive in another; MPI has been started without threads.
BOTH_WAYS = ("ring",)


class Absent(Exception):
    """A backend does not have an operation; the text says why."""


class Way:
    """A case by one backend.

    Args:
        start: builds the graph. Returns the result, then further arrays to evaluate, which are not timed; nothing on a
            rank that takes no part.
        check: counts the wrong elements of a result.
    """

    def __init__(self, start: Callable[[], Sequence[mx.array]], check: Callable[[mx.array], int]) -> None:
        self._start, self._check = start, check
        self._outputs: Sequence[mx.array] = ()
        self.wrong = 0

    def call(self) -> None:
        """Runs the timed part: builds the graph, and waits for the result."""
        self._outputs = self._start()
        if len(self._outputs) > 1:
            mx.async_eval(self._outputs[1:])
        mx.eval(self._outputs[:1])

    def after(self) -> None:
        """Runs the part that is not timed: waits for the other arrays, and checks the result."""
        mx.eval(self._outputs)
        if self._outputs:
            self.wrong += self._check(self._outputs[0])
        self._outputs = ()

    def work(self, copies: float) -> Work:
        return Work(self.call, after=self.after, wrong=lambda: self.wrong, copies=copies)


def exactly(expected: np.ndarray, result: mx.array) -> int:
    """Counts the elements that differ in any bit from the expected ones."""
    return count_wrong(from_mlx(result), expected)


def collective(operation: str, data: Inputs, world: mlxdist.Group, backend: str, group: mx.distributed.Group) -> Way:
    """Returns the way to run a collective by a backend. ``group``: the backend's group; not used for mlxdist.

    Raises:
        Absent: MLX has no such operation.
    """
    name = SAME_AS.get(operation, operation)
    case = CASES[name]
    x = to_mlx(case.given(data, world.rank()), data.dtype)
    mx.eval(x)
    if backend == OURS:
        function = partial(case.call, x, group=world)
    elif hasattr(mx.distributed, name):
        function = partial(getattr(mx.distributed, name), x, group=group)
    else:
        raise Absent(f"mx.distributed has no {operation}")
    return Way(lambda: [function()], partial(exactly, case.expected(data, world.rank())))


def sendrecv(data: Inputs, world: mlxdist.Group, backend: str, group: mx.distributed.Group) -> Way:
    """Returns the way to exchange messages between ranks 0 and 1, 2 and 3 and so on, both directions at once.

    Raises:
        Absent: the backend cannot send and receive at the same time.
    """
    partner = world.rank() ^ 1
    if backend != OURS and backend not in BOTH_WAYS:
        raise Absent(f"MLX's {backend} cannot send and receive at the same time")
    if partner >= world.size():
        return Way(list, lambda result: 0)
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
