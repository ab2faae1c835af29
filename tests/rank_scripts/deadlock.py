"""One rank of test_deadlock.py: ranks that wait for each other, and groups that work at the same time.

Argument: the scenario. Prints the class and the text of the error that this rank got, or "as expected".
"""

import _thread
import contextlib
import gc
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import numpy as np

import mlxdist
from mlxdist.base.errors import Error
from mlxdist.runtime.diagnostics.deadlock import TAG
from mlxdist.runtime.group.group import engine_of
from mlxdist.runtime.native import check, lib

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import waiting
from waiting import seconds_of

group = mlxdist.init()
rank, size = group.rank(), group.size()
one, other = group.split(0), group.split(0)
total = size * (size + 1) / 2
SMALL = np.ones(3, np.float32)
ROUNDS = 100


def eager(part: mlxdist.Group, number: int) -> None:
    x = np.full(1 + 977 * (number % 5), rank + 1.0, np.float32)
    assert np.array_equal(mlxdist.all_sum(x, group=part), np.full_like(x, total))


# Groups at the same time: nothing here is a mistake.


def async_eval_and_eager() -> None:
    for number in range(ROUNDS):
        x = mx.full((1000,), rank + 1.0)
        for _ in range(3):
            x = mlxdist.all_sum(x, group=one) / size
        mx.async_eval(x)
        for _ in range(3):
            eager(other, number)
        assert np.allclose(np.array(x), total / size)


def threads() -> None:
    """Each with a group of its own; and the main thread with the world."""

    def work(part: mlxdist.Group, lazy: bool) -> None:
        for number in range(ROUNDS):
            if lazy:
                assert mlxdist.all_sum(mx.full((100,), rank + 1.0), group=part).tolist() == [total] * 100
            else:
                eager(part, number)

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(work, one, lazy=False), pool.submit(work, other, lazy=True)]
        work(group, lazy=False)
        for future in futures:
            future.result()


def handles_and_eager() -> None:
    for number in range(ROUNDS):
        started = mlxdist.all_sum(SMALL, group=one, async_op=True)
        eager(other, number)
        assert started.wait().tolist() == [size] * 3
        group.barrier()


def late() -> None:
    """A rank that computes, sleeps, or works in another thread, is not a rank that waits."""
    if rank == 0:
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(lambda: (waiting.late(2.5), eager(other, 1)))
            eager(one, 0)
            future.result()
    else:
        eager(other, 1)
        eager(one, 0)
    x = mlxdist.all_sum(mx.full((3,), rank + 1.0), group=one)
    if rank == 0:
        mx.async_eval(x)
        waiting.late(2.5)  # the operation waits, this thread does not
        group.split(0)
    else:
        group.split(0)
    assert x.tolist() == [total] * 3
    waits = mlxdist.barrier(group=other, async_op=True) if rank == 0 else None
    if rank == 0:
        try:
            waits.wait(timeout=1.5)
        except mlxdist.Timeout:
            eager(one, 0)
    else:
        eager(one, 0)
        mlxdist.barrier(group=other)
    if waits is not None:
        waits.wait()


def inject(faults: str, then: str = "", seconds: float = 1.2) -> None:
    """Faults of this rank's links; and others after some seconds."""
    check(lib.mlxdist_group_inject_faults(engine_of(group).native, faults.encode()))
    if then:
        threading.Thread(target=lambda: (waiting.late(seconds), inject(then)), daemon=True).start()


def link_down() -> None:
    """All ranks are in the operation, and none of its messages arrives."""
    group.barrier()
    inject("link=down", "link=up")
    eager(group, 1)


def delayed() -> None:
    group.barrier()
    inject("delay=1200000")
    eager(group, 1)
    inject("none")


def ended_group() -> None:
    """The last message to the others is lost, and the group that it is for is gone."""
    global one
    part, one = one, None
    group.barrier()
    waiting.late(0.3)
    if rank == size - 1:
        waiting.late(0.2)
        inject("drop=1/1", "none")
    eager(part, 0)
    if rank == size - 1:
        del part
        gc.collect()
    group.barrier()


def beside(start: Callable[[Callable[[], None]], object]) -> None:
    """A thread of rank 0 sleeps before it communicates, while the main thread waits for what the others call later."""
    ended = threading.Event()

    def work() -> None:
        waiting.late(1.2)
        eager(other, 0)
        ended.set()

    if rank == 0:
        start(work)
        mlxdist.barrier(group=one)
        ended.wait()
    else:
        eager(other, 0)
        mlxdist.barrier(group=one)


def daemon_thread() -> None:
    beside(lambda work: threading.Thread(target=work, daemon=True).start())


def raw_thread() -> None:
    beside(lambda work: _thread.start_new_thread(work, ()))


def named_thread() -> None:
    beside(lambda work: threading.Thread(target=work, name="mlxdist rendezvous").start())


def dummy_thread() -> None:
    """One that Python has given a name."""
    beside(lambda work: _thread.start_new_thread(lambda: (threading.current_thread(), work()), ()))


def evaluating_thread() -> None:
    beside(lambda work: threading.Thread(target=lambda: (compute(1.2), work()), daemon=True).start())


def compute(seconds: float, y: mx.array | None = None) -> None:
    """In one evaluation, for at least so long."""
    y = mx.ones((500, 500)) if y is None else y
    x = mx.ones((500, 500))
    for _ in range(int(2 * seconds / seconds_of(lambda: mx.eval(mx.matmul(x, x)))[0]) + 1):
        y = mx.matmul(y, x) * 1e-9
    mx.eval(y)


