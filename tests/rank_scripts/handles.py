"""One rank of test_handles.py. Argument: the scenario."""

import gc
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from scenarios import group, rank, run_scenario, size

import mlxdist

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from waiting import late, wait_for

after, before = (rank + 1) % size, (rank - 1) % size
total = sum(range(1, size + 1))
LARGE = 4_000_000  # float32: more than all slots hold


def mine(count: int, factor: float = 1) -> np.ndarray:
    return np.full(count, (rank + 1) * factor, np.float32)


def require(result: np.ndarray, expected: object, what: str) -> None:
    assert np.array_equal(result, np.broadcast_to(expected, result.shape)), f"{what} on rank {rank}: {result}"


def raised(function, kind: type[Exception] = mlxdist.Error) -> Exception:
    try:
        result = function()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}, but {result}")


def every_operation() -> None:
    x = np.arange(2 * size, dtype=np.float32) + rank
    all_x = [np.arange(2 * size, dtype=np.float32) + r for r in range(size)]
    own = slice(2 * rank, 2 * rank + 2)
    counts = [2] * size
    exchanged = np.concatenate([other[own] for other in all_x])
    handles = {
        "all_sum": (mlxdist.all_sum(x, async_op=True), sum(all_x)),
        "all_max": (mlxdist.all_max(x, async_op=True), all_x[-1]),
        "all_gather": (mlxdist.all_gather(x, async_op=True), np.concatenate(all_x)),
        "sum_scatter": (mlxdist.sum_scatter(x, async_op=True), sum(all_x)[own]),
        "reduce_scatter": (mlxdist.reduce_scatter(x, "min", async_op=True), all_x[0][own]),
        "broadcast": (mlxdist.broadcast(x, 1, async_op=True), all_x[1]),
        "reduce": (mlxdist.reduce(x, root=1, async_op=True), sum(all_x) if rank == 1 else x[:0]),
        "gather": (mlxdist.gather(x, 1, async_op=True), np.concatenate(all_x) if rank == 1 else x[:0]),
        "scatter": (mlxdist.scatter(x, 1, async_op=True), all_x[1][own]),
        "all_to_all": (mlxdist.all_to_all(x, async_op=True), exchanged),
        "all_to_all_v": (mlxdist.all_to_all_v(x, counts, counts, async_op=True), exchanged),
        "sendrecv": (mlxdist.sendrecv(x, after, before, async_op=True), all_x[before]),
        "send": (mlxdist.send(x, after, async_op=True), x),
        "recv": (mlxdist.recv(x.shape, x.dtype, before, async_op=True), all_x[before]),
        "send again": (mlxdist.send(x, after, async_op=True), x),
        "recv_like": (mlxdist.recv_like(x, before, async_op=True), all_x[before]),
        "barrier": (mlxdist.barrier(async_op=True), None),
    }
    for name, (handle, expected) in reversed(handles.items()):
        result = handle.wait()
        if expected is None:
            assert result is None
        else:
            assert result.shape == expected.shape, f"{name}: {result.shape}"
            require(result, expected, name)
        assert handle.done() and handle.exception() is None and handle.result is result


def overlap() -> None:
    """Start, compute, wait: the data comes while this rank is busy with something else."""
    x = mine(LARGE)
    handle = mlxdist.all_sum(x, async_op=True)
    for _ in range(20):  # few, since each look at the handle may move it on
        for _ in range(50_000):  # a second or so
            sum(range(1000))
        if handle.done():
            break
    assert handle.done(), "seconds of computing, and nothing has happened"
    require(handle.wait(), total, "overlap")
    # The same with memory of the user, and in place.
    handle = mlxdist.all_sum(x, out=x, async_op=True)
    assert handle.wait() is x
    require(x, total, "in place")


