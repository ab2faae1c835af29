"""One rank of test_collectives.py: every collective on every dtype and size, against reference.py.

Arguments: the operations, or "every" for all of them at fewer sizes. Large arrays have a pattern whose period is prime,
so that the reference has to be computed for one period only and a piece that lands in the wrong place still shows.
"""

import sys
from pathlib import Path

import numpy as np

import mlxdist

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import reference

PERIOD = 4099
KIB = 1 << 10
SIZES = [0, 1, 4095, 4096, 4097, 7 * KIB, 28 * KIB, 700 * KIB, 896 * KIB, (4 << 10) * KIB, (16 << 10) * KIB]
# Around what one message holds, small and large, and above what a peer may be sent unasked.
FEWER_SIZES = [0, 1, 3967, 3969, 28 * KIB, 131 * KIB, 700 * KIB, 2100 * KIB]
REDUCTIONS = ["sum", "max", "min", "prod"]

group = mlxdist.init()
rank, size = group.rank(), group.size()


def elements(dtype: str, size_bytes: int) -> int:
    return max(1, size_bytes // reference.storage(dtype).itemsize) if size_bytes else 0


def keyword(dtype: str) -> dict:
    return {"dtype": "bfloat16"} if dtype == "bfloat16" else {}


def patterns(dtype: str, count: int, seed: int) -> list[np.ndarray]:
    """One period of every rank's input."""
    return [reference.distinct(min(count, PERIOD), dtype, r, seed) for r in range(size)]


def whole(pattern: np.ndarray, count: int) -> np.ndarray:
    return np.resize(pattern, count) if count else pattern


def require(result: np.ndarray, expected: np.ndarray, what: str) -> None:
    if not reference.same(result, expected):
        wrong = np.flatnonzero(result.ravel() != expected.ravel()) if result.shape == expected.shape else []
        raise AssertionError(
            f"rank {rank} of {size}: {what}: {result.dtype}{result.shape} against {expected.dtype}{expected.shape}, "
            f"{len(wrong)} elements differ, first at {wrong[:5]}"
        )


def reductions(op: str):
    def run(dtype: str, count: int, seed: int) -> None:
        inputs = patterns(dtype, count, seed)
        expected = whole(reference.all_reduce(inputs, dtype, op), count)
        x = whole(inputs[rank], count)
        before = x.copy()
        require(mlxdist.all_reduce(x, op, **keyword(dtype)), expected, f"all_{op} {dtype} {count}")
        require(x, before, f"all_{op} {dtype} {count}: the input")
        mlxdist.all_reduce(x, op, out=x, **keyword(dtype))
        require(x, expected, f"all_{op} {dtype} {count} in place")

    return run


def all_gather(dtype: str, count: int, seed: int) -> None:
    inputs = [whole(pattern, count) for pattern in patterns(dtype, count, seed)]
    result = mlxdist.all_gather(inputs[rank], **keyword(dtype))
    require(result, reference.all_gather(inputs), f"all_gather {dtype} {count}")


def sum_scatter(dtype: str, count: int, seed: int) -> None:
    count -= count % size
    inputs = patterns(dtype, count, seed)
    expected = np.split(whole(reference.all_reduce(inputs, dtype), count), size)[rank]
    x = whole(inputs[rank], count)
    require(mlxdist.sum_scatter(x, **keyword(dtype)), expected, f"sum_scatter {dtype} {count}")
    # In place: the result is the beginning of the input.
    mlxdist.sum_scatter(x, out=x[: count // size], **keyword(dtype))
    require(x[: count // size], expected, f"sum_scatter {dtype} {count} in place")


def broadcast(dtype: str, count: int, seed: int) -> None:
    inputs = patterns(dtype, count, seed)
    root = seed % size
    x = whole(inputs[rank], count)
    result = mlxdist.broadcast(x, root, **keyword(dtype))
    require(result, whole(reference.broadcast(inputs, root), count), f"broadcast from {root} {dtype} {count}")


def send_recv(dtype: str, count: int, seed: int) -> None:
    """Around the ring; rank 0 sends first, the others receive first."""
    if size == 1:
        return
    inputs = patterns(dtype, count, seed)
    x = whole(inputs[rank], count)
    to, source = (rank + 1) % size, (rank - 1) % size
    if rank == 0:
        mlxdist.send(x, to, **keyword(dtype))
    result = mlxdist.recv_like(x, source, **keyword(dtype))
    if rank != 0:
        mlxdist.send(x, to, **keyword(dtype))
    require(result, whole(inputs[source], count), f"send/recv {dtype} {count}")


def reduce_scatter(dtype: str, count: int, seed: int) -> None:
    count -= count % size
    op = REDUCTIONS[seed % 4]
    inputs = patterns(dtype, count, seed)
    expected = np.split(whole(reference.all_reduce(inputs, dtype, op), count), size)[rank]
    result = mlxdist.reduce_scatter(whole(inputs[rank], count), op, **keyword(dtype))
    require(result, expected, f"reduce_scatter {op} {dtype} {count}")


def reduce(dtype: str, count: int, seed: int) -> None:
    op, root = REDUCTIONS[seed % 4], seed % size
    inputs = patterns(dtype, count, seed)
    x = whole(inputs[rank], count)
    before = x.copy()
    expected = whole(reference.all_reduce(inputs, dtype, op), count) if rank == root else reference.nothing(x)
    what = f"reduce {op} to {root} {dtype} {count}"
    require(mlxdist.reduce(x, op, root, **keyword(dtype)), expected, what)
    require(x, before, f"{what}: the input")
    mlxdist.reduce(x, op, root, out=x, **keyword(dtype))
    require(x, expected if rank == root else before, f"{what} in place")


def gather(dtype: str, count: int, seed: int) -> None:
    root = seed % size
    inputs = [whole(pattern, count) for pattern in patterns(dtype, count, seed)]
    result = mlxdist.gather(inputs[rank], root, **keyword(dtype))
    require(result, reference.gather(inputs, root, rank), f"gather to {root} {dtype} {count}")


def scatter(dtype: str, count: int, seed: int) -> None:
    count -= count % size
    root = seed % size
    inputs = [whole(pattern, count) for pattern in patterns(dtype, count, seed)]
    x = inputs[rank].copy()
    expected = reference.scatter(inputs, root, rank)
    require(mlxdist.scatter(x, root, **keyword(dtype)), expected, f"scatter from {root} {dtype} {count}")
    require(x, inputs[rank], f"scatter from {root} {dtype} {count}: the input")
    # In place: the result is the beginning of the root's input.
    mlxdist.scatter(x, root, out=x[: count // size], **keyword(dtype))
    require(x[: count // size], expected, f"scatter from {root} {dtype} {count} in place")


def all_to_all(dtype: str, count: int, seed: int) -> None:
    count -= count % size
    inputs = [whole(pattern, count) for pattern in patterns(dtype, count, seed)]
    result = mlxdist.all_to_all(inputs[rank], **keyword(dtype))
    require(result, reference.all_to_all(inputs, rank), f"all_to_all {dtype} {count}")


def all_to_all_v(dtype: str, count: int, seed: int) -> None:
    """Rows of one to three elements, and parts that differ: many have none, one may have nearly all."""
    width = 1 + seed % 3
    random = np.random.default_rng(seed)
    rows = count // width
    cuts = np.sort(random.integers(0, rows + 1, (size, size - 1)) * random.integers(0, 2, (size, size - 1)), axis=1)
    counts = np.diff(cuts, prepend=0, append=rows, axis=1).tolist()
    inputs = [whole(pattern, rows * width).reshape(rows, width) for pattern in patterns(dtype, rows * width, seed)]
    received = [counts[source][rank] for source in range(size)]
    result = mlxdist.all_to_all_v(inputs[rank], counts[rank], received, **keyword(dtype))
    require(result, reference.all_to_all_v(inputs, counts, rank), f"all_to_all_v {counts} {dtype} {count}")


OPERATIONS = {
    **{f"all_{op}": (reductions(op), SIZES) for op in REDUCTIONS},
    "all_gather": (all_gather, SIZES),
    "sum_scatter": (sum_scatter, SIZES),
    "broadcast": (broadcast, SIZES),
    "send_recv": (send_recv, SIZES),
    "reduce_scatter": (reduce_scatter, FEWER_SIZES),
    "reduce": (reduce, FEWER_SIZES),
    "gather": (gather, FEWER_SIZES),
    "scatter": (scatter, FEWER_SIZES),
    "all_to_all": (all_to_all, FEWER_SIZES),
    "all_to_all_v": (all_to_all_v, FEWER_SIZES),
}


def run(operation: str, sizes: list[int]) -> None:
    done = 0
    for dtype in reference.DTYPES:
        for size_bytes in sizes:
            OPERATIONS[operation][0](dtype, elements(dtype, size_bytes), done)
            done += 1
    mlxdist.barrier()
    if rank == 0:
        print(f"{done} cases of {operation} on {size} ranks are exact")


def main(operations: list[str]) -> None:
    every = operations == ["every"]
    for name in OPERATIONS if every else operations:
        run(name, FEWER_SIZES if every else OPERATIONS[name][1])


if __name__ == "__main__":
    main(sys.argv[1:])
