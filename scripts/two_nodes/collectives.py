"""A step of scripts/test_2node.sh: every collective, float16 and float32, against NumPy."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np

import mlxdist

# Small whole numbers: every sum is exact in float16, so that results are compared bit for bit.
SIZES = [2, 4, 62, 1024, 5000, 300_000]
DTYPES = (np.float16, np.float32)

Case = tuple[Callable, Callable[[list[np.ndarray], int], np.ndarray]]


def cases(ranks: int) -> dict[str, Case]:
    """The operation, and what it gives from the arrays of all ranks on a rank."""

    def part(x: np.ndarray, rank: int) -> np.ndarray:
        return np.split(x, ranks)[rank]

    return {
        "all_sum": (mlxdist.all_sum, lambda all, rank: sum(all)),
        "all_max": (mlxdist.all_max, lambda all, rank: np.maximum.reduce(all)),
        "all_min": (mlxdist.all_min, lambda all, rank: np.minimum.reduce(all)),
        "all_gather": (mlxdist.all_gather, lambda all, rank: np.concatenate(all)),
        "sum_scatter": (mlxdist.sum_scatter, lambda all, rank: part(sum(all), rank)),
        "all_to_all": (mlxdist.all_to_all, lambda all, rank: np.concatenate([part(x, rank) for x in all])),
        "broadcast": (lambda x: mlxdist.broadcast(x, 1), lambda all, rank: all[1]),
    }


def inputs(size: int, dtype: type, ranks: int) -> list[np.ndarray]:
    return [np.random.default_rng([size, rank]).integers(-40, 40, size).astype(dtype) for rank in range(ranks)]


def main() -> None:
    group = mlxdist.init()
    rank, ranks = group.rank(), group.size()
    assert ranks > 1, "this is for two ranks"
    operations = cases(ranks)
    for dtype in DTYPES:
        for size in SIZES:
            of_all = inputs(size, dtype, ranks)
            for name, (operation, reference) in operations.items():
                expected = reference(of_all, rank)
                for what, x in (("NumPy", of_all[rank].copy()), ("MLX", mx.array(of_all[rank]))):
                    got = np.array(operation(x))
                    where = f"{name} of {size} {dtype.__name__}, {what}, rank {rank}"
                    assert got.dtype == dtype and got.shape == expected.shape, f"{where}: {got.dtype} {got.shape}"
                    wrong = int(np.sum(got != expected))
                    assert not wrong, f"{where}: {wrong} wrong elements"
    group.barrier()
    print(f"{len(operations)} operations, {len(SIZES)} sizes, float16 and float32, {group.provider}")


if __name__ == "__main__":
    main()