def looking() -> None:
    """done() and exception() do not wait, and are right."""
    if rank == 0:
        handle = mlxdist.recv((10,), np.float32, 1, async_op=True)
        assert not handle.done() and "recv, running" in repr(handle)
        mlxdist.send(mine(1), 1)
        assert wait_for(handle.done)
        assert handle.exception() is None and "recv, done" in repr(handle)
        require(handle.wait(0), 2, "looking")
    elif rank == 1:
        mlxdist.recv((1,), np.float32, 0)
        mlxdist.send(mine(10), 0)


def waiting_for_a_while() -> None:
    """A timeout ends the wait, not the operation."""
    if rank == 0:
        handle = mlxdist.recv((10,), np.float32, 1, async_op=True)
        for timeout in (0, 0.05):
            for wait in (handle.wait, handle.exception):
                error = raised(lambda wait=wait, timeout=timeout: wait(timeout), mlxdist.Timeout)
                assert f"recv has not ended after {timeout:g} s" in str(error), error
        mlxdist.send(mine(1), 1)
        require(handle.wait(20), 2, "after two timeouts")
    elif rank == 1:
        mlxdist.recv((1,), np.float32, 0)
        mlxdist.send(mine(10), 0)


def many_in_flight() -> None:
    inputs = [mine(1 + 997 * i % 50_000, i) for i in range(200)]
    handles = [mlxdist.all_sum(x, async_op=True) for x in inputs]
    for i in reversed(range(200)):
        require(handles[i].wait(), np.float32(total * i), f"operation {i}")


def opposite_order() -> None:
    """Two groups of all ranks: each rank waits for what the other has started last."""
    groups = [group, group.split(0)]
    for count in (10, LARGE):
        handles = [mlxdist.all_sum(mine(count, i + 1), group=g, async_op=True) for i, g in enumerate(groups)]
        for i in (0, 1) if rank == 0 else (1, 0):
            require(handles[i].wait(), total * (i + 1), f"group {i}")
        # Also started in opposite order, where no rank waits before both have been started.
        results = {}
        for i in (0, 1) if rank == 0 else (1, 0):
            results[i] = mlxdist.all_sum(mine(count, i + 1), group=groups[i], async_op=True)
        for i in (1, 0) if rank == 0 else (0, 1):
            require(results[i].wait(), total * (i + 1), f"group {i}, started in opposite order")


def overlapping_groups() -> None:
    """A ring of pairs on 4 ranks, and the world: everyone is in three groups, and waits in an order of its own."""
    pairs = [group.split(0 if rank in (i, (i + 1) % size) else -1) for i in range(size)]
    groups = [group, *(pair for pair in pairs if pair is not None)]
    assert len(groups) == 3
    for repeat in range(5):
        handles = []
        for g in groups:
            for count in (3, 300_000):
                handles.append((mlxdist.all_gather(mine(count), group=g, async_op=True), g, count))
        order = np.random.default_rng([rank, repeat]).permutation(len(handles))
        for i in order:
            handle, g, count = handles[i]
            expected = mlxdist.all_gather(mine(1), group=group)
            assert len(expected) == size
            result = handle.wait()
            assert len(np.unique(result)) == g.size() and len(result) == g.size() * count


def require_let_go(kept: list[weakref.ref]) -> None:
    """Waits until the arrays are gone. Starting something lets go of what has ended."""
    for _ in range(200):
        alive = np.array(sum(reference() is not None for reference in kept))
        # All ranks see the same number, and go on together.
        if mlxdist.all_max(alive, async_op=True).wait() == 0:
            return
        late(0.05)
    raise AssertionError(f"arrays of {alive} operations are kept after 10 s")


def dropped() -> None:
    """No thread waits or has the handle: the operation ends all the same, in memory that is still there."""
    results, kept = [], []
    for i in range(20):
        out = np.zeros(200_000, np.float32)
        x = mine(200_000, i)
        kept.append(weakref.ref(x))
        mlxdist.all_sum(x, out=out, async_op=True)
        results.append(out)
        del x
    del out
    gc.collect()
    filler = [np.full(200_000, np.nan, np.float32) for _ in range(20)]  # takes the place of what was freed too early
    require_let_go(kept)
    for i, out in enumerate(results):
        require(out, np.float32(total * i), f"dropped operation {i}")
    assert len(filler) == 20


