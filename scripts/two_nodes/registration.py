"""A step of scripts/test_2node.sh: the second use of registered memory registers nothing."""

import numpy as np

import mlxdist

BYTES = 4 << 20


def main() -> None:
    group = mlxdist.init()
    rank = group.rank()
    assert group.size() == 2, f"this is for two ranks, not {group.size()}"
    other = 1 - rank
    x, expected = (np.arange(BYTES // 4, dtype=np.int32) * 7 + salt for salt in (rank, other))
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
            assert after["registered_bytes"] == BYTES, after
    left = group.stats()["registered_bytes"]
    assert left == 0, f"{left} bytes are still registered on rank {rank}"
    print(f"one registration of {BYTES} bytes for 4 messages, {group.provider}")


if __name__ == "__main__":
    main()
