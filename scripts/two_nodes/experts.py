"""A step of scripts/test_2node.sh: dispatch, experts and combine against the dense mixture in one process."""

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
import reference_moe as reference

import mlxdist
from mlxdist.nn.experts import Placement, combine, dispatch

EXPERTS, TOP_K, HIDDEN, INNER = 8, 2, 64, 96
TOKENS = [(5, 3), (64, 17), (1, 0), (128, 128)]  # of rank 0 and of rank 1
TOLERANCE = {mx.float32: 1e-5, mx.float16: 5e-3}  # of the largest number of the result


def experts() -> list[np.ndarray]:
    """Gate, up and down of all experts, alike on all ranks."""
    random = np.random.default_rng(0)
    shapes = (EXPERTS, INNER, HIDDEN), (EXPERTS, INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
    return [random.standard_normal(shape).astype(np.float32) / shape[2] ** 0.5 for shape in shapes]


def compute(rows: mx.array, local: mx.array, weights: list[mx.array]) -> mx.array:
    """This rank's experts on the rows, sorted by expert. In float32: gather_mm has no other on the CPU."""
    if rows.shape[0] == 0:
        return rows
    gate, up, down = weights

    def product(x: mx.array, weight: mx.array) -> mx.array:
        return mx.gather_mm(x, weight.swapaxes(1, 2), rhs_indices=local, sorted_indices=True)

    x = rows[:, None].astype(mx.float32)
    gated = product(x, gate)
    return product(gated * mx.sigmoid(gated) * product(x, up), down)[:, 0].astype(rows.dtype)


def main() -> None:
    group = mlxdist.init()
    rank, ranks = group.rank(), group.size()
    assert ranks == 2, f"this is for two ranks, not {ranks}"
    placement, full = Placement(EXPERTS, ranks), experts()
    mine = placement.local(rank)
    weights = [mx.array(weight[mine.start : mine.stop]) for weight in full]
    for dtype, tolerance in TOLERANCE.items():
        for tokens in TOKENS:
            random = np.random.default_rng([rank, *tokens])
            x = mx.array(random.standard_normal((tokens[rank], HIDDEN)).astype(np.float32)).astype(dtype)
            scores = random.random((tokens[rank], TOP_K)).astype(np.float32)
            indices = reference.routing("random", tokens[rank], TOP_K, EXPERTS, [rank, *tokens])
            rows, local, handle = dispatch(x, mx.array(indices), placement, group)
            got = combine(compute(rows, local, weights), handle, mx.array(scores))
            got = np.array(got.astype(mx.float32))
            each = reference.experts(np.array(x.astype(mx.float32)), indices, *full)
            expected = reference.mixture(each, scores)
            error = np.abs(got - expected).max(initial=0) / max(1e-3, np.abs(expected).max(initial=0))
            assert error <= tolerance, f"{dtype}, {tokens} tokens, rank {rank}: off by {error:.1e} of the largest"
    group.barrier()
    print(f"{EXPERTS} experts, {len(TOKENS)} numbers of tokens, float32 and float16, {group.provider}")


if __name__ == "__main__":
    main()
