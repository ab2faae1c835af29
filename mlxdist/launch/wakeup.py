"""Signals as an event that a thread can wait for together with descriptors."""

import select
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Interrupted", "Wakeup"]


class Interrupted(Exception):
    """A signal that came while the job was prepared. ``host``: where it came, if not to the launcher itself."""

    def __init__(self, number: signal.Signals, host: str = "") -> None:
        super().__init__(number.name + (f" on {host}" if host else ""))
        self.number = number


class Wakeup:
    """A descriptor that becomes readable when a signal arrives or another thread calls `wake`."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD)

    def __init__(self) -> None:
        self._source, self._target = socket.socketpair()
        self._source.setblocking(False)
        self._target.setblocking(False)

    def fileno(self) -> int:
        return self._source.fileno()

    def wake(self) -> None:
        try:
            self._target.send(b"\0")
        except BlockingIOError:
            return  # it is full, so it is readable

    def read(self) -> list[signal.Signals]:
        """The signals received so far that request the end of the job. SIGCHLD only wakes the waiting thread."""
        try:
            return [signal.Signals(number) for number in self._source.recv(4096) if number not in (0, signal.SIGCHLD)]
        except BlockingIOError:
            return []

    def require_none(self) -> None:
        """Raises Interrupted if a signal has come."""
        for number in self.read():
            raise Interrupted(number)

    def is_awake(self, seconds: float | None) -> bool:
        """Waits up to ``seconds``. Returns whether there is something to read."""
        return bool(select.select([self._source], [], [], seconds)[0])

    def wait(self, seconds: float) -> signal.Signals | None:
        """Waits. Returns the signal that ended the pause early, or None."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.is_awake(left)
            for number in self.read():
                return number
        return None

    @contextmanager
    def signals(self) -> Iterator[None]:
        """A context in which signals only wake the waiting thread. Ignored ones (nohup) stay ignored."""
        previous = {}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.SIGNALS)  # the parent process may have blocked them
        descriptor = signal.set_wakeup_fd(self._target.fileno(), warn_on_full_buffer=False)
        for number in self.SIGNALS:
            if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN:
                # Python writes to the descriptor only for signals that have a handler of Python's.
                previous[number] = signal.signal(number, lambda number, frame: None)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(descriptor)
