"""The plain NumPy implementation that every collective is compared with: slow, and obviously right.

Each function takes the inputs of all ranks in rank order and returns what every rank must end with.
Arrays of bfloat16 are their bits in uint16 together with dtype="bfloat16", because NumPy has no such type.
"""

from __future__ import annotations

import numpy as np

DTYPES = [
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "bfloat16", "float32", "float64", "complex64",
]  # fmt: skip


def storage(dtype: str) -> np.dtype:
    """The NumPy dtype that holds an MLX dtype."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


def bfloat16_to_float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounds to nearest, ties to even; a NaN stays a NaN."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def widen(array: np.ndarray, dtype: str) -> np.ndarray:
    """What a reduction computes in: float32 for 16-bit floats, the type itself otherwise."""
    if dtype == "bfloat16":
        return bfloat16_to_float32(array)
    return array.astype(np.float32) if dtype == "float16" else array


def narrow(array: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return float32_to_bfloat16(array)
    with np.errstate(over="ignore"):
        return array.astype(storage(dtype))


def complex_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a.real * b.real - a.imag * b.imag) + np.complex64(1j) * (a.real * b.imag + a.imag * b.real)


def combine(a: np.ndarray, b: np.ndarray, op: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        if op == "max":
            return np.maximum(a, b)
        if op == "min":
            return np.minimum(a, b)
        if a.dtype == bool:
            return np.logical_or(a, b) if op == "sum" else np.logical_and(a, b)
        if op == "sum":
            return a + b
        return complex_product(a, b) if a.dtype == np.complex64 else a * b


def all_reduce(inputs: list[np.ndarray], dtype: str, op: str = "sum") -> np.ndarray:
    """Accumulated in rank order and rounded once."""
    total = widen(inputs[0], dtype)
    for array in inputs[1:]:
        total = combine(total, widen(array, dtype), op)
    return narrow(total, dtype)


def all_gather(inputs: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.atleast_1d(array) for array in inputs])


def sum_scatter(inputs: list[np.ndarray], dtype: str, rank: int) -> np.ndarray:
    return np.split(all_reduce(inputs, dtype), len(inputs))[rank]


def broadcast(inputs: list[np.ndarray], root: int) -> np.ndarray:
    return inputs[root]


def distinct(shape: tuple[int, ...] | int, dtype: str, rank: int, seed: int = 0) -> np.ndarray:
    """Values that differ in every rank and element, of all signs, that no sum of eight ranks overflows
    where the type could; integers cover their whole range, since sums of them wrap."""
    random = np.random.default_rng([seed, rank])
    if dtype == "bool":
        return random.integers(0, 2, shape).astype(bool)
    if dtype == "bfloat16":
        return float32_to_bfloat16(random.standard_normal(shape, np.float32))
    kind = np.dtype(dtype)
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        return random.integers(limits.min, limits.max, shape, kind, endpoint=True)
    if kind.kind == "c":
        return (random.standard_normal(shape) + 1j * random.standard_normal(shape)).astype(kind)
    return random.standard_normal(shape).astype(kind)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Bitwise equal, where NaNs count as equal whatever their payload."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"))
