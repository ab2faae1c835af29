"""A step of scripts/test_2node.sh: messages of different sizes, both ways at once."""

import mlx.core as mx
import numpy as np

import mlxdist

# Bytes that rank 0 sends and that rank 1 sends.
SIZES = [(1024, 2048), (2048, 1024), (1, 4097), (0, 1), (4095, 16385), (7168, 700_001), (1 << 20, 3), (3, 8_388_609)]


def message(rank: int, size: int) -> np.ndarray:
    return np.random.default_rng([rank, size]).integers(0, 256, size, np.uint8)


def main() -> None:
    group = mlxdist.init()
    rank = group.rank()
    assert group.size() == 2, f"this is for two ranks, not {group.size()}"
    other = 1 - rank
    for turn in range(3):
        for sizes in SIZES:
            x, expected = message(rank, sizes[rank]), message(other, sizes[other])
            got = mlxdist.sendrecv(x, other, other, expected.shape, np.uint8)
            lazy = mlxdist.sendrecv(mx.array(x), other, other, expected.shape, mx.uint8)
            for what, found in (("NumPy", got), ("MLX", np.array(lazy))):
                wrong = int(np.sum(found != expected))
                assert not wrong, f"{sizes} bytes, {what}, turn {turn}: {wrong} wrong bytes on rank {rank}"
    print(f"{len(SIZES)} pairs of sizes from 0 to {max(map(max, SIZES))} bytes, {group.provider}")


if __name__ == "__main__":
    main()
