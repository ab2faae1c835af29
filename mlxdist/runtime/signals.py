"""Ctrl-C and SIGTERM act at once, also while the main thread waits in C for an operation.

Python runs the handlers of signals in the main thread, between two steps of the program: not while that waits in
``mx.eval`` or in the engine. So a thread of this module reads the descriptor that Python's C handler writes the number
of each signal to (``signal.set_wakeup_fd``), and ends the operation; the main thread returns, and the handler runs.

SIGINT    where Python's own handler is installed, which raises KeyboardInterrupt, and the main thread does not run it
          by itself soon: the world is aborted. A handler of the program's decides for itself; when a second SIGINT
          comes before it could run, the world is aborted too.
SIGTERM   where the program has no handler: the world is aborted at once, and SystemExit(143) raised in the main thread,
          so that exit handlers run. If that is not raised within 2 seconds, the process ends as by the default handler.
others    what is registered with ``on``, where the program has no handler: called in the thread of this module.

Python allows all this in the main thread of the main interpreter alone. Where ``mlxdist.init()`` is called in another
one, signals are what they were: Ctrl-C acts when the operation has ended. The same holds once the program has set a
wakeup descriptor of its own (asyncio's ``add_signal_handler``); one that was there before still gets its bytes.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from mlxdist.base.errors import Error, interruption
from mlxdist.runtime.internal_thread import InternalThread

__all__ = ["Signals", "on"]

# For the main thread to run Python's handler by itself. Where it can, it does within the 5 ms of a thread's turn.
PATIENCE_SECONDS = 0.03
POLL_SECONDS = 0.01
# For the main thread to come back from C, when SIGTERM has aborted what it may have waited for.
TERM_SECONDS = 2.0

_callbacks: dict[int, Callable[[], object]] = {}
_running: "Signals | None" = None


def on(number: signal.Signals, callback: Callable[[], object]) -> None:
    """Calls ``callback`` in the thread of this module when signal ``number`` comes, while there is a world.

    Where the program handles the signal itself, or ignores it, that stays as it is.
    """
    _callbacks[number] = callback
    if _running is not None:
        _running.handle(number)


class Signals:
    """Watches from its construction until ``stop``, if it is made in the main thread; else does nothing."""

    def __init__(
        self, rank: int, host: str, interrupt: Callable[[Error, bool], None], is_busy: Callable[[], bool]
    ) -> None:
        """``interrupt(error, raises)`` aborts the world, where ``raises`` says whether the main thread will get another
        exception for the signal; ``is_busy()`` says whether the program may be waiting for the world."""
        global _running
        self._rank = rank
        self._host = host
        self._interrupt = interrupt
        self._is_busy = is_busy
        self._restore: dict[int, signal.Handlers] = {}
        self._interrupted_at: float | None = None  # SIGINT has come, and the main thread has not looked yet
        self._impatient = False
        self._kill_at: float | None = None
        self._terminating = False  # the main thread has raised SystemExit
        self._aborted = threading.Event()  # the world, by SIGTERM
        self._looked = False  # the main thread has run a step of Python since the SIGINT
        self._look = _PENDING_CALL(self._take_look)  # kept: the interpreter may call it late
        self._thread: threading.Thread | None = None
        self._source, self._target = socket.socketpair()
        self._target.setblocking(False)
        try:
            self._previous = signal.set_wakeup_fd(self._target.fileno(), warn_on_full_buffer=False)
        except ValueError:  # not the main thread
            self._source.close()
            self._target.close()
            return
        self.handle(signal.SIGTERM)
        for number in _callbacks:
            self.handle(number)
        self._thread = InternalThread(target=self._run, name="mlxdist signals", daemon=True)
        self._thread.start()
        _running = self

    def handle(self, number: int) -> None:
        """Gives the signal to this module's thread where it would end the process otherwise."""
        with contextlib.suppress(ValueError):  # not the main thread
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, self._terminate if number == signal.SIGTERM else _do_nothing)
                self._restore[number] = signal.SIG_DFL

    def stop(self) -> None:
        """Restores all handlers and the descriptor, but for what others have changed since."""
        global _running
        if self._thread is None:
            return
        _running = None
        self._give_back()
        with contextlib.suppress(OSError):
            self._target.send(b"\0")
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._source.close()
        self._target.close()
        self._thread = None

    def terminates(self, seconds: float) -> bool:
        """Whether SIGTERM ends the program. The world is then aborted when this returns, or ``seconds`` have passed."""
        if self._terminating and self._thread is not None:
            self._aborted.wait(seconds)
        return self._terminating

    def close_in_child(self) -> None:
        """Gives signals back in a forked child, which has the descriptors, not the thread: its signals are its own."""
        if self._thread is None:
            return
        self._give_back()
        self._thread = None
        self._source.close()
        self._target.close()

    def _give_back(self) -> None:
        with contextlib.suppress(ValueError):  # not the main thread: the handlers do no harm
            descriptor = signal.set_wakeup_fd(-1)
            signal.set_wakeup_fd(self._previous if descriptor == self._target.fileno() else descriptor)
            for number, handler in self._restore.items():
                if signal.getsignal(number) in (self._terminate, _do_nothing):
                    signal.signal(number, handler)

    # In the main thread.

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self._terminating, self._kill_at = True, None
        raise SystemExit(128 + number)

    def _take_look(self, unused: int | None) -> int:
        self._looked = True
        return 0

    # In the thread of this module.

    def _run(self) -> None:
        while True:
            self._source.settimeout(self._pause())
            try:
                numbers = self._source.recv(256)
            except TimeoutError:
                numbers = b""
            if 0 in numbers:
                return
            for number in numbers:
                self._take(number)
            self._watch_main_thread()

    def _pause(self) -> float | None:
        kill_at = self._kill_at
        if self._interrupted_at is not None:
            return POLL_SECONDS
        return None if kill_at is None else max(POLL_SECONDS, kill_at - time.monotonic())

    def _take(self, number: int) -> None:
        if self._previous != -1:
            with contextlib.suppress(OSError):  # full, or closed by now
                os.write(self._previous, bytes([number]))
        if number == signal.SIGINT:
            self._impatient = self._interrupted_at is not None
            if not self._impatient:
                self._interrupted_at = time.monotonic()
                self._looked = False
                # The interpreter first runs handlers of signals, then this.
                ctypes.pythonapi.Py_AddPendingCall(self._look, None)
        elif signal.getsignal(number) == self._terminate:
            self._kill_at = None if self._terminating else time.monotonic() + TERM_SECONDS
            self._abort(SystemExit(128 + number), raises=True)
            self._aborted.set()
        elif number in _callbacks and signal.getsignal(number) is _do_nothing:
            try:
                _callbacks[number]()
            except Exception:
                sys.excepthook(*sys.exc_info())

    def _watch_main_thread(self) -> None:
        now = time.monotonic()
        if self._looked:
            self._interrupted_at = None
        elif self._interrupted_at is not None and now - self._interrupted_at >= PATIENCE_SECONDS:
            raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            if (raises or self._impatient) and self._is_busy():
                self._interrupted_at = None
                self._abort(KeyboardInterrupt(), raises)
        kill_at = self._kill_at
        if kill_at is not None and now >= kill_at and not self._terminating:
            _end_process(signal.SIGTERM)

    def _abort(self, cause: BaseException, raises: bool) -> None:
        try:
            self._interrupt(interruption(cause, self._rank, self._host), raises)
        except Exception:  # this thread must live to end the process
            sys.excepthook(*sys.exc_info())


_PENDING_CALL = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """The number has been written to the descriptor by then."""


def _end_process(number: int) -> None:
    """Ends the process as the default disposition does. signal.signal is for the main thread, which is stuck."""
    set_disposition = ctypes.CDLL(None).signal
    set_disposition.argtypes, set_disposition.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    set_disposition(number, None)  # SIG_DFL is 0
    os.kill(os.getpid(), number)
