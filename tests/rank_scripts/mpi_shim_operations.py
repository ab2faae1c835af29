"""One rank of test_mpi_shim.py: a program that knows only MLX, for every dtype, against reference.py.

It uses the default group, then the two halves of it (even and odd ranks) at once.
"""

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import reference

world = mx.distributed.init()
SHAPES = [(), (0,), (7,), (3, 5000), (2,) * 8]


def to_mlx(array: np.ndarray, dtype: str) -> mx.array:
    result = mx.array(array)
    if dtype == "float64":
        return result.astype(mx.float64, stream=mx.cpu)  # mx.array() would make float32 of it
    return result.view(mx.bfloat16) if dtype == "bfloat16" else result


def inputs_of(members: list[int], shape: tuple[int, ...], dtype: str) -> list[np.ndarray]:
    inputs = [reference.distinct(shape, dtype, member) for member in members]
    # MLX makes float32 of NumPy's float64, so the values must survive that.
    return [array.astype(np.float32).astype(np.float64) for array in inputs] if dtype == "float64" else inputs


def require(result: mx.array, expected: np.ndarray, dtype: str, what: str) -> None:
    assert str(result.dtype) == f"mlx.core.{dtype}"
    got = np.array(result.view(mx.uint16) if dtype == "bfloat16" else result)
    assert reference.same(got, expected), f"{what} {dtype} {expected.shape}: {got} is not {expected}"


def check(members: list[int], dtype: str, shape: tuple[int, ...], **group: mx.distributed.Group) -> None:
    inputs = inputs_of(members, shape, dtype)
    rank, size = members.index(world.rank()), len(members)
    x = to_mlx(inputs[rank], dtype)
    reductions = {"sum": mx.distributed.all_sum, "max": mx.distributed.all_max, "min": mx.distributed.all_min}
    for op, operation in reductions.items():
        require(operation(x, **group), reference.all_reduce(inputs, dtype, op), dtype, f"all_{op}")
    if size == 1:
        return
    require(mx.distributed.all_gather(x, **group), reference.all_gather(inputs), dtype, "all_gather")
    if shape and shape[0] % size == 0:
        part = reference.all_reduce(inputs, dtype, "sum")[shape[0] // size * rank :][: shape[0] // size]
        require(mx.distributed.sum_scatter(x, **group), part, dtype, "sum_scatter")
    to, source = (rank + 1) % size, (rank - 1) % size
    if rank == 0:
        mx.eval(mx.distributed.send(x, to, **group))
    require(mx.distributed.recv_like(x, source, **group), inputs[source], dtype, "recv_like")
    if rank != 0:
        mx.eval(mx.distributed.send(x, to, **group))
    require(x, inputs[rank], dtype, "the input afterwards of")


everyone = list(range(world.size()))
for dtype in reference.DTYPES:
    for shape in SHAPES:
        check(everyone, dtype, shape)

if sys.argv[1] == "split":
    halves = [everyone[0::2], everyone[1::2]]
    half = world.split(world.rank() % 2)
    assert (half.size(), half.rank()) == (len(halves[world.rank() % 2]), world.rank() // 2)
    for dtype in reference.DTYPES:
        for shape in SHAPES:
            check(halves[world.rank() % 2], dtype, shape, group=half)
    backwards = world.split(0, world.size() - world.rank())
    assert backwards.rank() == world.size() - 1 - world.rank(), "the key decides the order"
    check(everyone[::-1], "float32", (7,), group=backwards)
    again = half.split(0)
    assert (again.rank(), again.size()) == (half.rank(), half.size()), "a part is split again"
    check(halves[world.rank() % 2], "float32", (7,), group=again)
print(f"exact {world.rank()} of {world.size()}")
