"""The steps of scripts/test_2node.sh, each a program for two ranks: check_two_nodes.py STEP."""

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import reference_moe as reference

import mlxdist
from mlxdist.nn.expert_parallel import Placement, combine, dispatch
from mlxdist.nn.tensor_parallel.column_parallel import ColumnParallelLinear
from mlxdist.nn.tensor_parallel.row_parallel import RowParallelLinear
from mlxdist.tools.bench.operations import CASES, Eager, Inputs, Lazy

TOLERANCE = {mx.float32: 1e-5, mx.float16: 5e-3}  # of the largest number of the result


def check(what: str, got: mx.array, expected: mx.array | np.ndarray, tolerance: float) -> None:
    got, expected = (np.array(x.astype(mx.float32) if isinstance(x, mx.array) else x) for x in (got, expected))
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, expected {expected.shape}"
    error = np.abs(got - expected).max(initial=0) / max(1e-3, np.abs(expected).max(initial=0))
    assert error <= tolerance, f"{what}: off by {error:.1e} of the largest"


def sendrecv(group: mlxdist.Group, rank: int) -> str:
    """Messages of different sizes, both ways at once."""
    pairs = [
        (1024, 2048),
        (2048, 1024),
        (1, 4097),
        (0, 1),
        (4095, 16385),
        (7168, 700_001),
        (1 << 20, 3),
        (3, 8_388_609),
    ]
    other = 1 - rank
    for turn in range(3):
        for sizes in pairs:
            x, expected = (
                np.random.default_rng([r, sizes[r]]).integers(0, 256, sizes[r], np.uint8) for r in (rank, other)
            )
            got = mlxdist.sendrecv(x, other, other, expected.shape, np.uint8)
            lazy = mlxdist.sendrecv(mx.array(x), other, other, expected.shape, mx.uint8)
            for what, found in (("NumPy", got), ("MLX", np.array(lazy))):
                wrong = int(np.sum(found != expected))
                assert not wrong, f"{sizes} bytes, {what}, turn {turn}: {wrong} wrong bytes on rank {rank}"
    return f"{len(pairs)} pairs of sizes from 0 to {max(map(max, pairs))} bytes"


def registration(group: mlxdist.Group, rank: int) -> str:
    """The second use of registered memory registers nothing."""
    size, other = 4 << 20, 1 - rank
    x, expected = (np.arange(size // 4, dtype=np.int32) * 7 + salt for salt in (rank, other))
    out = np.empty_like(x)
    with group.register(x):
        for turn in range(4):
            before, out[:] = group.stats(), -1
            mlxdist.sendrecv(x, other, other, out=out)
            after = group.stats()
            assert np.array_equal(out, expected), f"turn {turn}: what came is wrong on rank {rank}"
            made, hits = (after[name] - before[name] for name in ("memory_registrations", "registration_hits"))
            assert made == (turn == 0), f"turn {turn}: {made} registrations on rank {rank}"
            assert hits > 0, f"turn {turn}: the registration was not used on rank {rank}"
            assert after["registered_bytes"] == size, after
    left = group.stats()["registered_bytes"]
    assert left == 0, f"{left} bytes are still registered on rank {rank}"
    return f"one registration of {size} bytes for 4 messages"


def collectives(group: mlxdist.Group, rank: int) -> str:
    """Every operation, float16 and float32, against NumPy, bit for bit."""
    sizes = [2, 4, 62, 1024, 5000, 300_000]
    for dtype in ("float16", "float32"):
        for size in sizes:
            data = Inputs(dtype, size, 2)
            for name, case in CASES.items():
                for what, called in (("NumPy", Eager(case, data, group)), ("MLX", Lazy(case, data, group, chain=1))):
                    assert not called.wrong, (
                        f"{name} of {size} {dtype}, {what}, rank {rank}: {called.wrong} wrong elements"
                    )
    return f"{len(CASES)} operations, {len(sizes)} sizes, float16 and float32"


def experts(group: mlxdist.Group, rank: int) -> str:
    """Dispatch, experts and combine against the dense mixture in one process."""
    count, top_k, hidden, inner = 8, 2, 64, 96
    numbers_of_tokens = [(5, 3), (64, 17), (1, 0), (128, 128)]  # of rank 0 and of rank 1
    random, placement = np.random.default_rng(0), Placement(count, 2)
    shapes = (count, inner, hidden), (count, inner, hidden), (count, hidden, inner)
    full = [random.standard_normal(shape).astype(np.float32) / shape[2] ** 0.5 for shape in shapes]
    gate, up, down = (mx.array(weight[placement.local(rank)]) for weight in full)
    for dtype, tolerance in TOLERANCE.items():
        for tokens in numbers_of_tokens:
            random = np.random.default_rng([rank, *tokens])
            x = mx.array(random.standard_normal((tokens[rank], hidden)).astype(np.float32)).astype(dtype)
            scores = random.random((tokens[rank], top_k)).astype(np.float32)
            indices = reference.routing("random", tokens[rank], top_k, count, [rank, *tokens])
            rows, local, handle = dispatch(x, mx.array(indices), placement, group=group)
            if rows.shape[0]:
                # In float32: gather_mm has no other on the CPU. Rows are sorted by expert.
                def product(x: mx.array, weight: mx.array, local: mx.array = local) -> mx.array:
                    return mx.gather_mm(x, weight.swapaxes(1, 2), rhs_indices=local, sorted_indices=True)

                wide = rows[:, None].astype(mx.float32)
                rows = product(nn.silu(product(wide, gate)) * product(wide, up), down)[:, 0].astype(dtype)
            expected = reference.mixture(reference.experts(np.array(x.astype(mx.float32)), indices, *full), scores)
            got = combine(rows, handle, mx.array(scores))
            check(f"{dtype}, {tokens} tokens, rank {rank}", got, expected, tolerance)
    return f"{count} experts, {len(numbers_of_tokens)} numbers of tokens, float32 and float16"


def linears(group: mlxdist.Group, rank: int) -> str:
    """Column- and row-parallel linear layers against the full layers, in equal parts and for unequal machines."""
    inputs, hidden, numbers_of_rows = 256, 384, (1, 7, 128)
    for dtype, tolerance in TOLERANCE.items():
        mx.random.seed(7)  # the full layers and inputs are alike on all ranks
        up, down = nn.Linear(inputs, hidden), nn.Linear(hidden, inputs)
        up.set_dtype(dtype)
        down.set_dtype(dtype)
        for shares in (None, (2, 1)):
            column = ColumnParallelLinear.from_linear(up, rank_shares=shares)
            gathering = ColumnParallelLinear.from_linear(up, rank_shares=shares, gather_output=True)
            row = RowParallelLinear.from_linear(down, rank_shares=shares)
            assert sum(column.sizes) == hidden and column.weight.shape == (column.sizes[rank], inputs)
            for rows in numbers_of_rows:
                x = mx.random.normal((rows, inputs)).astype(dtype)
                where = f"{rows} rows of {dtype}, shares {shares}, rank {rank}"
                check(f"column, {where}", gathering(x), up(x), tolerance)
                check(f"column and row, {where}", row(nn.relu(column(x))), down(nn.relu(up(x))), tolerance)
    return f"column and row, {len(numbers_of_rows)} numbers of rows, even and uneven, float32 and float16"


STEPS = {step.__name__: step for step in (sendrecv, registration, collectives, experts, linears)}

if __name__ == "__main__":
    world = mlxdist.init()
    assert world.size() == 2, f"this is for two ranks, not {world.size()}"
    done = STEPS[sys.argv[1]](world, world.rank())
    world.barrier()
    print(f"{done}, {world.provider}")
