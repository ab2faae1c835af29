"""One rank of test_signals.py: rank 1 gets a signal while it waits. Arguments: how it waits, the signal.

Prints "signal at T" and "raised CLASS at T: text", with T of the machine's monotonic clock, which all ranks share.
"""

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np

import mlxdist
from mlxdist.runtime import signals
from mlxdist.runtime.rendezvous import Rendezvous

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from waiting import late, wait_for

how, number = sys.argv[1], getattr(signal, sys.argv[2])
odd_one = os.environ["MLXDIST_RANK"] == "1"
SENT = Path(os.environ["TMPDIR"]).parent / "sent"  # rank 1 makes it: the directory is that of all ranks


def say(what: str) -> None:
    """With the time; in the test's words."""
    print(f"{what} at {time.monotonic():.4f}", flush=True)


def send(after: float, number: signal.Signals = number) -> None:
    def kill() -> None:
        say("signal")
        SENT.touch()
        os.kill(os.getpid(), number)

    threading.Timer(after, kill).start()


def come_after_signal(seconds: float) -> None:
    """Delays this rank until so long after the signal of rank 1."""
    assert wait_for(SENT.exists, 60)
    late(seconds)


def report(wait: Callable[[], object]) -> None:
    """What the wait ends with, and what the next operation does."""
    try:
        wait()
    except BaseException as error:
        now = time.monotonic()
        print(f"raised {type(error).__name__} at {now:.4f}: {error}", flush=True)
        if not isinstance(error, mlxdist.Error):
            raise
    else:
        say("ended")


def stuck_in_c() -> None:
    """A second lock of one mutex: no signal ends that."""
    c, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    c.pthread_mutex_lock(mutex)
    c.pthread_mutex_lock(mutex)


def waits_in_rendezvous() -> bool:
    """Whether the main thread does."""
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame and frame.f_code is not Rendezvous._wait.__code__:
        frame = frame.f_back
    return frame is not None


def join() -> None:
    """Rank 2 never comes. Rank 1 gets the signal once it waits for rank 2."""
    if os.environ["MLXDIST_RANK"] == "2":
        come_after_signal(1)
        sys.exit(1)
    if odd_one:

        def send_later() -> None:
            wait_for(waits_in_rendezvous, 60)
            late(0.3)  # for rank 0 to wait, too
            send(0)

        threading.Thread(target=send_later).start()
    mx.distributed.init() if how == "init_shim" else mlxdist.init()


if how.startswith("init"):
    report(join)
    sys.exit(1)

if how == "own_wakeup":
    listening, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
if how in ("own_handler", "impatient"):
    signal.signal(number, lambda number, frame: say("handled"))

group = mlxdist.init()
rank, size = group.rank(), group.size()
atexit.register(lambda: print("at exit", flush=True))
x = np.ones(1000, np.float32)
mlxdist.all_sum(x)


def wait_in_mpi_shim() -> None:
    import mlx.core.distributed as distributed

    mx.eval(distributed.all_sum(mx.ones(3), group=distributed.init()))


WAITS = {
    "eval": lambda: mx.eval(mlxdist.all_sum(mx.ones(3))),
    "array": lambda: np.array(mlxdist.all_sum(mx.ones(3))),
    "numpy": lambda: mlxdist.all_sum(x),
    "handle": lambda: mlxdist.all_sum(x, async_op=True).wait(),
    "finalize": group.finalize,
    "mpi_shim": wait_in_mpi_shim,
    "sleep": lambda: late(20) if odd_one else mlxdist.all_sum(x),
}


def waits() -> None:
    """Rank 0 comes late, to a group that has failed."""
    if rank == 0:
        come_after_signal(0.6)
    if odd_one:
        send(0.2)
    report(WAITS[how])


def stuck() -> None:
    if odd_one:
        send(0.2)
        stuck_in_c()
    report(WAITS["numpy"])


def python() -> None:
    """The main thread is in Python, where the interpreter acts by itself: the group goes on."""
    if rank == 0:
        come_after_signal(0.3)
    handle = mlxdist.all_sum(x, async_op=True)
    if odd_one:
        send(0.2)
        try:
            late(5)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            late(0.2)  # on a loaded machine the thread that watches may see the signal after its handler has run
    assert np.all(handle.wait() == size) and np.all(mlxdist.all_sum(x) == size)


def own_handler() -> None:
    """It decides: the operation ends when the other rank comes."""
    if odd_one:
        send(0.2)
    else:
        come_after_signal(0.8)
    assert np.all(mlxdist.all_sum(x) == size)
    say("ended")


def impatient() -> None:
    """The second signal, while the handler could not run for the first one."""
    if odd_one:
        send(0.2)
        send(0.6)
    else:
        come_after_signal(1.3)
    report(WAITS["numpy"])


def own_wakeup() -> None:
    if odd_one:
        signals.on(signal.SIGUSR2, lambda: say("called"))
        send(0.2)
    else:
        come_after_signal(0.8)
    mx.eval(mlxdist.all_sum(mx.ones(3)))
    assert not odd_one or os.read(listening, 10) == bytes([number])
    group.finalize()
    assert signal.set_wakeup_fd(-1) == woken
    assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
    print("as before")


def forked() -> None:
    """A child's signals are its own, and end it as they would have without us."""
    child = os.fork()
    if child == 0:
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        try:
            os.kill(os.getpid(), signal.SIGINT)
            late(5)
        except KeyboardInterrupt:
            os.kill(os.getpid(), signal.SIGTERM)
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
    assert np.all(mlxdist.all_sum(x) == size)
    print("goes on")


SCENARIOS = {
    "stuck": stuck,
    "python": python,
    "own_handler": own_handler,
    "impatient": impatient,
    "own_wakeup": own_wakeup,
    "forked": forked,
}
SCENARIOS.get(how, waits)()
