"""One rank of test_buffers.py. Argument: the scenario."""

import array
import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
from scenarios import rank, run_scenario, size

import mlxdist

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import reference

after, before = (rank + 1) % size, (rank - 1) % size
root = size - 1


def require(result: np.ndarray, expected: np.ndarray, what: str) -> None:
    assert reference.same(result, expected), f"{what} on rank {rank}: {result}, expected {expected}"


def everything(inputs: list[np.ndarray], name: str, **keyword: object) -> None:
    """Every operation that takes arrays of this shape, on the inputs of all ranks."""
    x = inputs[rank]
    shape = x.shape
    total, joined = sum(inputs), np.concatenate([np.atleast_1d(y) for y in inputs])
    nothing = np.zeros((0, *shape[1:]), x.dtype)
    cases: list[tuple[str, Callable, np.ndarray]] = [
        ("all_sum", lambda: mlxdist.all_sum(x), total),
        ("all_max", lambda: mlxdist.all_max(x), np.maximum.reduce(inputs)),
        ("all_gather", lambda: mlxdist.all_gather(x), joined),
        ("broadcast", lambda: mlxdist.broadcast(x, root), inputs[root]),
        ("reduce", lambda: mlxdist.reduce(x, root=root), total if rank == root else nothing),
        ("reduce min", lambda: mlxdist.reduce(x, "min"), np.minimum.reduce(inputs) if rank == 0 else nothing),
        ("gather", lambda: mlxdist.gather(x, root), joined if rank == root else nothing),
        ("sendrecv", lambda: mlxdist.sendrecv(x, after, before), inputs[before]),
    ]
    if shape and shape[0] % size == 0:
        parts = [np.split(y, size) for y in inputs]
        counts = [shape[0] // size] * size
        exchanged = np.concatenate([parts[i][rank] for i in range(size)])
        cases += [
            ("sum_scatter", lambda: mlxdist.sum_scatter(x), np.split(total, size)[rank]),
            (
                "reduce_scatter",
                lambda: mlxdist.reduce_scatter(x, "max"),
                np.split(np.maximum.reduce(inputs), size)[rank],
            ),
            ("scatter", lambda: mlxdist.scatter(x, root), parts[root][rank]),
            ("all_to_all", lambda: mlxdist.all_to_all(x), exchanged),
            ("all_to_all_v", lambda: mlxdist.all_to_all_v(x, counts, counts), exchanged),
        ]
    kept = x.copy()
    for operation, run, expected in cases:
        require(run(), np.asarray(expected, x.dtype), f"{operation} of {name}")
    require(x, kept, f"the input of {name}")


def shapes() -> None:
    """Scalars, nothing, many dimensions, many bytes, and every kind of stride."""
    for shape in [(), (0,), (0, 3), (6, 0, 2), (6,), (6, 5, 7), (6, *(1, 2) * 4), (6, 70_000)]:
        everything([reference.distinct(shape, "float32", r) for r in range(size)], str(shape))
    whole = [reference.distinct((12, 10), "int32", r) for r in range(size)]
    views = {
        "transposed": lambda a: a.T[:6],
        "every second column": lambda a: a[:, ::2],
        "reversed": lambda a: a[::-1],
        "repeated": lambda a: np.broadcast_to(a[0], (6, 10)),
        "unaligned": lambda a: np.frombuffer(b"x" + a.tobytes(), np.uint8)[1:].view(np.int32).reshape(a.shape),
    }
    for name, view in views.items():
        everything([view(a) for a in whole], name)


def buffers() -> None:
    """Memory that is no array of NumPy: in, out, and both."""
    x = bytearray([rank + 1] * 6)
    total = sum(range(1, size + 1))
    require(mlxdist.all_sum(x), np.full(6, total, np.uint8), "bytearray")
    require(mlxdist.all_gather(bytes(x)), np.repeat(np.arange(1, size + 1), 6).astype(np.uint8), "bytes")
    assert mlxdist.all_sum(x, out=x) is x and x == bytes([total] * 6)
    ours = array.array("d", [rank] * size)
    received = (ctypes.c_double * size)()
    assert mlxdist.all_to_all(ours, out=received) is received
    assert list(received) == list(range(size)) and list(ours) == [rank] * size
    assert mlxdist.all_to_all(ours, out=ours) is ours and list(ours) == list(range(size))  # through a copy
    picture = memoryview(bytearray(4 * 3 * size)).cast("f", (size, 3))
    mlxdist.all_gather(np.full(3, rank, np.float32), out=picture)
    assert picture.tolist() == [[r] * 3 for r in range(size)]
    every_second = memoryview(np.arange(10.0) + rank)[::2]
    require(mlxdist.all_sum(every_second), np.arange(0.0, 10, 2) * size + sum(range(size)), "strided")
    # On the other ranks `out` stays as it is.
    out = bytearray(b"\7" * 3)
    result = mlxdist.reduce(bytes([rank + 1] * 3), root=root, out=out)
    assert (
        (result is out and out == bytes([total] * 3)) if rank == root else (result.shape == (0,) and out == b"\7" * 3)
    )
    # Point to point, and started.
    message = array.array("i", [rank, 7])
    if rank == 0:
        mlxdist.send(message, 1)
        assert mlxdist.recv_like(message, 1, out=message) is message and list(message) == [1, 8]
    elif rank == 1:
        received = (ctypes.c_int * 2)()
        assert mlxdist.recv((2,), np.int32, 0, out=received) is received and list(received) == [0, 7]
        mlxdist.send(array.array("i", [1, 8]), 0)
    out = bytearray(3)
    handle = mlxdist.sendrecv(bytes([rank] * 2), after, before, shape=(2,), out=bytearray(2), async_op=True)
    assert handle.wait() == bytes([before] * 2)
    try:
        out_of_order = mlxdist.all_gather(b"ab", out=out)
    except mlxdist.InvalidArgument as error:
        assert "out must have shape" in str(error)
    else:
        raise AssertionError(out_of_order)


def bits() -> None:
    """bfloat16 as uint16, by every name of it, and what goes wrong without."""
    inputs = [reference.distinct((6, 5), "bfloat16", r) for r in range(size)]
    x = inputs[rank]
    expected = reference.all_reduce(inputs, "bfloat16")
    for dtype in ("bfloat16", mx.bfloat16):
        require(mlxdist.all_sum(x, dtype=dtype), expected, f"all_sum, dtype={dtype}")
        require(mlxdist.sum_scatter(x, dtype=dtype), np.split(expected, size)[rank], f"sum_scatter, dtype={dtype}")
        reduced = mlxdist.reduce(x, root=root, dtype=dtype)
        require(reduced, expected if rank == root else expected[:0], f"reduce, dtype={dtype}")
        require(mlxdist.sendrecv(x, after, before, dtype=dtype), inputs[before], f"sendrecv, dtype={dtype}")
        require(mlxdist.all_sum(x, dtype=dtype, async_op=True).wait(), expected, f"started, dtype={dtype}")
    # Of what is received shape and dtype may be others.
    wide = np.arange(rank + 1, dtype=np.float64)
    if rank % 2 == 0 and size == 2:
        result = mlxdist.sendrecv(wide, after, before, (3,), np.int16)
        require(result, np.array([1, 2, 3], np.int16), "another dtype")
    elif size == 2:
        result = mlxdist.sendrecv(np.array([1, 2, 3], np.int16), after, before, (1,), "float64")
        require(result, np.zeros(1), "another dtype")


def refused() -> None:
    """Before anything is sent, on this rank alone: the group goes on."""
    none, ones = [0] * size, [1] * size
    own = [int(r == rank) for r in range(size)]
    cases: list[tuple[str, Callable]] = [
        ("scatter: the first dimension of shape", lambda x: mlxdist.scatter(x)),
        ("all_to_all: the first dimension of shape", lambda x: mlxdist.all_to_all(x)),
        ("reduce_scatter: the first dimension of shape ()", lambda x: mlxdist.reduce_scatter(scalar(x))),
        ("reduce: root is", lambda x: mlxdist.reduce(x, root=size)),
        ("gather: root is -1", lambda x: mlxdist.gather(x, -1)),
        ("scatter: root is", lambda x: mlxdist.scatter(x, size)),
        ("reduce: op must be", lambda x: mlxdist.reduce(x, "mean")),
        ("sendrecv: dst is", lambda x: mlxdist.sendrecv(x, rank, before)),
        ("sendrecv: src is", lambda x: mlxdist.sendrecv(x, after, size)),
        ("sendrecv: shape (-1,) has a negative", lambda x: mlxdist.sendrecv(x, after, before, (-1,))),
        ("all_to_all_v: send_counts must be", lambda x: mlxdist.all_to_all_v(x, [size + 1], none)),
        ("all_to_all_v: recv_counts must be", lambda x: mlxdist.all_to_all_v(x, ones, [-1] * size)),
        ("but x has shape", lambda x: mlxdist.all_to_all_v(x, none, none)),
        ("but x has shape ()", lambda x: mlxdist.all_to_all_v(scalar(x), none, none)),
        ("rows to itself", lambda x: mlxdist.all_to_all_v(x[:1], own, none)),
    ]
    for words, call in cases:
        for x in (np.ones((size + 1, 2), np.float32), mx.ones((size + 1, 2))):
            try:
                result = call(x)
            except mlxdist.InvalidArgument as error:
                assert words in str(error), error
            else:
                raise AssertionError(f"{words}: no error, but {result}")
    require(mlxdist.all_sum(np.ones(3)), np.full(3, float(size)), "afterwards")


def scalar(x: np.ndarray | mx.array) -> np.ndarray | mx.array:
    return x[:1, :1].reshape(())


run_scenario(globals())
