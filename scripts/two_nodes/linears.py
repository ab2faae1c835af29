"""A step of scripts/test_2node.sh: column- and row-parallel linear layers against the full layers in one process."""

import mlx.core as mx
import numpy as np
from mlx import nn

import mlxdist
from mlxdist.nn.tensor_parallel.column_parallel import ColumnParallelLinear
from mlxdist.nn.tensor_parallel.row_parallel import RowParallelLinear

INPUTS, HIDDEN = 256, 384
ROWS = (1, 7, 128)  # a decoded token, odd, a prompt
WEIGHTS = (None, (2, 1))  # equal parts, and parts for machines of unequal speed
TOLERANCE = {mx.float32: 1e-5, mx.float16: 5e-3}  # of the largest number of the result


def check(what: str, got: mx.array, expected: mx.array, tolerance: float) -> None:
    got, expected = (np.array(x.astype(mx.float32)) for x in (got, expected))
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, expected {expected.shape}"
    error = np.abs(got - expected).max() / np.abs(expected).max()
    assert error <= tolerance, f"{what}: off by {error:.1e} of the largest"


def main() -> None:
    group = mlxdist.init()
    rank = group.rank()
    assert group.size() == 2, f"this is for two ranks, not {group.size()}"
    for dtype, tolerance in TOLERANCE.items():
        mx.random.seed(7)  # the full layers and inputs are alike on all ranks
        up, down = nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, INPUTS)
        up.set_dtype(dtype)
        down.set_dtype(dtype)
        for weights in WEIGHTS:
            column = ColumnParallelLinear.from_linear(up, rank_shares=weights)
            gathering = ColumnParallelLinear.from_linear(up, rank_shares=weights, gather_output=True)
            row = RowParallelLinear.from_linear(down, rank_shares=weights)
            assert sum(column.sizes) == HIDDEN and column.weight.shape == (column.sizes[rank], INPUTS)
            for rows in ROWS:
                x = mx.random.normal((rows, INPUTS)).astype(dtype)
                where = f"{rows} rows of {dtype}, weights {weights}, rank {rank}"
                check(f"column, {where}", gathering(x), up(x), tolerance)
                check(f"column and row, {where}", row(nn.relu(column(x))), down(nn.relu(up(x))), tolerance)
    group.barrier()
    print(f"column and row, {len(ROWS)} numbers of rows, even and uneven, float32 and float16, {group.provider}")


if __name__ == "__main__":
    main()
