"""One rank of tests/test_collectives.py: every collective on every dtype and size, against tests/reference.py.

Arguments: the operation. Large arrays repeat a pattern whose period is prime, so that the reference has to be
computed for one period only and a piece that lands in the wrong place still shows.
"""

import sys
from pathlib import Path

import numpy as np

import mlxdist

sys.path.insert(0, str(Path(__file__).parent.parent))
import reference  # noqa: E402

PERIOD = 4099
KIB = 1 << 10
SIZES = [0, 1, 4095, 4096, 4097, 7 * KIB, 28 * KIB, 700 * KIB, 896 * KIB, (4 << 10) * KIB, (16 << 10) * KIB]

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


OPERATIONS = {
    **{f"all_{op}": reductions(op) for op in ("sum", "max", "min", "prod")},
    "all_gather": all_gather,
    "sum_scatter": sum_scatter,
    "broadcast": broadcast,
    "send_recv": send_recv,
}


def main(operation: str) -> None:
    done = 0
    for dtype in reference.DTYPES:
        for size_bytes in SIZES:
            OPERATIONS[operation](dtype, elements(dtype, size_bytes), done)
            done += 1
    mlxdist.barrier()
    if rank == 0:
        print(f"{done} cases of {operation} on {size} ranks are exact")


if __name__ == "__main__":
    main(sys.argv[1])
