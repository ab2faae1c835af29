"""One rank of test_algorithms.py: one algorithm, in every operation that has it, against reference.py.

Arguments: the number of the virtual host of each rank, where they are on several.

Prints a digest of all results that every rank must have alike.
"""

import functools
import hashlib
import os
import sys
import time
from pathlib import Path

import numpy as np

import mlxdist

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import reference

DTYPES = ["float16", "bfloat16", "float32", "int8", "complex64"]
# Nothing, one element, too few for every rank, an odd number, and more bytes than a bulk slot holds.
COUNTS = [0, 1, 3, 1237, 140_001]
ALGORITHMS = {
    "all_sum": ["direct", "mesh", "ring", "recursive_doubling", "tree", "hierarchical"],
    "all_gather": ["direct", "ring", "hierarchical"],
    "reduce_scatter": ["direct", "ring", "hierarchical"],
    "broadcast": ["direct", "mesh", "ring", "tree"],
    "reduce": ["direct", "mesh", "ring", "tree"],
    "gather": ["direct", "ring"],
    "scatter": ["direct", "ring"],
    "all_to_all": ["direct", "hierarchical"],
    "barrier": ["direct", "ring", "recursive_doubling"],
}
hosts = sys.argv[1:]
REDUCTIONS = {
    "ring": reference.ring_all_reduce,
    "recursive_doubling": reference.recursive_doubling_all_reduce,
    "hierarchical": functools.partial(reference.hierarchical_all_reduce, hosts=hosts),
}

if hosts:
    os.environ["MLXDIST_EMULATED_NODE"] = hosts[int(os.environ["MLXDIST_RANK"])]
algorithm = os.environ["MLXDIST_ALGO"]
group = mlxdist.init()
rank, size = group.rank(), group.size()
digest = hashlib.sha256()


def require(result: np.ndarray, expected: np.ndarray, what: str) -> None:
    assert reference.same(result, expected), f"rank {rank} of {size}, {algorithm}: {what}: {result} is not {expected}"


def keyword(dtype: str) -> dict:
    return {"dtype": "bfloat16"} if dtype == "bfloat16" else {}


def all_sum(inputs: list[np.ndarray], dtype: str, op: str, root: int) -> None:
    expected = REDUCTIONS.get(algorithm, reference.all_reduce)(inputs, dtype, op)
    x = inputs[rank].copy()
    result = mlxdist.all_reduce(x, op, **keyword(dtype))
    require(result, expected, f"all_reduce {op} of {dtype} {x.shape}")
    mlxdist.all_reduce(x, op, out=x, **keyword(dtype))
    require(x, expected, f"all_reduce {op} of {dtype} {x.shape} in place")
    digest.update(result.tobytes())


def all_gather(inputs: list[np.ndarray], dtype: str, op: str, root: int) -> None:
    result = mlxdist.all_gather(inputs[rank], **keyword(dtype))
    require(result, reference.all_gather(inputs), f"all_gather of {dtype} {inputs[0].shape}")


def reduce_scatter(inputs: list[np.ndarray], dtype: str, op: str, root: int) -> None:
    inputs = [array[: array.size - array.size % size] for array in inputs]
    expected = np.split(REDUCTIONS.get(algorithm, reference.all_reduce)(inputs, dtype, op), size)[rank]
    x = inputs[rank].copy()
    require(mlxdist.reduce_scatter(x, op, **keyword(dtype)), expected, f"reduce_scatter {op} of {dtype} {x.shape}")
    mlxdist.reduce_scatter(x, op, out=x[: expected.size], **keyword(dtype))
    require(x[: expected.size], expected, f"reduce_scatter {op} of {dtype} {x.shape} in place")


def broadcast(inputs: list[np.ndarray], dtype: str, op: str, root: int) -> None:
    result = mlxdist.broadcast(inputs[rank], root, **keyword(dtype))
    require(result, inputs[root], f"broadcast from {root} of {dtype} {result.shape}")


def reduce(inputs: list[np.ndarray], dtype: str, op: str, root: int) -> None:
    if algorithm == "tree":
        expected = reference.tree_reduce(inputs, dtype, op, root)
    else:
        expected = REDUCTIONS.get(algorithm, reference.all_reduce)(inputs, dtype, op)
    x = inputs[rank].copy()
    what = f"reduce {op} to {root} of {dtype} {x.shape}"
    result = mlxdist.reduce(x, op, root, **keyword(dtype))
    require(result, expected if rank == root else reference.nothing(x), what)
    require(x, inputs[rank], f"{what}: the input")
    mlxdist.reduce(x, op, root, out=x, **keyword(dtype))
    require(x, expected if rank == root else inputs[rank], f"{what} in place")


def gather(inputs: list[np.ndarray], dtype: str, op: str, root: int) -> None:
    result = mlxdist.gather(inputs[rank], root, **keyword(dtype))
    require(result, reference.gather(inputs, root, rank), f"gather to {root} of {dtype} {inputs[0].shape}")


def scatter(inputs: list[np.ndarray], dtype: str, op: str, root: int) -> None:
    whole = [array[: array.size - array.size % size] for array in inputs]
    result = mlxdist.scatter(whole[rank], root, **keyword(dtype))
    require(result, reference.scatter(whole, root, rank), f"scatter from {root} of {dtype} {whole[0].shape}")


def all_to_all(inputs: list[np.ndarray], dtype: str, op: str, root: int) -> None:
    whole = [array[: array.size - array.size % size] for array in inputs]
    result = mlxdist.all_to_all(whole[rank], **keyword(dtype))
    require(result, reference.all_to_all(whole, rank), f"all_to_all of {dtype} {whole[0].shape}")


def barriers() -> None:
    """No rank leaves before the last has entered. All ranks read the same clock."""
    for late in range(size):
        if rank == late:
            time.sleep(0.01)
        came = time.monotonic()
        mlxdist.barrier()
        left = time.monotonic()
        assert left >= mlxdist.all_max(np.array([came]))[0], f"rank {rank} left a barrier before all had come"


OPERATIONS = {
    "all_sum": all_sum,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "broadcast": broadcast,
    "reduce": reduce,
    "gather": gather,
    "scatter": scatter,
    "all_to_all": all_to_all,
}


def main() -> None:
    done = []
    for name, algorithms in ALGORITHMS.items():
        selected = {group.algorithm(name, 0 if name == "barrier" else count) for count in (0, 1000, 10_000_000)}
        assert selected <= set(algorithms), f"{name} uses {selected}"
        if algorithm in algorithms:
            assert selected == {algorithm}, f"{name} uses {selected}, not {algorithm}"
            done.append(name)
    case = 0
    for dtype in DTYPES:
        for count in COUNTS:
            inputs = [reference.distinct(count, dtype, r, case) for r in range(size)]
            op = ["sum", "max", "sum", "prod", "sum", "min"][case % 6]
            for name in done:
                if name in OPERATIONS:
                    OPERATIONS[name](inputs, dtype, op, root=case % size)
            case += 1
    barriers()
    print(f"{algorithm} is exact in {' '.join(done)}; {digest.hexdigest()}")


main()
