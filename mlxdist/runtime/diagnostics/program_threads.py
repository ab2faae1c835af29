"""Whether the threads of this process may still call operations, as far as the system shows what they do.

Deadlock detection (deadlock.py) uses it. A thread that waits in ``mx.eval``, for a lock or a queue goes on when another
thread of its process lets it; where all of them wait, none does.
"""

import sys
import threading
from collections.abc import Collection, Hashable
from enum import IntEnum

import mlx.core as mx

from ..internal_thread import InternalThread
from ..native import ffi, lib

__all__ = ["Freedom", "ProgramThreads"]

# With more threads a rank counts as free.
_MAX = 1024


class Freedom(IntEnum):
    """The most that a rank may do without the operations that its threads wait for: that of its freest thread."""

    STUCK = 0
    """Nothing: all threads wait for these operations, or for each other."""
    IDLE = 1
    """A thread wakes up now and then, and goes on waiting; or something computes without a thread."""
    PENDING = 2
    """A thread wakes up at a time that has not come yet."""
    FREE = 3
    """A thread runs, or waits for time, input or another process."""


class ProgramThreads:
    """The threads of this process but for mlxdist's own."""

    def __init__(self, native: object) -> None:
        self._native = native
        self._lock = threading.Lock()  # two threads call freedom()
        self._moment: Hashable = None
        self._run_then: dict[int, int] = {}  # how long a thread had run when it was first seen since then
        self._has_gpu = mx.is_available(mx.gpu)

    def freedom(self, waiting: dict[int, int], moment: Hashable) -> Freedom:
        """``waiting``: ident and native id of the threads that wait for operations, and for nothing else. ``moment``
        changes with these operations: what a thread has done before it does not count."""
        with self._lock:
            if moment != self._moment:
                self._moment, self._run_then = moment, {}
            threads = threading.enumerate()
            known = {thread.ident: thread.native_id for thread in threads}
            if sys._current_frames().keys() - known.keys() - waiting.keys():
                return Freedom.FREE  # a thread that the module threading does not know
            own = {thread.native_id for thread in threads if isinstance(thread, InternalThread)}
            others = own.union(waiting.values())
            before, after = self._look(others), self._look(others)
            # Threads are seen one after the other. If none has run between two looks, all of it held at one moment.
            still = before == after and not self._has_gpu
            of_python = set(known.values())
            found = [self._freedom(*thread, thread[0] in of_python) for thread in before + after]
            return max([Freedom.STUCK if still else Freedom.IDLE, *found])

    def _look(self, others: Collection[int | None]) -> list[tuple[int, int, int]]:
        """(native id, nanoseconds that it has run, state) of each thread but for the others."""
        threads = ffi.new("mlxdist_thread[]", _MAX)
        count = lib.mlxdist_threads(self._native, threads, _MAX)
        if count > _MAX:
            return [(0, 0, lib.MLXDIST_THREAD_RUNS)]
        return [(t.id, t.run_ns, t.state) for t in threads[0:count] if t.id not in others]

    def _freedom(self, id: int, run_ns: int, state: int, of_python: bool) -> Freedom:
        if state == lib.MLXDIST_THREAD_WAITS:
            return Freedom.STUCK
        if state == lib.MLXDIST_THREAD_RUNS:
            return Freedom.FREE
        has_run = run_ns > self._run_then.setdefault(id, run_ns)
        if not of_python:  # calls operations only for a thread that waits for it, unless it is MLX's, which polls
            return Freedom.FREE if has_run and state == lib.MLXDIST_THREAD_OUTSIDE else Freedom.IDLE
        if state == lib.MLXDIST_THREAD_OUTSIDE:
            return Freedom.FREE
        return Freedom.IDLE if has_run else Freedom.PENDING