def dropped_behind_running_ones() -> None:
    """What has ended is let go of, also where more operations than a sweep looks at wait before it."""
    other = group.split(0)
    for _ in range(6):
        mlxdist.recv((3,), np.float32, before, group=other, async_op=True)
    kept = []
    for i in range(20):
        x = mine(1000, i)
        kept.append(weakref.ref(x))
        mlxdist.all_sum(x, async_op=True)
        del x
    gc.collect()
    require_let_go(kept)
    for _ in range(6):
        mlxdist.send(mine(3), after, group=other)


def outlive_their_group() -> None:
    """A handle of a group that the program has let go of: waited for, and dropped."""
    for is_dropped in (False, True) * 5:
        own = group.split(0)
        first, second = (mlxdist.all_sum(mine(8), group=own, async_op=True) for _ in range(2))
        first.wait()  # the engine keeps an operation that has ended for the next one of its group
        del own
        if not is_dropped:
            require(second.wait(), np.float32(total), "operation of a group that is gone")
        del first, second
        gc.collect()
        for _ in range(3):
            mlxdist.all_max(np.ones(1), async_op=True).wait()


def threads() -> None:
    """Several threads: each starts operations on a group of its own; all wait for one handle together."""
    groups = [group.split(0) for _ in range(4)]

    def work(number: int) -> None:
        for i in range(30):
            handle = mlxdist.all_sum(mine(1000 * i, number), group=groups[number], async_op=True)
            require(handle.wait(), total * number, f"thread {number}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    handle = mlxdist.all_sum(mine(LARGE), async_op=True)
    results = []
    workers = [threading.Thread(target=lambda: results.append(handle.wait())) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 8 and all(result is handle.result for result in results)
    require(handle.result, total, "waited for by all")


def mismatch() -> None:
    """The error comes out of wait() and exception(), each time as a new exception, and of what is started later."""
    handle = mlxdist.all_sum(np.ones(3 + rank, np.float32), async_op=True)
    error = handle.exception()
    assert type(error) is mlxdist.Mismatch, error
    assert "all_sum of float32 [3]" in str(error) and "all_sum of float32 [4]" in str(error), error
    for _ in range(2):
        again = raised(handle.wait, mlxdist.Mismatch)
        assert str(again) == str(error) and again is not error
    raised(lambda: handle.result, mlxdist.Mismatch)
    assert handle.done()
    raised(lambda: mlxdist.all_sum(np.ones(3), async_op=True).wait(), mlxdist.Mismatch)


def dropped_mismatch() -> None:
    """An error of an operation without a waiting thread is raised by the next operation."""
    mlxdist.all_sum(np.ones(3 + rank, np.float32), async_op=True)
    error = raised(group.barrier, mlxdist.Mismatch)
    assert "all_sum of float32 [3]" in str(error), error


def finalize_waits() -> None:
    """Operations that are in flight when a rank finalizes end well, and can be waited for afterwards."""
    handles = [mlxdist.all_sum(mine(300_000, i), async_op=True) for i in range(10)]
    mlxdist.all_sum(mine(300_000), async_op=True)
    if rank == 0:
        late(0.2)
    group.finalize()
    for i, handle in enumerate(handles):
        assert handle.done()
        require(handle.wait(), np.float32(total * i), f"operation {i}")
    error = raised(lambda: mlxdist.all_sum(mine(3), async_op=True), mlxdist.InvalidArgument)
    assert "has been finalized" in str(error)


def finalize_gives_up() -> None:
    """A receive without a matching send does not keep finalize() for ever, and does not leave its memory too early."""
    handle = None
    if rank == 0:
        handle = mlxdist.recv((1000,), np.float32, 1, async_op=True)
    error = raised(group.finalize)
    assert isinstance(error, mlxdist.Mismatch | mlxdist.PeerLost | mlxdist.Aborted | mlxdist.Timeout), repr(error)
    if handle is not None:
        assert handle.done() and handle.exception() is not None


run_scenario(globals())
