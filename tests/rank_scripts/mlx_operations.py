"""One rank of test_bridge.py: stock mx.distributed on group.mlx, for every dtype, against reference.py."""

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np

import mlxdist

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import reference

group = mlxdist.init()
rank, size, world = group.rank(), group.size(), group.mlx
# 7: no multiple of any SIMD width. 3 x 5000: more than one message, less than a bulk slot. Zero-size and scalar.
# 12 divides by all numbers of ranks.
SHAPES = [(), (0,), (7,), (2, 0, 3), (3, 5000), (12, 50), (2,) * 8]


def to_mlx(array: np.ndarray, dtype: str) -> mx.array:
    result = mx.array(array)
    if dtype == "float64":
        return computed(result.astype(mx.float64, stream=mx.cpu))  # mx.array() would make float32 of it
    return computed(result.view(mx.bfloat16) if dtype == "bfloat16" else result)


def computed(array: mx.array) -> mx.array:
    """Written by a kernel of the default device, which may be a GPU, and not at the beginning of a buffer."""
    return array if array.dtype == mx.float64 else mx.stack([array, array])[1]  # which GPUs do not have


def to_numpy(array: mx.array, dtype: str) -> np.ndarray:
    assert str(array.dtype) == f"mlx.core.{dtype}", f"result is {array.dtype}, expected {dtype}"
    array = computed(array)
    return np.array(array.view(mx.uint16) if dtype == "bfloat16" else array)


def require(result: mx.array, expected: np.ndarray, dtype: str, what: str) -> None:
    got = to_numpy(result, dtype)
    assert reference.same(got, expected), f"{what} {dtype} {expected.shape} on rank {rank}: {got} is not {expected}"


def float32_valued(inputs: list[np.ndarray], dtype: str) -> list[np.ndarray]:
    """MLX makes float32 of NumPy's float64, so that the values must survive that."""
    return [array.astype(np.float32).astype(np.float64) for array in inputs] if dtype == "float64" else inputs


def check(dtype: str, shape: tuple[int, ...], seed: int) -> None:
    inputs = float32_valued([reference.distinct(shape, dtype, r, seed) for r in range(size)], dtype)
    x = to_mlx(inputs[rank], dtype)
    reductions = {"sum": mx.distributed.all_sum, "max": mx.distributed.all_max, "min": mx.distributed.all_min}
    for op, operation in reductions.items():
        require(operation(x, group=world), reference.all_reduce(inputs, dtype, op), dtype, f"all_{op}")
    require(mlxdist.all_reduce(x, "prod"), reference.all_reduce(inputs, dtype, "prod"), dtype, "all_prod")
    if size > 1 or shape:  # MLX's all_gather of a scalar in a group of one stays a scalar
        require(mx.distributed.all_gather(x, group=world), reference.all_gather(inputs), dtype, "all_gather")
    for root in range(size):
        require(mlxdist.broadcast(x, root), inputs[root], dtype, f"broadcast from {root}")
    if shape and shape[0] % size == 0:
        scattered = mx.distributed.sum_scatter(x, group=world)
        require(scattered, reference.sum_scatter(inputs, dtype, rank), dtype, "sum_scatter")
        check_parts(x, inputs, dtype)
    if size > 1:
        check_on_root(x, inputs, dtype)
        check_send_recv(x, inputs, dtype)
    require(x, inputs[rank], dtype, "the input afterwards of")


def check_parts(x: mx.array, inputs: list[np.ndarray], dtype: str) -> None:
    """What MLX does not have, where the first axis is cut."""
    require(mlxdist.sum_scatter(x), reference.sum_scatter(inputs, dtype, rank), dtype, "our sum_scatter")
    for op in ("max", "min", "prod"):
        part = np.split(reference.all_reduce(inputs, dtype, op), size)[rank]
        require(mlxdist.reduce_scatter(x, op), part, dtype, f"reduce_scatter of {op}")
    parts = [np.split(array, size) for array in inputs]
    exchanged = np.concatenate([parts[r][rank] for r in range(size)])
    require(mlxdist.all_to_all(x), exchanged, dtype, "all_to_all")
    require(mlxdist.scatter(x, size - 1), parts[size - 1][rank], dtype, "scatter")
    # All rows to the rank after this one.
    rows = x.shape[0]
    send = [rows if r == (rank + 1) % size else 0 for r in range(size)]
    receive = [rows if r == (rank - 1) % size else 0 for r in range(size)]
    require(mlxdist.all_to_all_v(x, send, receive), inputs[(rank - 1) % size], dtype, "all_to_all_v")


