"""The two ways to carry out an operation that are timed: lazily through MLX, and eagerly on NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np

import mlxdist

from .operations import CASES, Case, Inputs, count_wrong, from_mlx, to_mlx

__all__ = ["Eager", "Lazy"]

CHAIN_UP_TO = 64 << 10  # bytes; above, an evaluation costs little beside the operation
CHAIN = 50


class Lazy:
    """Lazy operations on ``mx.array``; small ones many in one graph, as a model has them.

    Args:
        lazy: the operation; the case's own by default, or another's that gives the same result.
        chain: how many in a graph; by default 50 up to 64 KiB, else 1.
    """

    def __init__(
        self,
        case: Case,
        data: Inputs,
        world: mlxdist.Group,
        lazy: Callable[[mx.array], mx.array] | None = None,
        chain: int | None = None,
    ) -> None:
        self.case = case
        self.lazy = lazy or (lambda x: case.lazy(x, world))
        given, self.expected = case.given(data, world.rank()), case.expected(data, world.rank())
        self.input_bytes = given.nbytes
        self.x = to_mlx(given, data.dtype)
        self.wrong = count_wrong(from_mlx(self.lazy(self.x)), self.expected)
        many = self.input_bytes <= CHAIN_UP_TO and case is not CASES["send_recv"]
        self.chain = chain or (CHAIN if many else 1)
        self.operations = self.chain * case.times
        if self.chain > 1 and case is CASES["all_sum"] and data.dtype != "bool":
            # Sums of sums would overflow. These cancel, so the chain goes on with zeros, and what is not 0 stays.
            first = to_mlx(data[0], data.dtype)
            zeros = mx.zeros_like(first)
            self.x = {0: first, 1: zeros - first}.get(world.rank(), zeros)
            self.expected = np.zeros_like(self.expected)
        mx.eval(self.x)
        self.results: list[mx.array] = []

    def call(self) -> None:
        self.results = []  # first: a result kept beside the new one would be one array more to go through the caches
        if self.case.chains:
            y = self.x
            for _ in range(self.chain):
                y = self.lazy(y)
            self.results = [y]
        else:
            self.results = [self.lazy(self.x) for _ in range(self.chain)]
        mx.eval(self.results)

    def count_wrong(self) -> int:
        """The wrong elements of the first operation and of the last call."""
        return self.wrong + sum(count_wrong(from_mlx(result), self.expected) for result in self.results)


class Eager:
    """Eager calls on NumPy arrays, into an array that is there already.

    Args:
        eager: the operation, from the first array into the second; the case's own by default.
    """

    chain = 1

    def __init__(
        self,
        case: Case,
        data: Inputs,
        world: mlxdist.Group,
        eager: Callable[[np.ndarray, np.ndarray], object] | None = None,
    ) -> None:
        dtype = mx.bfloat16 if data.dtype == "bfloat16" else None
        self.eager = eager or (lambda x, out: case.eager(x, out, world, dtype))
        self.x, self.expected = case.given(data, world.rank()), case.expected(data, world.rank())
        self.input_bytes = self.x.nbytes
        self.operations = case.times
        self.out = self.x.copy() if case.in_place else np.empty_like(self.expected)
        self._in_place = case.in_place
        self.wrong = 0
        self._spoil()
        self.call()
        self.wrong = self.count_wrong()
        self._spoil()

    def _spoil(self) -> None:
        """What an operation leaves out stays wrong."""
        if not self._in_place:
            self.out.view(np.uint8).fill(0xFF)

    def call(self) -> None:
        self.eager(self.x, self.out)

    def count_wrong(self) -> int:
        """The wrong elements of the first call and of the last one."""
        return self.wrong + count_wrong(self.out, self.expected)
