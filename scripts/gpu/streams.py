"""Arrays that a stream of the device makes and takes: late, donated, read meanwhile, in two streams; and late peers."""

import time

import mlx.core as mx
import numpy as np
from common import LARGE, group, made, rank, report, size

import mlxdist

ROUNDS = 60 if LARGE else 5
WIDTH = 2048 if LARGE else 128
LATE = 3.0 if LARGE else 0.3
total = lambda x, **how: mx.distributed.all_sum(x, group=group.mlx, **how)
ranks_sum = sum(r + 1 for r in range(size))


wrong: dict[str, int] = {}


def require(found: mx.array, wanted: object, what: str, tolerance: float = 0.0) -> None:
    """Counted, not raised: the other rank goes on with the operations of this scenario."""
    if not np.allclose(np.array(found), wanted, rtol=tolerance, atol=0):
        wrong[what] = wrong.get(what, 0) + 1


def slow(x: mx.array) -> mx.array:
    """The elements of x, after arithmetic that takes the device a while."""
    square = mx.full((WIDTH, WIDTH), 1 / WIDTH)
    for _ in range(8):
        square = square @ square
    return x + (square[0, 0] * 0)


def evaluated_before() -> None:
    """Submitted in another graph, and still being computed when the operation is enqueued."""
    for number in range(ROUNDS):
        x = slow(mx.full((5000,), float(rank + 1 + number)))
        mx.async_eval(x)
        require(total(x), np.full(5000, ranks_sum + size * number), "async_eval before")


def views() -> None:
    """Not contiguous, and from the middle of a buffer that only the device has."""
    x = made(mx.arange(6000.0).reshape(60, 100) + rank)
    wanted = sum(np.arange(6000.0).reshape(60, 100) + r for r in range(size))
    for name, view in (("transposed", lambda a: a.T), ("rows", lambda a: a[7:]), ("columns", lambda a: a[:, ::3])):
        mx.eval(x)
        require(total(view(x)), view(wanted), name)
        require(total(view(x) * 1), view(wanted), f"{name}, computed")
    require(x, np.arange(6000.0).reshape(60, 100) + rank, "what the views are of")


def read_meanwhile() -> None:
    """Kernels read an input while the operation has it, before and after."""
    for number in range(ROUNDS):
        x = made(mx.full((1 << 20,), float(rank + 1)))
        mx.eval(x)
        before, summed, after = slow(x) * 2, total(x), slow(x) + number
        mx.eval(before, summed, after)
        require(before[:999], np.full(999, 2 * (rank + 1.0)), "read before")
        require(summed[-999:], np.full(999, ranks_sum), "summed")
        require(after[:999], np.full(999, rank + 1.0 + number), "read after")


def donated() -> None:
    """Results in the buffers of inputs, through 50 links."""
    x, wanted = made(mx.full((1 << 16,), rank + 1.0)), np.array([r + 1.0 for r in range(size)])
    for _ in range(50):
        x = total(x * 0.5) + rank
        wanted = (wanted * 0.5).sum() + np.arange(size)
    require(x[:100], np.full(100, wanted[rank]), "50 links in place", 1e-5)


def two_streams() -> None:
    """Two CPU streams of one group; the first one's input comes late from the device."""
    first, second = mx.new_stream(mx.cpu), mx.new_stream(mx.cpu)
    for number in range(ROUNDS):
        late, early = slow(mx.full((3000,), rank + 1.0)), mx.full((3000,), float(number))
        a, b = total(late, stream=first), total(early, stream=second)
        mx.eval(a, b)
        require(a, np.full(3000, ranks_sum), "the late one")
        require(b, np.full(3000, size * number), "the early one")


def late_peer() -> float:
    """Seconds of rank 0's operation, whose peer is late; what the device computes from it waits, and is right."""
    group.barrier()
    if rank == 1:
        time.sleep(LATE)
    begin = time.perf_counter()
    result = total(slow(mx.full((100,), rank + 1.0))) * 2
    mx.async_eval(result)
    submitted = time.perf_counter() - begin
    require(result, np.full(100, 2.0 * ranks_sum), "with a late peer")
    return submitted


scenarios = (evaluated_before, views, read_meanwhile, donated, two_streams, late_peer)
figures: dict[str, object] = {"rounds": ROUNDS, "late peer, seconds": LATE}
for scenario in scenarios:
    wrong.clear()
    result = scenario()
    every = int(mlxdist.all_sum(np.array([sum(wrong.values())]))[0])
    figures[f"{scenario.__name__}: wrong results, both ranks"] = every
    if wrong:
        print(f"rank {rank}: {scenario.__name__}: {wrong}", flush=True)
    if result is not None:
        figures["async_eval beside a late peer, seconds"] = round(result, 3)
report(**figures)
assert not any(figures[name] for name in figures if "wrong" in name), figures
