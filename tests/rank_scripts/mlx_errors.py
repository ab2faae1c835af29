"""One rank of test_bridge.py: what goes wrong in MLX's threads, and what is left when the group is gone.

Argument: the scenario. Prints "as expected" at the end.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np

import mlxdist
from mlxdist.runtime.diagnostics import flight_recorder

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from waiting import late

group = mlxdist.init()
rank, size, world = group.rank(), group.size(), group.mlx


def expect(kind: type[Exception], text: str, function: Callable[[], object]) -> None:
    try:
        result = function()
    except kind as error:
        assert type(error) is kind and text in str(error), f"{type(error)}: {error}"
    else:
        raise AssertionError(f"no {kind.__name__}, but {result}")


def disagree() -> mx.array:
    """Differs in shape between the ranks."""
    return mx.distributed.all_sum(mx.full((3 + rank,), 7.0), group=world)


READERS = {
    "eval": mx.eval,
    "tolist": lambda x: x.tolist(),
    # These ask for the buffer, and NumPy takes an error for "has none": without care they return unwritten memory.
    "np.array": np.array,
    "np.asarray": np.asarray,
    "np.sqrt": np.sqrt,
}


def reader(name: str) -> None:
    """Whatever reads the result of an operation that failed raises, and so does whatever is tried afterwards."""
    x = mx.ones((3,))
    built_before = [mlxdist.all_gather(x), mlxdist.broadcast(x)]
    expect(mlxdist.Mismatch, f"rank {rank} calls all_sum of float32 [{3 + rank}]", lambda: READERS[name](disagree()))
    for y in built_before:
        for _ in range(3):  # the same array each time, which never was written
            expect(mlxdist.Mismatch, "ranks disagree", lambda y=y: READERS[name](y))
    for operation in (mlxdist.all_sum, mlxdist.broadcast):
        expect(mlxdist.Mismatch, "ranks disagree", lambda operation=operation: operation(x))


def middle_of_a_graph() -> None:
    x = ones = mx.array([1.0] * 4)
    for _ in range(10):
        x = mx.distributed.all_sum(x, group=world) / size
    broken = mx.distributed.all_sum(x if rank == 0 else x[:2], group=world)
    for _ in range(10):
        broken = mx.distributed.all_sum(broken, group=world) / size
    expect(mlxdist.Mismatch, "all_sum of float32 [2]", lambda: mx.eval(broken))
    expect(mlxdist.Mismatch, "all_sum of float32 [2]", x.tolist)  # of the same graph: MLX does not say what it is from
    assert ones.tolist() == [1.0] * 4, "what was made from memory is still right"


def stream_works_on() -> None:
    """An error leaves MLX's stream in order: no later result is lost or blamed for it."""
    expect(mlxdist.Mismatch, "ranks disagree", lambda: mx.eval(disagree()))
    for i in range(100):
        assert (mx.full((50,), float(i)) * 2).sum().item() == 100 * i


def asynchronous() -> None:
    """No thread waits when it happens. It is raised all the same, at the latest where the result is read."""

    def run() -> None:
        x = disagree()
        mx.async_eval(x)
        late(0.2)
        mx.eval(x)

    expect(mlxdist.Mismatch, "ranks disagree", run)


def in_a_thread() -> None:
    """The thread that evaluates gets the error, and the main thread is left alone."""
    caught = []

    def work() -> None:
        expect(mlxdist.Mismatch, "ranks disagree", lambda: mx.eval(disagree()))
        caught.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        sum(range(1000))  # steps of Python, at each of which the main thread could be interrupted
    assert caught


def refused() -> None:
    """Bad input fails on this rank alone, before anything is sent, and the group goes on."""
    # A group that mx.distributed cannot express; both ranks have taken part in the split.
    expect(mlxdist.InvalidArgument, "use mlxdist.Group.split, which returns None", lambda: world.split(-1))
    expect(mlxdist.InvalidArgument, "root is 7", lambda: mlxdist.broadcast(mx.ones(3), 7))
    shifted = mx.arange(9, dtype=mx.uint8)[1:].view(mx.float32)
    for _ in range(2):
        expect(mlxdist.InvalidArgument, "middle of an element", lambda: np.array(mlxdist.all_sum(shifted)))
    assert mlxdist.all_sum(mx.ones(3)).tolist() == [size] * 3
    assert mlxdist.all_sum(shifted + 0).shape == (2,)


def finalized() -> None:
    """Arrays and groups of MLX may outlive the group: using them raises, letting go of them does nothing."""
    x = mx.ones((3,))
    lazy = mx.distributed.all_sum(x, group=world)
    ours = mlxdist.broadcast(x)
    done = mx.distributed.all_sum(x, group=world)
    mx.eval(done)
    group.finalize()
    group.finalize()
    for y in (lazy, ours):
        for _ in range(2):
            expect(mlxdist.InvalidArgument, "has been finalized", lambda y=y: mx.eval(y))
    for use in (
        lambda: mlxdist.all_sum(np.ones(3)),
        lambda: mlxdist.all_sum(x),
        group.barrier,
        group.stats,
        lambda: group.mlx,
    ):
        expect(mlxdist.InvalidArgument, "has been finalized", use)
    assert done.tolist() == [size] * 3
    assert (world.rank(), world.size()) == (rank, size)


def pending_at_exit() -> None:
    """Operations without a wait still reach the other ranks, in whatever order the ranks end."""
    x = mx.full((100_000,), float(rank + 1))
    for _ in range(20):
        x = mx.distributed.all_sum(x, group=world) / size
    mx.async_eval(x)
    globals()["kept"] = [x, world, mlxdist.broadcast(x)]
    if rank == 0:
        late(0.3)


def forked() -> None:
    """A forked child has no queue pairs; it gets an error, and its end does not touch the group."""
    x = mx.ones((3,))
    mx.eval(mlxdist.all_sum(x))
    held = flight_recorder._recorder._reading  # as by a thread of the parent that tells others what this rank does
    held.acquire()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        expect(mlxdist.InvalidArgument, "forked", lambda: mlxdist.all_sum(np.ones(3)))
        expect(mlxdist.InvalidArgument, "forked", lambda: mlxdist.all_sum(x))
        expect(mlxdist.InvalidArgument, "forked", lambda: mx.eval(mx.distributed.all_sum(x, group=world)))
        expect(mlxdist.InvalidArgument, "forked", mlxdist.init)
        sys.exit(0)  # with all exit handlers
    held.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert mlxdist.all_sum(x).tolist() == [size] * 3


SCENARIOS = {
    **{f"reader {name}": lambda name=name: reader(name) for name in READERS},
    "middle_of_a_graph": middle_of_a_graph,
    "stream_works_on": stream_works_on,
    "asynchronous": asynchronous,
    "in_a_thread": in_a_thread,
    "refused": refused,
    "finalized": finalized,
    "pending_at_exit": pending_at_exit,
    "forked": forked,
}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]]()
    print("as expected")