def evaluates_else() -> None:
    """Rank 0 evaluates what does not need the operation that waits."""
    if rank == 0:
        x = mlxdist.all_sum(mx.full((1,), rank + 1.0), group=one, stream=mx.new_stream(mx.cpu))
        mx.async_eval(x)
        compute(1.5, mlxdist.all_sum(mx.ones((500, 500)), group=other))
        eager(group, 0)
        assert x.tolist() == [total]
    else:
        mx.eval(mlxdist.all_sum(mx.ones((500, 500)), group=other))
        eager(group, 0)
        eager(one, 0)


def queued() -> None:
    """Rank 0 comes late to what the others have put before an operation that it waits for."""
    x = mlxdist.all_sum(mx.full((3,), rank + 1.0), group=other)
    mx.async_eval(mlxdist.all_sum(x, group=one) if rank else x)
    if rank == 0:
        y = mlxdist.all_sum(x, group=one, stream=mx.new_stream(mx.cpu))
        inject("delay=1200000")
        mx.eval(y)
        inject("none")
    group.barrier()


# Mistakes.


def malformed() -> None:
    """Messages that no rank of this version sends do not keep the ranks from finding a mistake."""

    def flood() -> None:
        with contextlib.suppress(Error):
            for _ in range(5):
                for data in MALFORMED:
                    engine_of(group).world._rendezvous.send((rank + 1) % size, TAG, data)
                time.sleep(0.2)

    threading.Thread(target=flood, daemon=True).start()
    recv_and_recv()


MALFORMED = [
    b"",
    b"[" * 60_000,
    b"{}",
    b"3",
    b"\xff",
    b'{"request": 1, "edges": [["x", 0, 0, 0]]}',
    b'{"request": 1, "edges": [[0, 0, 0, 1e99]]}',
    b'{"request": 1, "edges": [[0, 0, 0, 99999999999]]}',
    b'{"request": 1, "edges": [' + b"[0, 0, 0, 1]," * 4000 + b"[0, 0, 0, 1]]}",
    *(b'{"request": %d, "answer": [[["a", 1, 1, 0, 1, 1, 1]], 3, 4, 5], "of": 1, "come": {}}' % n for n in range(9)),
    b'{"failure": 3}',
    b'{"warning": 3}',
]


def split_and_all_sum() -> None:
    group.split(0) if rank == 0 else eager(group, 1)


def handle_and_return() -> None:
    """The last rank returns from its program."""
    if rank < size - 1:
        mlxdist.all_sum(SMALL, group=one, async_op=True).wait()


def lazy_and_return() -> None:
    if rank < size - 1:
        mx.eval(mlxdist.all_sum(mx.ones(3), group=one))


def handle_and_finalize() -> None:
    """No thread waits for the handle before finalize()."""
    started = mlxdist.all_sum(SMALL, group=one, async_op=True) if rank < size - 1 else None
    group.finalize()
    assert started is not None


def recv_and_return() -> None:
    if rank == 0:
        mlxdist.recv((3,), "float32", 1, group=one)


def recv_and_recv() -> None:
    mlxdist.recv((3,), "float32", (rank + 1) % size, group=one)


def recv_and_barrier() -> None:
    mlxdist.recv((3,), "float32", 1, group=one) if rank == 0 else group.barrier()


def send_and_send() -> None:
    """So much that it does not leave before it is received."""
    mlxdist.send(np.ones(1_000_000, np.float32), (rank + 1) % size, group=one)


def handles_crossed() -> None:
    """Each waits first for what the others start last."""
    first, second = (one, other) if rank == 0 else (other, one)
    mlxdist.all_sum(SMALL, group=first, async_op=True).wait()
    mlxdist.all_sum(SMALL, group=second, async_op=True).wait()


def crossed(parts: tuple[mlxdist.Group, mlxdist.Group]) -> list[mx.array]:
    """One graph, whose operations follow from each other."""
    x = mx.ones(3)
    for part in parts if rank == 0 else parts[::-1]:
        x = mlxdist.all_sum(x, group=part)
    return [x]


def lazy_crossed() -> None:
    mx.eval(crossed((one, other)))


def lazy_crossed_while_asleep() -> None:
    """A thread that does something else cannot change the order of a stream."""
    x = crossed((one, other))
    mx.async_eval(x)
    waiting.late(4)
    mx.eval(x)


def lazy_recv_and_recv() -> None:
    """Each sends what it has received, and both receive first."""
    part = group.split(rank // 2).mlx
    if rank < 2:
        mx.eval(mx.distributed.send(mx.distributed.recv((3,), mx.float32, 1 - rank, group=part), 1 - rank, group=part))


def two_lines() -> None:
    """Two threads of each rank wait, and none of them for anything that could come."""

    def work(part: mlxdist.Group) -> None:
        try:
            eager(part, 1)
        except mlxdist.Error as error:
            errors.append(error)

    errors = []
    third = group.split(0)
    eager(one, 0)
    thread = threading.Thread(target=work, args=(one if rank == 0 else other,))
    thread.start()
    work(third if rank == 0 else group)
    thread.join()
    raise errors[0]


if __name__ == "__main__":
    group.barrier()
    begin = time.monotonic()
    try:
        globals()[sys.argv[1]]()
        group.finalize()
    except mlxdist.Error as error:
        print(f"{type(error).__name__} after {time.monotonic() - begin:.1f} s: {error}", flush=True)
        sys.exit(1)
    print("as expected")
