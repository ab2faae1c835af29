"""One rank of test_deadlock_threads.py: ranks that wait for each other in mx.eval, and with other threads alive.

Arguments: a scenario, and for a mistake the idle thread of each rank. Prints the class and the text of the error that
this rank got, or "as expected".
"""

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np

import mlxdist

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from waiting import seconds_of

group = mlxdist.init()
rank, size = group.rank(), group.size()
one, other = group.split(0), group.split(0)
pairs = [group.split(0 if rank in (first, (first + 1) % size) else -1) for first in range(size)]
total = size * (size + 1) / 2


def lazy(part: mlxdist.Group | None, stream: mx.Stream | None = None) -> mx.array:
    return mlxdist.all_sum(mx.full((3,), rank + 1.0), group=part, stream=stream)


def eager(part: mlxdist.Group | None) -> None:
    assert mlxdist.all_sum(np.full(3, rank + 1.0, np.float32), group=part).tolist() == [total] * 3


# Mistakes: the first rank is wrong.


def forgotten_group() -> None:
    mx.eval(lazy(None if rank == 0 else one))


def forgotten_group_of_item() -> None:
    lazy(None if rank == 0 else one).sum().item()


def forgotten_group_evaluated_before() -> None:
    x = lazy(None if rank == 0 else one)
    mx.async_eval(x)
    mx.eval(mx.ones(3) + 1)
    x.tolist()


def forgotten_group_of_numpy() -> None:
    eager(None if rank == 0 else one)


def other_subgroup() -> None:
    """Each waits for the next one, in another group."""
    mx.eval(lazy(pairs[rank]))


def other_order() -> None:
    for part in (one, other) if rank == 0 else (other, one):
        mx.eval(lazy(part))


def other_order_of_split() -> None:
    mx.eval(lazy(one)) if rank == 0 else group.split(0)


def both_receive() -> None:
    mx.eval(mx.distributed.recv((3,), mx.float32, (rank + 1) % size, group=one.mlx))


def both_receive_numpy() -> None:
    mlxdist.recv((3,), "float32", (rank + 1) % size, group=one)


# Idle threads.


def no_thread() -> None:
    pass


def progress_bar() -> None:
    from tqdm import tqdm

    tqdm.monitor_interval = 0.3
    tqdm(total=3, file=open(os.devnull, "w"), mininterval=0)
    assert tqdm.monitor is not None and tqdm.monitor.is_alive()


def loader() -> None:
    """Waits for the next request of the main thread."""
    threading.Thread(target=queue.Queue().get, daemon=True).start()


def polling_loader() -> None:
    def work() -> None:
        while True:
            try:
                requests.get(timeout=0.1)
            except queue.Empty:
                continue

    requests: queue.Queue[None] = queue.Queue()
    threading.Thread(target=work, daemon=True).start()


# No mistakes, but rank 0 waits for what the others call last, and something else than its main thread comes first.

SECONDS = 4.5  # rank 1 has rank 0's position two heartbeats later, and warns after 1, 2 and 4 s


def beside(work: Callable[[], None]) -> None:
    """A thread of rank 0 does something before its first operation, for which the others wait."""
    if rank == 0:
        thread = threading.Thread(target=lambda: (work(), eager(other)))
        thread.start()
        mx.eval(lazy(one))
        thread.join()
    else:
        eager(other)
        eager(one)


def before(work: Callable[[], object]) -> None:
    """The main thread of rank 0 does something, while an operation that it has put into a stream waits."""
    x = lazy(one, mx.new_stream(mx.cpu))
    if rank == 0:
        mx.async_eval(x)
        work()
    eager(other)
    assert x.tolist() == [total] * 3


def child(command: str) -> subprocess.Popen:
    return subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, text=True)


def sleeping_thread() -> None:
    beside(lambda: time.sleep(SECONDS))


def computing_thread() -> None:
    def work() -> None:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            sum(range(1000))

    beside(work)


def thread_with_a_timer() -> None:
    beside(lambda: threading.Event().wait(SECONDS))


def thread_that_reads() -> None:
    beside(lambda: child(f"sleep {SECONDS}; echo go").stdout.read())


def late_thread() -> None:
    """Longer than the grace that is the default."""
    beside(lambda: time.sleep(30))


def late_timer() -> None:
    beside(lambda: threading.Event().wait(30))


def prompt() -> None:
    def work() -> None:
        sys.stdin = child(f"sleep {SECONDS}; echo go").stdout
        assert input() == "go"

    before(work)


def slow_compiler() -> None:
    """MLX starts a compiler for its first kernel on the CPU."""

    def work() -> None:
        directory = os.environ["SLOW_COMPILER"]
        os.environ["PATH"] = f"{directory}:{os.environ['PATH']}"
        mx.eval(mx.compile(lambda x: mx.exp(x) * 3.25 + mx.sin(x) - os.getpid() % 1000)(mx.ones(7)))
        assert os.path.exists(f"{directory}/called"), "no kernel was compiled"

    before(work)


def slow_evaluation() -> None:
    def work() -> None:
        x = mx.ones((500, 500))
        took = []
        for _ in range(5):  # the least counts, or a busy machine makes the evaluation too short
            took.append(seconds_of(lambda: mx.eval(mx.matmul(x, x)))[0])
        y = x
        for _ in range(int(SECONDS / min(took)) + 1):
            y = mx.matmul(y, x) * 1e-9
        mx.eval(y)

    before(work)


def data_loader() -> None:
    """The main thread waits for a batch, which a thread reads."""

    def work() -> None:
        batches: queue.Queue[str] = queue.Queue()
        threading.Thread(target=lambda: batches.put(child(f"sleep {SECONDS}; echo go").stdout.read())).start()
        assert batches.get() == "go\n"

    before(work)


def stopped() -> None:
    """A rank is stopped for longer than the grace, while a thread of rank 0 looks for a file now and then."""

    def work() -> None:
        while not os.path.exists(file):
            threading.Event().wait(0.1)

    file = os.environ["FLAG"]
    if rank == 1:
        own = os.getpid()
        child(f"sleep 2; kill -STOP {own}; sleep {3 * SECONDS}; kill -CONT {own}; sleep 1; touch {file}")
    beside(work)


if __name__ == "__main__":
    group.barrier()
    try:
        if len(sys.argv) > 2:
            globals()[sys.argv[2]]()
        globals()[sys.argv[1]]()
        group.finalize()
    except mlxdist.Error as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(1)
    print("as expected")
