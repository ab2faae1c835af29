"""The operations that the benchmarks carry out, on data whose result is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

import mlxdist

__all__ = ["CASES", "Case", "Inputs", "count_wrong", "from_mlx", "storage", "to_mlx", "total_wrong"]

ROOT = 0
# How many numbers below 32 have a sum that the dtype holds exactly, whatever the order of the additions; any number of
# ranks in other dtypes.
_EXACT = {"bfloat16": 256 // 31, "float16": 2048 // 31}


def storage(dtype: str) -> np.dtype:
    """The NumPy dtype that holds an MLX dtype: bfloat16 are its bits."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


class Inputs(Sequence):
    """What each rank puts in: whole numbers below 32 without a pattern, so that no part can stand in for another.

    Sums are exact in every dtype (integers of 8 bits wrap), for which some ranks of many have 0 in each element. An
    array is computed each time it is asked for: those of all ranks may not fit into memory.
    """

    def __init__(self, dtype: str, elements: int, ranks: int) -> None:
        self.dtype, self.elements, self.ranks = dtype, elements, ranks

    def __len__(self) -> int:
        return self.ranks

    def __getitem__(self, rank: int) -> np.ndarray:
        if not 0 <= rank < self.ranks:
            raise IndexError(rank)
        mixed = np.arange(self.elements, dtype=np.uint32) + np.uint32(rank * 0x85EBCA6B % 2**32)
        for multiplier in (0x9E3779B1, 0x2C1B3C6D):
            mixed *= np.uint32(multiplier)
            mixed ^= mixed >> np.uint32(15)
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
    """The number of elements that are not bit for bit what they must be."""
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return max(result.size, expected.size)
    bits = np.dtype(f"V{result.dtype.itemsize}")
    return int(np.count_nonzero(np.ascontiguousarray(result).view(bits) != np.ascontiguousarray(expected).view(bits)))


def total_wrong(wrong: int, world: mlxdist.Group) -> int:
    """The wrong elements of all ranks."""
    return int(mlxdist.all_sum(np.array([wrong], np.int64), group=world)[0])


def to_mlx(array: np.ndarray, dtype: str) -> mx.array:
    if dtype == "bfloat16":
        return mx.array(array).view(mx.bfloat16)
    return mx.array(array, mx.float64 if dtype == "float64" else None)  # MLX would make it float32


def from_mlx(array: mx.array) -> np.ndarray:
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


@dataclass(frozen=True)
class Case:
    """One operation: how it is called, and what comes out.

    ``lazy(x, group)`` is the operation on an ``mx.array``; ``eager(x, out, group, dtype)`` on NumPy arrays. ``given``
    and ``expected`` are a rank's input and output: functions of all ranks' whole arrays and of the rank.
    ``chains``: the result can be put in again.
    """

    lazy: Callable[[mx.array, mlxdist.Group], mx.array]
    eager: Callable[[np.ndarray, np.ndarray, mlxdist.Group, object], object]
    expected: Callable[[Inputs, int], np.ndarray]
    given: Callable[[Inputs, int], np.ndarray] = lambda wholes, rank: wholes[rank]
    chains: bool = False
    times: int = 1  # a call is so many operations
    in_place: bool = False
    choice: bool = True  # the group chooses among several algorithms


def _part(whole: np.ndarray, index: int, parts: int) -> np.ndarray:
    return whole.reshape(parts, -1)[index]


def _partner(group: mlxdist.Group) -> int | None:
    """0 with 1, 2 with 3 and so on; None for the last of an odd number."""
    partner = group.rank() ^ 1
    return partner if partner < group.size() else None


def _send_recv_lazy(x: mx.array, group: mlxdist.Group) -> mx.array:
    partner = _partner(group)
    if partner is None:
        return x
    steps = [lambda: mlxdist.send(x, partner, group=group), lambda: mlxdist.recv_like(x, partner, group=group)]
    # One evaluation each: MLX promises no order between two operations that do not depend on each other.
    results = []
    for step in steps if group.rank() < partner else steps[::-1]:
        results.append(step())
        mx.eval(results[-1])
    return results[1 if group.rank() < partner else 0]


def _send_recv_eager(x: np.ndarray, out: np.ndarray, group: mlxdist.Group, dtype: object) -> None:
    partner = _partner(group)
    if partner is None:
        np.copyto(out, x)
        return
    if group.rank() < partner:
        mlxdist.send(x, partner, group=group, dtype=dtype)
    mlxdist.recv_like(out, partner, group=group, out=out, dtype=dtype)
    if group.rank() > partner:
        mlxdist.send(x, partner, group=group, dtype=dtype)


def _send_recv_expected(wholes: Inputs, rank: int) -> np.ndarray:
    return wholes[rank ^ 1 if rank ^ 1 < len(wholes) else rank]


CASES = {
    "all_sum": Case(
        lazy=lambda x, group: mlxdist.all_sum(x, group=group),
        eager=lambda x, out, group, dtype: mlxdist.all_sum(x, group=group, out=out, dtype=dtype),
        expected=lambda wholes, rank: add(wholes),
        chains=True,
    ),
    "all_gather": Case(
        lazy=lambda x, group: mlxdist.all_gather(x, group=group),
        eager=lambda x, out, group, dtype: mlxdist.all_gather(x, group=group, out=out, dtype=dtype),
        given=lambda wholes, rank: _part(wholes[rank], rank, len(wholes)),
        expected=lambda wholes, rank: np.concatenate(
            [_part(whole, index, len(wholes)) for index, whole in enumerate(wholes)]
        ),
    ),
    "sum_scatter": Case(
        lazy=lambda x, group: mlxdist.sum_scatter(x, group=group),
        eager=lambda x, out, group, dtype: mlxdist.sum_scatter(x, group=group, out=out, dtype=dtype),
        expected=lambda wholes, rank: _part(add(wholes), rank, len(wholes)),
    ),
    "broadcast": Case(
        lazy=lambda x, group: mlxdist.broadcast(x, ROOT, group=group),
        eager=lambda x, out, group, dtype: mlxdist.broadcast(out, ROOT, group=group, out=out, dtype=dtype),
        expected=lambda wholes, rank: wholes[ROOT],
        chains=True,
        in_place=True,
    ),
    "all_to_all": Case(
        lazy=lambda x, group: mlxdist.all_to_all(x, group=group),
        eager=lambda x, out, group, dtype: mlxdist.all_to_all(x, group=group, out=out, dtype=dtype),
        expected=lambda wholes, rank: np.concatenate([_part(whole, rank, len(wholes)) for whole in wholes]),
        choice=False,
    ),
    "send_recv": Case(
        lazy=_send_recv_lazy, eager=_send_recv_eager, expected=_send_recv_expected, times=2, choice=False
    ),
}
