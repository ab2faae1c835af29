"""One rank of test_many_ranks.py: more ranks than connect at the start. Argument: what.

Prints the bytes of slabs, one set for each peer that this rank is connected to.
"""

import sys

import numpy as np

import mlxdist

group = mlxdist.init()
rank, size = group.rank(), group.size()
# Of one connection: slots each way, and those for acknowledgements.
SLAB_BYTES = 2 * (6 * (128 << 10) + 32 * 4096) + (4 + 1) * 4096  # slots, and buffers for acknowledgements


def values(r: int, count: int) -> np.ndarray:
    return (np.arange(count) % 1009 * 3 + r).astype(np.int32)


def equal(result: np.ndarray, expected: np.ndarray, what: str) -> None:
    assert np.array_equal(result, expected), f"rank {rank} of {size}: {what}"


def peers() -> int:
    """The ranks that this one is connected to, before anyone goes on to finalize(), which connects more."""
    count, rest = divmod(group.stats()["slab_bytes"], SLAB_BYTES)
    assert rest == 0
    mlxdist.all_sum(np.ones(1))
    return count


def all_sum(count: int) -> None:
    inputs = [values(r, count) for r in range(size)]
    equal(mlxdist.all_sum(inputs[rank]), np.sum(inputs, axis=0, dtype=np.int32), f"all_sum of {count}")


def matrix() -> None:
    assert group.stats()["slab_bytes"] == 0, "connections are made on first use"
    assert group.algorithm("all_sum", 1000) == "recursive_doubling" and group.algorithm("all_sum", 1 << 20) == "ring"
    assert group.algorithm("broadcast", 1000) == "tree" and group.algorithm("all_gather", 1000) == "ring"
    for count in (200_003, 0, 1):
        all_sum(count)
    for count in (1, 777, 30_000):
        inputs = [values(r, count) for r in range(size)]
        equal(mlxdist.all_gather(inputs[rank]), np.concatenate(inputs), f"all_gather of {count}")
        whole = [values(r, count * size) for r in range(size)]
        part = np.sum(whole, axis=0, dtype=np.int32)[rank * count : (rank + 1) * count]
        equal(mlxdist.sum_scatter(whole[rank]), part, f"sum_scatter of {count * size}")
        for root in (0, 5, size - 1):
            equal(mlxdist.broadcast(inputs[rank], root), inputs[root], f"broadcast of {count} from {root}")
            reduced = mlxdist.reduce(inputs[rank], "max", root)
            equal(reduced, inputs[-1] if rank == root else inputs[0][:0], f"reduce of {count} to {root}")
    mlxdist.barrier()
    far = (rank + size // 2) % size
    equal(mlxdist.sendrecv(values(rank, 50_000), far, far), values(far, 50_000), f"sendrecv with {far}")
    inputs = [values(r, 3 * size) for r in range(size)]
    parts = np.concatenate([array.reshape(size, 3)[rank] for array in inputs])
    equal(mlxdist.all_to_all(inputs[rank]), parts, "all_to_all")
    pair = group.split(rank % (size // 2))
    equal(mlxdist.all_sum(values(rank, 100), group=pair), values(rank, 100) + values(far, 100), "all_sum of a pair")
    print(f"exact, {peers()} peers")


def ring_only() -> None:
    """MLXDIST_ALGO=ring: each rank knows its two neighbours, and has memory for them alone."""
    for count in (1, 5000, 300_001):
        all_sum(count)
    mlxdist.all_gather(np.ones(100))
    mlxdist.sum_scatter(np.ones(100 * size))
    print(f"exact, {peers()} peers")


def slabs() -> None:
    all_sum(1000)
    count = peers()
    print(f"{count} peers, {count * SLAB_BYTES} bytes")


globals()[sys.argv[1]]()
