"""One rank of test_liveness.py: another rank dies, is stopped, comes late or aborts. Argument: what.

Prints "... at T", with T of the machine's monotonic clock, which all ranks share.
"""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np

import mlxdist

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import waiting
from waiting import seconds_of

group = mlxdist.init()
rank, size = group.rank(), group.size()
x = np.ones(1000, np.float32)
mlxdist.all_sum(x)


def say(what: str, more: str = "") -> None:
    print(f"{what} at {time.monotonic():.4f}{more}", flush=True)


def wait() -> None:
    """In an evaluation of MLX on even ranks, in a call on odd ones."""
    try:
        if rank % 2 == 0:
            mx.eval(mlxdist.all_sum(mx.ones(1000)))
        else:
            mlxdist.all_sum(x)
    except mlxdist.Error as error:
        say(type(error).__name__, f", of rank {error.rank}: {error}")
        sys.exit(1)
    print("no error")


def killed(which: str) -> None:
    if rank == int(which):
        waiting.late(0.3)
        say("dies")
        os.kill(os.getpid(), signal.SIGKILL)
    wait()


def aborts() -> None:
    if rank == 2:
        waiting.late(0.3)
        say("aborts")
        group.abort("there is no point in going on")
    wait()


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def stopped(which: str, seconds: str) -> None:
    """In the middle of a stream of collectives. Prints how much of a core a rank used that waited for another."""
    if rank == int(which):
        me = os.getpid()
        subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -STOP {me}; sleep {seconds}; kill -CONT {me}"])
    end = time.monotonic() + 0.6 + float(seconds)
    waits = []

    def timed(operation: Callable[[np.ndarray], np.ndarray], values: np.ndarray) -> np.ndarray:
        before = cpu_seconds()
        waited, result = seconds_of(operation, values)
        waits.append((waited, cpu_seconds() - before))
        return result

    turn, goes_on = 0, True
    while goes_on:
        turn += 1
        count = (3, 5000, 200_000)[turn % 3]
        total = timed(mlxdist.all_sum, np.arange(count, dtype=np.int64) + rank * turn)
        assert np.array_equal(total, size * np.arange(count) + turn * size * (size - 1) // 2), turn
        goes_on = timed(mlxdist.broadcast, np.array([time.monotonic() < end]))[0]
    waited, used = max(waits)
    print(f"{turn} turns, the longest wait {waited:.2f} s with {used / waited:.4f} of a core", flush=True)


def late(seconds: str) -> None:
    """Rank 0 computes; the others say whom they wait for, and where that is."""
    if rank == 0:
        waiting.late(float(seconds))
    assert np.all(mlxdist.all_sum(x) == size)


globals()[sys.argv[1]](*sys.argv[2:])
