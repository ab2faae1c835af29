"""Arrays of all shapes that NumPy users have, and what is refused, without harm to the group."""

import numpy as np
import pytest

import mlxdist

group = mlxdist.init()
rank, size = group.rank(), group.size()
total = sum(range(1, size + 1))


def mine(shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    return np.asarray(np.arange(np.prod(shape)).reshape(shape) * (rank + 1), dtype)


def summed(shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    return np.asarray(np.arange(np.prod(shape)).reshape(shape) * total, dtype)


for shape in [(), (1,), (0, 5), (2, 3, 5), (1,) * 6 + (4,), (2, 1, 2, 1, 2, 1, 2, 3)]:
    assert np.array_equal(mlxdist.all_sum(mine(shape)), summed(shape)), shape

# Strides: transposed, reversed, every other column; a read-only input; an input that no alignment holds for.
assert np.array_equal(mlxdist.all_sum(mine((40, 50)).T), summed((40, 50)).T)
assert np.array_equal(mlxdist.all_sum(mine((300,))[::-1]), summed((300,))[::-1])
assert np.array_equal(mlxdist.all_sum(mine((60, 70))[:, ::2]), summed((60, 70))[:, ::2])
frozen = mine((10,))
frozen.flags.writeable = False
assert np.array_equal(mlxdist.all_sum(frozen), summed((10,)))
odd = np.frombuffer(b"x" + mine((100,)).tobytes(), np.uint8)[1:].view(np.float32)
assert np.array_equal(mlxdist.all_sum(odd), summed((100,)))

# A scalar becomes one element per rank.
gathered = mlxdist.all_gather(np.array(rank))
assert gathered.shape == ((size,) if size > 1 else ()) and np.array_equal(np.atleast_1d(gathered), np.arange(size))
assert mlxdist.all_gather(mine((3, 4))).shape == (3 * size, 4)
assert mlxdist.sum_scatter(mine((2 * size, 4))).shape == (2, 4)

# `out`: somewhere else, the input itself, and a part of the input that only a copy keeps right.
out = np.zeros((7, 9), np.float32)
assert mlxdist.all_sum(mine((7, 9)), out=out) is out and np.array_equal(out, summed((7, 9)))
x = mine((1000,))
shifted = x[1:]
expected = summed((1000,))[:-1]
mlxdist.all_sum(x[:-1], out=shifted)
assert np.array_equal(shifted, expected)

# Refused before any work, on this rank alone: the group goes on.
for bad, message in [
    (lambda: mlxdist.all_sum([1.0, 2.0]), "must be an mx.array or a numpy.ndarray"),
    (lambda: mlxdist.all_sum(np.array(["a"])), "bool, uint8"),
    (lambda: mlxdist.all_sum(np.zeros(3, np.complex128)), "complex128"),
    (lambda: mlxdist.all_sum(np.zeros(3, ">f4")), "byte order"),
    (lambda: mlxdist.all_sum(mine((4,)), out=np.zeros(5, np.float32)), "out must have shape"),
    (lambda: mlxdist.all_sum(mine((4,)), out=frozen[:4]), "read-only"),
    (lambda: mlxdist.all_sum(mine((4,)), out=np.zeros(8, np.float32)[::2]), "contiguous"),
    (lambda: mlxdist.all_reduce(mine((4,)), "average"), "'sum', 'max', 'min' or 'prod'"),
    (lambda: mlxdist.broadcast(mine((4,)), size), "root is"),
    (lambda: mlxdist.send(mine((4,)), rank), "nobody" if size == 1 else "another rank"),
]:
    with pytest.raises(mlxdist.InvalidArgument, match=message):
        bad()
assert np.array_equal(mlxdist.all_sum(mine((5,))), summed((5,)))
print("exact")
