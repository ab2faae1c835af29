"""The operations that the benchmarks carry out, on data whose result is known: lazily through MLX, and eagerly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import mlx.core as mx
import numpy as np

import mlxdist

__all__ = [
    "CASES",
    "Case",
    "Eager",
    "Inputs",
    "Lazy",
    "SAME_AS",
    "TOLERANCE",
    "add",
    "count_off",
    "count_wrong",
    "from_mlx",
    "storage",
    "to_mlx",
]

ROOT = 0
# How many numbers below 32 have a sum that the dtype holds exactly, whatever the order of the additions; any number of
# ranks in other dtypes.
_EXACT = {"bfloat16": 256 // 31, "float16": 2048 // 31}


# Of the largest element of a layer's output, where the order of additions differs; see `count_off`.
TOLERANCE = {"float32": 1e-4, "float16": 2e-2}


def storage(dtype: str) -> np.dtype:
    """The NumPy dtype that holds an MLX dtype: bfloat16 are its bits."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


class Inputs:
    """The input of each rank: whole numbers below 32 without a pattern, so that no part can stand in for another.

    Sums are exact in every dtype (integers of 8 bits wrap): with many ranks, some have 0 in each element. Indexing
    computes an array again each time, because the arrays of all ranks together may not fit into memory.
    """

    def __init__(self, dtype: str, elements: int, ranks: int) -> None:
        self.dtype, self.elements, self.ranks = dtype, elements, ranks

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[rank] for rank in range(self.ranks))

    def __getitem__(self, rank: int) -> np.ndarray:
        mixed = np.arange(self.elements, dtype=np.uint32) + np.uint32(rank * 0x85EBCA6B % 2**32)
        for multiplier in (0x9E3779B1, 0x2C1B3C6D):
            mixed *= np.uint32(multiplier)
            mixed ^= mixed >> np.uint32(15)
        # The top 5 bits: in a product, each bit depends only on those below it, so the top ones are mixed best.
        mixed >>= np.uint32(27)
        if (apart := -(-self.ranks // _EXACT.get(self.dtype, self.ranks))) > 1:
            mixed[(np.arange(self.elements) + rank) % apart != 0] = 0
        return _cast(mixed, self.dtype)


def _cast(numbers: np.ndarray, dtype: str) -> np.ndarray:
    """Whole numbers from 0 to 255 as elements of a dtype."""
    if dtype == "bool":
        return numbers % 2 == 1
    if dtype == "bfloat16":
        return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)  # exact: they have 8 bits at most
    if dtype == "complex64":
        return (numbers + 1j * (numbers ^ np.uint32(5))).astype(np.complex64)
    return numbers.astype(dtype)


def add(arrays: Inputs) -> np.ndarray:
    """The sum of all ranks' arrays, in their dtype."""
    bits = arrays.dtype == "bfloat16"
    total = np.zeros(arrays.elements, np.float32 if bits else storage(arrays.dtype))
    for array in arrays:
        total += (array.astype(np.uint32) << 16).view(np.float32) if bits else array
    return (total.view(np.uint32) >> 16).astype(np.uint16) if bits else total


def count_wrong(result: np.ndarray, expected: np.ndarray) -> int:
    """Counts the elements that differ in any bit from the expected ones."""
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return max(result.size, expected.size)
    result, expected = np.ascontiguousarray(result), np.ascontiguousarray(expected)
    if np.array_equal(result.view(np.uint8), expected.view(np.uint8)):  # the other way takes ten times as long
        return 0
    bits = np.dtype(f"V{result.dtype.itemsize}")
    return int(np.count_nonzero(result.view(bits) != expected.view(bits)))


def count_off(expected: mx.array, tolerance: float, result: mx.array) -> int:
    """Counts the elements that are off by more than ``tolerance`` times the largest expected element."""
    if result.shape != expected.shape or not expected.size:
        return max(result.size, expected.size)
    found, wanted = result.astype(mx.float32), expected.astype(mx.float32)
    close = mx.abs(found - wanted) <= tolerance * mx.abs(wanted).max()  # NaN is not
    return int(np.count_nonzero(~np.array(close)))


def to_mlx(array: np.ndarray, dtype: str) -> mx.array:
    if dtype == "bfloat16":
        return mx.array(array).view(mx.bfloat16)
    return mx.array(array, mx.float64 if dtype == "float64" else None)  # MLX would make it float32


def from_mlx(array: mx.array) -> np.ndarray:
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


@dataclass(frozen=True)
class Case:
    """An operation: how it is called, and its expected result.

    ``call(x, group=group)`` is the operation on an ``mx.array``; with ``out`` and ``dtype`` on NumPy arrays. ``given``
    and ``expected`` are a rank's input and output: functions of all ranks' arrays and of the rank.
    ``chains``: the result can be put in again.
    """

    call: Callable[..., Any]
    expected: Callable[[Inputs, int], np.ndarray]
    given: Callable[[Inputs, int], np.ndarray] = lambda inputs, rank: inputs[rank]
    chains: bool = False
    times: int = 1  # operations in a call
    in_place: bool = False
    choice: bool = True  # the group chooses among several algorithms


def _part(array: np.ndarray, index: int, parts: int) -> np.ndarray:
    return array.reshape(parts, -1)[index]


def _partner(group: mlxdist.Group) -> int | None:
    """This rank's partner: 0 with 1, 2 with 3 and so on; None for the last of an odd number of ranks."""
    partner = group.rank() ^ 1
    return partner if partner < group.size() else None


def _send_recv(x: Any, group: mlxdist.Group, out: np.ndarray | None = None, dtype: object = None) -> Any:
    """A message to the partner and one back."""
    partner = _partner(group)
    if partner is None:
        return x if out is None else np.copyto(out, x)
    if out is None:
        steps = [lambda: mlxdist.send(x, partner, group=group), lambda: mlxdist.recv_like(x, partner, group=group)]
    else:
        options: dict[str, Any] = {"group": group, "dtype": dtype}
        steps = [
            lambda: mlxdist.send(x, partner, **options),
            lambda: mlxdist.recv_like(out, partner, out=out, **options),
        ]
    results = []
    for step in steps if group.rank() < partner else steps[::-1]:
        results.append(step())
        if out is None:  # MLX promises no order between two operations that do not depend on each other
            mx.eval(results[-1])
    return results[1 if group.rank() < partner else 0]


def _broadcast(x: Any, group: mlxdist.Group, out: np.ndarray | None = None, **options: Any) -> Any:
    if out is None:
        return mlxdist.broadcast(x, ROOT, group=group)
    return mlxdist.broadcast(out, ROOT, group=group, out=out, **options)


def _reduce(x: Any, group: mlxdist.Group, out: np.ndarray | None = None, **options: Any) -> Any:
    return mlxdist.reduce(x, "sum", ROOT, group=group, out=out if group.rank() == ROOT else None, **options)


def _gather(x: Any, group: mlxdist.Group, out: np.ndarray | None = None, **options: Any) -> Any:
    return mlxdist.gather(x, ROOT, group=group, out=out if group.rank() == ROOT else None, **options)


def _concatenated(inputs: Inputs) -> np.ndarray:
    """The first part of rank 0's array, the second one of rank 1's, and so on."""
    return np.concatenate([_part(array, index, inputs.ranks) for index, array in enumerate(inputs)])


@cache  # it is no part of the operation
def _counts(elements: int, rank: int, ranks: int, step: int = 1) -> list[int]:
    """The elements that go from ``rank`` to each other one; with a ``step`` of -1 those that come from each.

    Half of an equal part goes to the next rank in place of the one before. Two ranks have equal parts.
    """
    counts = [elements // ranks] * ranks
    moved = counts[0] // 2
    counts[(rank + step) % ranks] += moved
    counts[(rank - step) % ranks] -= moved
    return counts


def _all_to_all_v(x: Any, group: mlxdist.Group, **options: Any) -> Any:
    sends, receives = (_counts(x.size, group.rank(), group.size(), step) for step in (1, -1))
    return mlxdist.all_to_all_v(x, sends, receives, group=group, **options)


def _of_unequal_parts(inputs: Inputs, rank: int) -> np.ndarray:
    """The result of `_all_to_all_v`."""
    parts = []
    for source, array in enumerate(inputs):
        counts = _counts(array.size, source, inputs.ranks)
        first = sum(counts[:rank])
        parts.append(array[first : first + counts[rank]])
    return np.concatenate(parts)


CASES = {
    "all_sum": Case(mlxdist.all_sum, lambda inputs, rank: add(inputs), chains=True),
    "all_max": Case(mlxdist.all_max, lambda inputs, rank: np.maximum.reduce(list(inputs))),
    "all_min": Case(mlxdist.all_min, lambda inputs, rank: np.minimum.reduce(list(inputs))),
    "all_gather": Case(
        mlxdist.all_gather,
        lambda inputs, rank: _concatenated(inputs),
        given=lambda inputs, rank: _part(inputs[rank], rank, inputs.ranks),
    ),
    "sum_scatter": Case(mlxdist.sum_scatter, lambda inputs, rank: _part(add(inputs), rank, inputs.ranks)),
    "broadcast": Case(_broadcast, lambda inputs, rank: inputs[ROOT], chains=True, in_place=True),
    "all_to_all": Case(
        mlxdist.all_to_all, lambda inputs, rank: np.concatenate([_part(array, rank, inputs.ranks) for array in inputs])
    ),
    "all_to_all_v": Case(_all_to_all_v, _of_unequal_parts, choice=False),
    "reduce": Case(_reduce, lambda inputs, rank: add(inputs)[: None if rank == ROOT else 0]),
    "gather": Case(
        _gather,
        lambda inputs, rank: _concatenated(inputs)[: None if rank == ROOT else 0],
        given=lambda inputs, rank: _part(inputs[rank], rank, inputs.ranks),
    ),
    "scatter": Case(
        lambda x, group, **options: mlxdist.scatter(x, ROOT, group=group, **options),
        lambda inputs, rank: _part(inputs[ROOT], rank, inputs.ranks),
    ),
    "send_recv": Case(
        _send_recv, lambda inputs, rank: inputs[rank ^ 1 if rank ^ 1 < inputs.ranks else rank], times=2, choice=False
    ),
}

# Other names of the same operations.
SAME_AS = {"all_reduce": "all_sum", "reduce_scatter": "sum_scatter", "sendrecv": "send_recv"}

CHAIN_UP_TO = 64 << 10  # bytes; above, an evaluation costs little next to the operation
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
        self.lazy = lazy or partial(case.call, group=world)
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
        self.results = []  # first: a result kept next to the new one would be one array more to go through the caches
        if self.case.chains:
            y = self.x
            for _ in range(self.chain):
                y = self.lazy(y)
            self.results = [y]
        else:
            self.results = [self.lazy(self.x) for _ in range(self.chain)]
        mx.eval(self.results)

    def count_wrong(self) -> int:
        """Counts the wrong elements of the first operation and of the last call."""
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
        self.eager = eager or (lambda x, out: case.call(x, group=world, out=out, dtype=dtype))
        self.x, self.expected = case.given(data, world.rank()), case.expected(data, world.rank())
        self.input_bytes = self.x.nbytes
        self.operations = case.times
        self.out = self.x.copy() if case.in_place else np.empty_like(self.expected)
        self._in_place = case.in_place
        self.wrong = self.try_once()
        self._spoil()

    def _spoil(self) -> None:
        """Fills the output with wrong bytes, so that an element that the operation leaves out counts as wrong."""
        if not self._in_place:
            self.out.view(np.uint8).fill(0xFF)

    def try_once(self) -> int:
        """Makes a call, and counts its wrong elements."""
        self._spoil()
        self.call()
        return count_wrong(self.out, self.expected)

    def call(self) -> None:
        self.eager(self.x, self.out)

    def count_wrong(self) -> int:
        """Counts the wrong elements of the first call and of the last one."""
        return self.wrong + count_wrong(self.out, self.expected)
