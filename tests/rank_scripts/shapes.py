"""Arrays of all shapes that NumPy users have, and what is refused, without harm to the group."""

import mlx.core as mx
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

# A number is an array of MLX, with the dtype that MLX gives it; one of NumPy is an array of NumPy.
for number, dtype in [(3, mx.int32), (2**40, mx.int64), (0.5, mx.float32), (True, mx.bool_), (1j, mx.complex64)]:
    results = [mlxdist.all_sum(number), mlxdist.broadcast(number), mlxdist.all_gather(number)]
    assert all(type(result) is mx.array and result.dtype == dtype for result in results)
    summed_number = number if dtype == mx.bool_ else number * size
    assert [result.tolist() for result in results] == [summed_number, number, [number] * size if size > 1 else number]
assert [mlxdist.all_max(rank).item(), mlxdist.all_min(rank - 0.5).item()] == [size - 1, -0.5]
assert mlxdist.all_reduce(2, "prod").item() == 2**size
assert mlxdist.reduce(rank, "sum", size - 1).tolist() == (sum(range(size)) if rank == size - 1 else [])
assert mlxdist.gather(rank, size - 1).size == (size if rank == size - 1 else 0)
assert isinstance(mlxdist.all_sum(np.float64(0.5)), np.ndarray)
if size > 1:
    left, right = (rank - 1) % size, (rank + 1) % size
    assert mlxdist.sendrecv(rank, right, left).item() == left
    if rank == 0:
        mx.eval(mlxdist.send(7.5, 1))
    elif rank == 1:
        assert mlxdist.recv_like(0.0, 0).item() == 7.5

# Parts along the first axis, and what those who are not the root get.
root = size - 1
everyone = [np.arange(6.0 * size).reshape(2 * size, 3) + 100 * r for r in range(size)]
assert np.array_equal(mlxdist.scatter(everyone[rank], root), everyone[root][2 * rank : 2 * rank + 2])
assert mlxdist.reduce(mine((4, 3)), "max", root).shape == ((4, 3) if rank == root else (0, 3))
assert mlxdist.reduce(np.array(1.0), "sum", root).shape == (() if rank == root else (0,))
assert mlxdist.gather(mine((4, 3)), root).shape == ((4 * size, 3) if rank == root else (0, 3))
assert mlxdist.gather(mine((0, 3)), root).shape == (0, 3)
exchanged = np.concatenate([array[2 * rank : 2 * rank + 2] for array in everyone])
assert np.array_equal(mlxdist.all_to_all(everyone[rank]), exchanged)
assert np.array_equal(mlxdist.all_to_all(np.asfortranarray(everyone[rank])), exchanged)
assert np.array_equal(mlxdist.all_to_all(everyone[rank][::-1])[-2:], everyone[root][::-1][2 * rank : 2 * rank + 2])
assert mlxdist.all_to_all(mine((0, 4))).shape == (0, 4)
# Everyone sends r rows to rank r.
counts, rows = list(range(size)), sum(range(size))
received = mlxdist.all_to_all_v(everyone[rank][:rows], counts, [rank] * size)
begin = sum(range(rank))
assert np.array_equal(received, np.concatenate([array[begin : begin + rank] for array in everyone]))
assert received.shape == (rank * size, 3)

# `out`: somewhere else, the input itself, and a part of the input that only a copy keeps right.
out = np.zeros((7, 9), np.float32)
assert mlxdist.all_sum(mine((7, 9)), out=out) is out and np.array_equal(out, summed((7, 9)))
x = mine((1000,))
shifted = x[1:]
expected = summed((1000,))[:-1]
mlxdist.all_sum(x[:-1], out=shifted)
assert np.array_equal(shifted, expected)
x = everyone[rank].copy()
assert np.array_equal(mlxdist.all_to_all(x, out=x), exchanged)
if size > 1:
    x = everyone[rank].copy()
    assert np.array_equal(mlxdist.sendrecv(x, (rank + 1) % size, (rank - 1) % size, out=x), everyone[rank - 1])

# Lists of numbers, as the sums of losses and counts are.
assert mlxdist.all_sum([float(rank), 2]).tolist() == [sum(range(size)), 2.0 * size]
assert mlxdist.all_gather((rank, -rank)).tolist() == [number for other in range(size) for number in (other, -other)]

# Rejected before any work, on this rank alone: the group goes on.
for bad, message in [
    (lambda: mlxdist.all_sum({1.0, 2.0}), "must be an mx.array or a numpy.ndarray or another buffer"),
    (lambda: mlxdist.all_sum([1, [2]]), "x makes no mx.array: Initialization encountered extra dimension"),
    (lambda: mlxdist.all_sum([2**63]), "x does not fit int64"),
    (lambda: mlxdist.all_sum(np.array(["a"])), "bool, uint8"),
    (lambda: mlxdist.all_sum(2**63), "x does not fit int64"),
    (lambda: mlxdist.all_sum(10**5000), "x does not fit int64"),  # too long to be formatted
    (lambda: mlxdist.all_sum(3, out=np.zeros(1)), "out and dtype are for NumPy arrays"),
    (lambda: mlxdist.all_sum(np.zeros(3, np.complex128)), "complex128"),
    (lambda: mlxdist.all_sum(np.zeros(3, ">f4")), "byte order"),
    (lambda: mlxdist.all_sum(mine((4,)), out=np.zeros(5, np.float32)), "out must have shape"),
    (lambda: mlxdist.all_sum(mine((4,)), out=frozen[:4]), "read-only"),
    (lambda: mlxdist.all_sum(mine((4,)), out=np.zeros(8, np.float32)[::2]), "contiguous"),
    (lambda: mlxdist.all_reduce(mine((4,)), "average"), "'sum', 'max', 'min' or 'prod'"),
    (lambda: mlxdist.broadcast(mine((4,)), size), "root is"),
    (lambda: mlxdist.reduce(mine((4,)), "sum", -1), "root is"),
    (lambda: mlxdist.all_to_all_v(mine((4,)), [1] * (size + 1), [1] * size), "one per rank"),
    (lambda: mlxdist.all_to_all_v(mine((4,)), [1] * size, [-1] * size), "one per rank"),
    (lambda: mlxdist.all_to_all_v(mine((size + 1,)), [1] * size, [1] * size), "rows, but x has shape"),
    (lambda: mlxdist.all_to_all_v(mine((size,)), [1] * size, [2] * size), "to itself"),
    (lambda: mlxdist.send(mine((4,)), rank), "the group has one rank" if size == 1 else "another rank"),
]:
    with pytest.raises(mlxdist.InvalidArgument, match=message):
        bad()
if size > 1:
    for refused in (mlxdist.sum_scatter, mlxdist.scatter, mlxdist.all_to_all):
        for bad in (mine((size + 1,)), mine((1, size)), np.array(1.0), 1.0):
            with pytest.raises(mlxdist.InvalidArgument, match="not a multiple of"):
                refused(bad)
assert np.array_equal(mlxdist.all_sum(mine((5,))), summed((5,)))
print("exact")
