"""One rank of test_large.py: arrays whose sizes have more than 32 bits, in place, looked at piece by piece."""

import sys
from pathlib import Path

import numpy as np

import mlxdist

PERIOD = 16_777_213  # prime: a piece that lands in the wrong place shows

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from waiting import seconds_of

group = mlxdist.init()
rank, size = group.rank(), group.size()
count = int(sys.argv[1])
pattern = np.random.default_rng(1).integers(0, 256, PERIOD, np.uint8)
x = np.empty(count, np.uint8)


def fill(factor: int) -> None:
    period = pattern * np.uint8(factor)
    for begin in range(0, count, PERIOD):
        x[begin : begin + PERIOD] = period[: count - begin]


def require(factor: int, what: str) -> None:
    period = pattern * np.uint8(factor)
    for begin in range(0, count, PERIOD):
        piece = x[begin : begin + PERIOD]
        assert np.array_equal(piece, period[: piece.size]), f"{what}: wrong from byte {begin}"


def timed(what: str, operation) -> None:
    group.barrier()
    seconds, _ = seconds_of(operation)
    if rank == 0:
        print(f"{what} of {count} bytes: {seconds:.1f} s", flush=True)


fill(rank + 1)
timed("all_sum", lambda: mlxdist.all_sum(x, out=x))
require(3, "all_sum")
fill(5 * rank + 3)
timed("broadcast", lambda: mlxdist.broadcast(x, 1, out=x))
require(8, "broadcast")
fill(7 if rank == 0 else 0)
timed("send", lambda: mlxdist.send(x, 1) if rank == 0 else mlxdist.recv_like(x, 0, out=x))
require(7, "send")
before = group.stats()
half = count // 2
with group.register(x):  # across a boundary of 4 GiB, which no registration with the device crosses
    timed("sendrecv", lambda: mlxdist.sendrecv(x[:half], 1 - rank, 1 - rank, out=x[half : 2 * half]))
assert np.array_equal(x[:half][-PERIOD:], x[half : 2 * half][-PERIOD:])
assert group.stats()["payload_bytes_sent"] - before["payload_bytes_sent"] == half
print("exact")
