"""Operations that have been started and go on by themselves: ``async_op=True``."""

import os
import threading
import time
from collections import deque
from typing import Any

from mlxdist.base import errors
from mlxdist.base.opaque import Opaque

from ..diagnostics import flight_recorder
from ..native import ffi, last_error, lib
from .process_bound import ProcessBound

__all__ = ["Handle", "Operation", "Pending"]


class Handle(ProcessBound, metaclass=Opaque):
    """An operation that has been started. Made by the operations of mlxdist with ``async_op=True``.

    The operation goes on without a waiting thread, and keeps its arrays until it has ended, also when the
    handle is dropped. Until then its input must not be changed and its result not be read. Operations may end, and be
    waited for, in any order; those of one group must be started in the same order on all ranks. Any thread may use a
    handle.
    """

    _made_by = "operations with async_op=True"

    def __init__(self, operation: "Operation | None", pending: "Pending", result: Any) -> None:
        # `operation` is None where there was nothing to do: in a group of one.
        self._operation = operation
        self._pending = pending
        self._result = result

    def wait(self, timeout: float | None = None) -> Any:
        """Returns the result once the operation has ended.

        Args:
            timeout: seconds to wait at most; ``None`` is as long as the group's own deadline (``MLXDIST_TIMEOUT``)
                allows.

        Raises:
            Timeout: the operation has not ended after ``timeout`` seconds. It goes on, and may be waited for again.
            Mismatch, Timeout, PeerLost, Aborted, TransportError: the operation has failed; again at each call.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._result

    @property
    def result(self) -> Any:
        """The result that :meth:`wait` returns; waits, too."""
        return self.wait()

    def done(self) -> bool:
        """Whether the operation has ended, well or not. Does not wait."""
        return self._operation is None or self._operation.wait(0)

    def exception(self, timeout: float | None = None) -> errors.Error | None:
        """The error that the operation ended with, ``None`` if it ended well. Waits as :meth:`wait` does.

        Raises:
            Timeout: the operation has not ended after ``timeout`` seconds.
        """
        operation = self._operation
        if operation is None:
            return None
        if not operation.wait(timeout):
            raise errors.Timeout(f"wait: {operation.name} has not ended after {timeout:g} s; it goes on, wait again")
        return operation.error()

    def __repr__(self) -> str:
        name = "operation" if self._operation is None else self._operation.name
        return f"<mlxdist.Handle of {name}, {'done' if self.done() else 'running'}>"

    def __del__(self) -> None:
        # No more than this: the garbage collector may call it anywhere, also where a lock of an operation is held.
        if self._operation is not None and self._operation.status is None:
            self._pending.dropped.append(self._operation)


class Operation:
    """An operation of the engine. Owns the engine's handle and the memory, and gives both up when it has ended."""

    def __init__(self, name: str, memory: Any, pending: "Pending") -> None:
        self.name = name
        self.call = ffi.new("mlxdist_call *", {"starts": 1})  # its handle is there once it has started
        self.status: int | None = None  # of the operation, once it has ended
        self._text = ""
        self._memory = memory
        self._pending = pending
        self._lock = threading.Lock()  # guards the rest, and is not held while waiting
        self._waiting = 0

    def wait(self, timeout: float | None) -> bool:
        """Whether it has ended, after at most ``timeout`` seconds (``None``: the engine's deadline)."""
        handle, ended, status, text = ffi.NULL, False, lib.MLXDIST_OK, ""
        try:  # around all of it: Ctrl-C may come anywhere
            with self._lock:
                if self.call.handle == ffi.NULL:
                    return True
                self._pending.require_own_process()
                handle = self.call.handle
                self._waiting += 1
            if timeout is None or timeout > 0:  # a look alone needs no text: each start takes some
                status = lib.mlxdist_handle_wait(handle, -1 if timeout is None else timeout)
                ended = status != lib.MLXDIST_TIMEOUT
            if not ended and lib.mlxdist_handle_done(handle):
                status, ended = lib.mlxdist_handle_wait(handle, 0), True  # the operation's own status, at once
            text = last_error() if ended and status != lib.MLXDIST_OK else ""
        finally:
            if handle != ffi.NULL:
                self._leave(handle, ended, status, text)
        return ended

    def _leave(self, handle: Any, ended: bool, status: int, text: str) -> None:
        memory = None  # given up behind the lock, and behind the handle: it may be the last to hold the group
        with self._lock:
            self._waiting -= 1
            if ended and self.status is None:
                self.status, self._text = status, text
            if self.status is not None and self._waiting == 0:
                lib.mlxdist_handle_free(handle)
                self.call.handle = ffi.NULL
                self._pending.running.discard(self)
                memory, self._memory = self._memory, None
        del memory

    @property
    def is_awaited(self) -> bool:
        return self._waiting > 0

    def error(self) -> errors.Error | None:
        """A new exception each time: several threads may raise it."""
        if not self.status:
            return None
        self._pending.error_reported = True
        return flight_recorder.explain(errors.from_status(self.status, self._text))


_MOST_RUNNING = 4  # more than one, as each start adds at most one: the sweeps get around


class Pending:
    """The operations of a process that are not known to have ended."""

    def __init__(self) -> None:
        self.running: set[Operation] = set()
        self.dropped: deque[Operation] = deque()  # those whose handle is gone
        self.error_reported = False  # whether the error of an operation has been raised
        self._sweeping = threading.Lock()
        self._process = os.getpid()

    def sweep(self) -> None:
        """Releases the memory of operations that have ended and have no handle. Each start of one calls this, so it
        looks at few that are still running, and the next time at the ones behind them."""
        if not self.dropped or not self._sweeping.acquire(blocking=False):
            return
        try:
            running = 0
            for _ in range(len(self.dropped)):
                if self.dropped[0].wait(0):
                    self.dropped.popleft()
                    continue
                self.dropped.rotate(-1)
                running += 1
                if running == _MOST_RUNNING:
                    break
        finally:
            self._sweeping.release()

    def is_awaited(self) -> bool:
        """Whether a thread waits for one of them."""
        return any(operation.is_awaited for operation in list(self.running))

    def wait(self, seconds: float) -> bool:
        """Whether all have ended, well or not, after at most ``seconds``."""
        deadline = time.monotonic() + seconds
        for operation in list(self.running):
            operation.wait(max(deadline - time.monotonic(), 0))
        while self.running and time.monotonic() < deadline:
            time.sleep(0.001)  # another thread has seen an operation end, and is about to say so
        return not self.running

    def require_own_process(self) -> None:
        if os.getpid() != self._process:
            raise errors.InvalidArgument(
                "this process was forked from a rank, and its operations did not come along; wait for them in the "
                "process that started them"
            )
