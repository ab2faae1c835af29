"""One rank of test_progress.py: what goes on while no thread calls mlxdist, or none in time. Argument: what.

Prints seconds, which the test judges: they depend on what else the machine does.
"""

import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

import mlxdist
from mlxdist.runtime.group.group import engine_of
from mlxdist.runtime.native import check, lib

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from waiting import late, seconds_of, wait_for

group = mlxdist.init()
rank, size = group.rank(), group.size()


def inject(faults: str) -> None:
    check(lib.mlxdist_group_inject_faults(engine_of(group).native, faults.encode()))


def compute(seconds: float) -> None:
    """Without a call of mlxdist."""
    x = np.random.default_rng(0).random((64, 64))
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        x = x @ x
        x /= np.abs(x).max()


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def share_of_a_core(call: Callable[..., object], *arguments: object) -> float:
    """Prints how much of one a call used. Returns its seconds."""
    before = cpu_seconds()
    waited, _ = seconds_of(call, *arguments)
    print(f"{(cpu_seconds() - before) / waited:.4f} of a core", flush=True)
    return waited


def last_message(operation: str) -> None:
    """Rank 0's last message is lost, and rank 0 has gone on to compute: its progress thread sends it again."""
    x = np.full(500, rank + 1, np.int32)
    for turn in range(int(sys.argv[3])):
        group.barrier()
        if rank == 0:
            inject("drop_next=1")
            left, _ = seconds_of(partial(mlxdist.send, x, 1) if operation == "send" else partial(mlxdist.all_sum, x))
            assert left < 2, f"rank 0 itself took {left:.1f} s"
            compute(5)
            assert group.stats()["provider_dropped_by_fault"] == turn + 1
        else:
            receive = partial(mlxdist.recv_like, x, 0) if operation == "send" else partial(mlxdist.all_sum, x)
            seconds, result = seconds_of(receive)
            assert np.all(result == (1 if operation == "send" else 3))
            print(f"{seconds:.4f} s", flush=True)


def handles() -> None:
    """Operations that were started end while the main thread computes: many small ones, and one of 16 MiB."""
    small = np.full(1000, rank + 1.0)
    large = np.full(4 << 20, rank + 1, np.int32)
    total = size * (size + 1) // 2
    group.barrier()
    begun = [mlxdist.all_sum(small, async_op=True) for _ in range(100)]
    begun.append(mlxdist.all_sum(large, async_op=True))
    begun.append(mlxdist.broadcast(large, 1, async_op=True))
    if size == 2:
        begun.append(mlxdist.sendrecv(large, 1 - rank, 1 - rank, async_op=True))
    done = [False]
    for _ in range(120):  # one is enough where the engine's thread gets a core
        compute(0.5)
        done = [handle.done() for handle in begun]  # only looks: no call here carries an operation on
        if all(done):
            break
    assert all(done), f"rank {rank}: {done.count(False)} of {len(done)} have not ended: {done}"
    assert all(np.all(handle.wait() == total) for handle in begun[:101])
    assert np.all(begun[101].wait() == 2)
    assert size != 2 or np.all(begun[102].wait() == 2 - rank)
    print("done meanwhile")


def late_peer(kind: str) -> None:
    """Rank 0 comes 4 s late: the others wait without using up their core. Prints how much of it they used."""
    x = np.ones(1000 if kind == "small" else 1 << 20, np.float32)
    mlxdist.all_sum(x)
    group.barrier()
    if rank == 0:
        late(4)
        mlxdist.all_sum(x)
        return
    assert share_of_a_core(mlxdist.all_sum, x) > 3.5


def idle() -> None:
    """Nothing is going on: the progress thread sleeps. Prints how much of a core it used."""
    mlxdist.all_sum(np.ones(1000))
    share_of_a_core(late, 3)


def third_rank_late() -> None:
    """Rank 2 joins an operation of all only when two others have ended another one: its data must get past that of
    the first, which fills the slots."""
    pair, signals = group.split(0 if rank < 2 else 1), group.split(0)
    x = np.ones(2 << 20, np.float32)
    if rank < 2:
        handle = mlxdist.all_sum(x, async_op=True)
        late(0.2)  # until it has filled the slots
        assert np.all(mlxdist.all_sum(x, group=pair) == 2)
        if rank == 1:
            mlxdist.send(np.zeros(1), 2, group=signals)
    else:
        mlxdist.recv((1,), np.float64, 1, group=signals)
        handle = mlxdist.all_sum(x, async_op=True)
    assert np.all(handle.wait() == 3)
    print("done meanwhile")


def receiver_first() -> None:
    """A receiver that comes first is known to be there: a large message does not wait for a timer. Prints seconds."""
    x = np.ones(1 << 18, np.float32)
    seconds = []
    for _ in range(20):
        group.barrier()
        if rank == 0:
            late(0.005)
        pair = partial(mlxdist.send, x, 1) if rank == 0 else partial(mlxdist.recv_like, x, 0, out=x)
        seconds.append(seconds_of(pair)[0])
    if rank == 0:
        print(f"{sorted(seconds)[10]:.4f} s", flush=True)


def signs_of_life() -> None:
    """A rank that calls nothing shows life when it is asked."""
    group.barrier()
    if rank == 0:
        native = engine_of(group).native
        before = lib.mlxdist_group_signs_of_life(native, 1)
        assert wait_for(lambda: lib.mlxdist_group_signs_of_life(native, 1) >= before + 3)
        Path(sys.argv[2]).touch()
    else:
        assert wait_for(Path(sys.argv[2]).exists)  # and sends nothing by itself
    group.barrier()


WHAT = {
    "last_message": lambda: last_message(sys.argv[2]),
    "handles": handles,
    "late_peer": lambda: late_peer(sys.argv[2]),
    "idle": idle,
    "third_rank_late": third_rank_late,
    "receiver_first": receiver_first,
    "signs_of_life": signs_of_life,
}
WHAT[sys.argv[1]]()