def check_on_root(x: mx.array, inputs: list[np.ndarray], dtype: str) -> None:
    """The other ranks have an array without elements."""
    nothing = np.zeros((0, *x.shape[1:]), inputs[0].dtype)
    for root in (0, size - 1):
        for op in ("sum", "max", "prod"):
            expected = reference.all_reduce(inputs, dtype, op) if rank == root else nothing
            require(mlxdist.reduce(x, op, root), expected, dtype, f"reduce of {op} to {root}")
        expected = reference.all_gather(inputs) if rank == root else nothing
        require(mlxdist.gather(x, root), expected, dtype, f"gather to {root}")


def check_send_recv(x: mx.array, inputs: list[np.ndarray], dtype: str) -> None:
    """Around the ring; rank 0 sends first, the others receive first."""
    to, source = (rank + 1) % size, (rank - 1) % size
    if rank == 0:
        mx.eval(mx.distributed.send(x, to, group=world))
    received = mx.distributed.recv_like(x, source, group=world)
    require(received, inputs[source], dtype, "recv_like")
    if rank != 0:
        sent = mx.distributed.send(x, to, group=world)
        require(sent, inputs[rank], dtype, "what send returns")
    received = mx.distributed.recv(x.shape, x.dtype, source, group=world) if rank != 0 else None
    if rank == 0:
        mx.eval(mx.distributed.send(x, to, group=world))
        received = mx.distributed.recv(x.shape, x.dtype, source, group=world)
        mx.eval(received)
    else:
        mx.eval(received)
        mx.eval(mx.distributed.send(x, to, group=world))
    require(received, inputs[source], dtype, "recv")
    # Both at once, in one graph that every rank evaluates in the same order.
    there = mlxdist.sendrecv(x, to, source)
    back = mlxdist.sendrecv(there, source, to)
    require(back, inputs[rank], dtype, "sendrecv there and back")
    require(there, inputs[source], dtype, "sendrecv")


def check_layouts() -> None:
    """Inputs that are not row-contiguous, and inputs that begin in the middle of a buffer."""
    whole = [reference.distinct((6, 8), "float32", r) for r in range(size)]
    views = {
        "transposed": lambda a: a.T,
        "every second column": lambda a: a[:, ::2],
        "rows from the second": lambda a: a[2:],
        "broadcast": lambda a: (mx if isinstance(a, mx.array) else np).broadcast_to(a[:1], (6, 8)),
        "reversed": lambda a: a[::-1],
    }
    x = mx.array(whole[rank])
    for name, view in views.items():
        inputs = [view(array) for array in whole]
        total = reference.all_reduce(inputs, "float32")
        require(mx.distributed.all_sum(view(x), group=world), total, "float32", f"all_sum {name}")
        require(
            mx.distributed.all_gather(view(x), group=world), np.concatenate(inputs), "float32", f"all_gather {name}"
        )
        require(mlxdist.broadcast(view(x), size - 1), inputs[-1], "float32", f"broadcast {name}")
        require(
            mlxdist.all_reduce(view(x), "prod"),
            reference.all_reduce(inputs, "float32", "prod"),
            "float32",
            f"prod {name}",
        )
        if inputs[0].shape[0] % size == 0:
            part = np.split(total, size)[rank]
            require(mx.distributed.sum_scatter(view(x), group=world), part, "float32", f"sum_scatter {name}")
        require(x, whole[rank], "float32", f"the input after {name}")


for seed, dtype in enumerate(reference.DTYPES):
    for shape in SHAPES:
        check(dtype, shape, seed)
check_layouts()
assert (world.rank(), world.size()) == (rank, size)
assert isinstance(world, mx.distributed.Group)
print("exact")
