"""The plain NumPy implementation that every collective is compared with: slow, and obviously right.

Each function takes the inputs of all ranks in rank order and returns what every rank must end with.
Arrays of bfloat16 are their bits in uint16 together with dtype="bfloat16", because NumPy has no such type.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def fold(inputs: list[np.ndarray], dtype: str, op: str) -> np.ndarray:
    """One step of a reduction: all inputs in their order, rounded once."""
    total = widen(inputs[0], dtype)
    for array in inputs[1:]:
        total = combine(total, widen(array, dtype), op)
    return narrow(total, dtype)


# The collectives, as the algorithms "direct" and "mesh" reduce: in rank order, rounded once.


def all_reduce(inputs: list[np.ndarray], dtype: str, op: str = "sum") -> np.ndarray:
    return fold(inputs, dtype, op)


def all_gather(inputs: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.atleast_1d(array) for array in inputs])


def reduce_scatter(inputs: list[np.ndarray], dtype: str, op: str, rank: int) -> np.ndarray:
    return np.split(all_reduce(inputs, dtype, op), len(inputs))[rank]


def sum_scatter(inputs: list[np.ndarray], dtype: str, rank: int) -> np.ndarray:
    return reduce_scatter(inputs, dtype, "sum", rank)


def broadcast(inputs: list[np.ndarray], root: int) -> np.ndarray:
    return inputs[root]


def reduce(inputs: list[np.ndarray], dtype: str, op: str, root: int, rank: int) -> np.ndarray:
    return all_reduce(inputs, dtype, op) if rank == root else nothing(inputs[rank])


def gather(inputs: list[np.ndarray], root: int, rank: int) -> np.ndarray:
    return all_gather(inputs) if rank == root else nothing(inputs[rank])


def scatter(inputs: list[np.ndarray], root: int, rank: int) -> np.ndarray:
    return np.split(inputs[root], len(inputs))[rank]


def all_to_all(inputs: list[np.ndarray], rank: int) -> np.ndarray:
    return np.concatenate([np.split(array, len(inputs))[rank] for array in inputs])


def all_to_all_v(inputs: list[np.ndarray], counts: list[list[int]], rank: int) -> np.ndarray:
    """counts[i][j]: rows that rank i sends to rank j."""
    return np.concatenate([np.split(array, np.cumsum(counts[i])[:-1])[rank] for i, array in enumerate(inputs)])


def nothing(array: np.ndarray) -> np.ndarray:
    """What a rank that is not the root gets."""
    return np.empty((0, *array.shape[1:]), array.dtype)


# The reductions of the other algorithms, which round at each step.


def ring_all_reduce(inputs: list[np.ndarray], dtype: str, op: str = "sum") -> np.ndarray:
    """One part per rank, of as equal sizes as can be: that of rank q is reduced in the order q+1, q+2, ..., q."""
    size, count = len(inputs), inputs[0].size
    parts = []
    for q in range(size):
        part = slice(count * q // size, count * (q + 1) // size)
        ranks = [(q + 1 + i) % size for i in range(size)]
        result = inputs[ranks[0]].ravel()[part]
        for rank in ranks[1:]:
            result = fold([result, inputs[rank].ravel()[part]], dtype, op)
        parts.append(result)
    return np.concatenate(parts).reshape(inputs[0].shape)


def recursive_doubling_all_reduce(inputs: list[np.ndarray], dtype: str, op: str = "sum") -> np.ndarray:
    """With partners at distance 1, 2, 4 ...; before that the first ranks join in pairs, until a power of 2 is left."""
    size = len(inputs)
    power = 1 << (size.bit_length() - 1)
    pairs = size - power
    values = [fold(inputs[2 * i : 2 * i + 2], dtype, op) for i in range(pairs)] + inputs[2 * pairs :]
    distance = 1
    while distance < power:
        values = [fold([values[min(i, i ^ distance)], values[max(i, i ^ distance)]], dtype, op) for i in range(power)]
        distance *= 2
    return values[0]


def hierarchical_all_reduce(
    inputs: list[np.ndarray], dtype: str, op: str = "sum", hosts: Sequence[int] = ()
) -> np.ndarray:
    """Within each host, in rank order; then the hosts' results, in the order of their first ranks."""
    groups = [[x for x, of in zip(inputs, hosts) if of == host] for host in dict.fromkeys(hosts)]
    return fold([fold(group, dtype, op) for group in groups], dtype, op)


def tree_reduce(inputs: list[np.ndarray], dtype: str, op: str, root: int) -> np.ndarray:
    """The binomial tree, numbered from the root: node k has the children k+1, k+2, k+4 ... below its own lowest bit.
    Each node reduces its own input and what the children have, in this order."""
    size = len(inputs)

    def value(node: int) -> np.ndarray:
        sources, bit = [inputs[(node + root) % size]], 1
        while node + bit < size and not node & bit:
            sources.append(value(node + bit))
            bit *= 2
        return fold(sources, dtype, op)

    return value(0)


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
    return equal_bytes(a, b) or bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"))


def equal_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    """Eight at a time: of float32 this takes a tenth of what NumPy takes to look for NaN, too."""
    a, b = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (a, b))
    rest = len(a) // 8 * 8
    words = np.array_equal(a[:rest].view(np.uint64), b[:rest].view(np.uint64))
    return bool(words and np.array_equal(a[rest:], b[rest:]))
