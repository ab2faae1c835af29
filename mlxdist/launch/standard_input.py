"""The launcher's standard input, passed on to the ranks.

All input goes to every reader: a pipe of a rank on this machine, or a host, whose agent has pipes of its ranks. Each
reads at its own pace, and its unread input is queued. The launcher reads more once the fastest reader has read
everything, so a reader that does not read delays no other.
"""

from __future__ import annotations

import collections
import os
import select
import selectors
import signal
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeAlias

from .wakeup import Wakeup

if TYPE_CHECKING:  # a job on this machine alone does not load what reaches others
    from .remote import HostInput

    Reader: TypeAlias = "Pipe | HostInput"

__all__ = ["CHOICES", "Feed", "Pipe", "StandardInput"]

CHOICES = ("all", "0")  # which ranks have it

READ_BYTES = 1 << 15  # so that a frame with it fits into a pipe
# Bytes of unread input after which a reader gets no more: it probably never reads, and its queue takes memory.
MAX_BEHIND = 64 << 20
# Seconds between two attempts to read while the launcher is in the background of its shell.
_PAUSE = 0.2


class Pipe:
    """The standard input of a rank on this machine; ``target``, the end to write to, belongs to this object."""

    def __init__(self, name: str, target: int) -> None:
        self.name = name
        self._target = target
        os.set_blocking(target, False)

    def fileno(self) -> int:
        return self._target

    def offer(self, data: memoryview) -> int:
        """Writes as much as fits without waiting. Returns its size. Raises BrokenPipeError: the rank reads no more."""
        try:
            return os.write(self._target, data)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        os.close(self._target)


class Feed:
    """The queues of unread input, one per reader. Not for several threads at once.

    ``selector``: full pipes are registered there; their data is the function to call when they can take more.
    """

    def __init__(self, selector: selectors.BaseSelector, say: Callable[[str], None]) -> None:
        self._selector = selector
        self._say = say
        self._waiting: dict[Reader, collections.deque[memoryview]] = {}
        self._ended = False

    @property
    def has_readers(self) -> bool:
        return bool(self._waiting)

    @property
    def wants_more(self) -> bool:
        """Whether a reader has read everything so far, and input has not ended."""
        return not self._ended and any(not left for left in self._waiting.values())

    def add(self, reader: Reader) -> None:
        self._waiting[reader] = collections.deque()
        self.push(reader)

    def put(self, data: bytes) -> None:
        """Queues ``data`` for all readers; empty data ends the input."""
        self._ended = not data
        for reader, left in list(self._waiting.items()):
            if data:
                left.append(memoryview(data))
            self.push(reader)
            if sum(map(len, left)) > MAX_BEHIND:
                size = f"{MAX_BEHIND >> 20} MiB"
                self._say(f"{reader.name} has left {size} of the standard input unread; it gets no more")
                self._remove(reader)

    def push(self, reader: Reader) -> None:
        """Passes the reader as much of its queue as it takes."""
        if (left := self._waiting.get(reader)) is None:
            return
        try:
            while left:
                taken = reader.offer(left[0])
                if taken < len(left[0]):
                    left[0] = left[0][taken:]
                    break
                left.popleft()
        except BrokenPipeError:  # it has ended, or closed its input
            left.clear()
            self._remove(reader)
            return
        if self._ended and not left:
            self._remove(reader)
        elif isinstance(reader, Pipe):
            self._watch(reader, bool(left))

    def push_all(self) -> None:
        for reader in list(self._waiting):
            self.push(reader)

    def close(self) -> None:
        """Drops all queues and readers."""
        for reader in list(self._waiting):
            self._remove(reader)

    def _remove(self, reader: Reader) -> None:
        del self._waiting[reader]
        if isinstance(reader, Pipe):
            self._watch(reader, False)
        reader.close()

    def _watch(self, pipe: Pipe, wanted: bool) -> None:
        watched = pipe.fileno() in self._selector.get_map()
        if wanted and not watched:
            self._selector.register(pipe, selectors.EVENT_WRITE, lambda: self.push(pipe))
        elif watched and not wanted:
            self._selector.unregister(pipe)


class StandardInput:
    """Reads standard input as long as the launcher runs: a restarted job continues where reading has stopped.

    A thread reads, since no call waits for files and terminals in the same way on all systems; another writes.
    ``typed`` is called when a line was typed at a terminal, before ranks get it.
    """

    def __init__(self, say: Callable[[str], None], typed: Callable[[], None] = lambda: None) -> None:
        self._typed = typed
        self._selector = selectors.DefaultSelector()
        self._feed = Feed(self._selector, say)
        self._changed = threading.Condition(threading.RLock())
        self._wakeup = Wakeup()
        self.wake = self._wakeup.wake  # a reader may take more; from any thread
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._take_wake)
        self._threads = [
            threading.Thread(target=run, name="mlxdist input", daemon=True) for run in (self._read, self._write)
        ]

    def feed(self, readers: Iterable[Reader]) -> None:
        """Adds readers for the input that is read from now on."""
        with self._changed:
            for reader in readers:
                self._feed.add(reader)
            self._changed.notify_all()
        self.wake()
        for thread in self._threads:
            if thread.ident is None:
                thread.start()

    def clear(self) -> None:
        """Removes all readers and their unread input. Input that is read later is kept for the next readers."""
        with self._changed:
            self._feed.close()

    def _take_wake(self) -> None:
        self._wakeup.read()
        self._feed.push_all()

    def _write(self) -> None:
        while True:
            ready = self._selector.select()
            with self._changed:
                for key, _ in ready:
                    key.data()
                self._changed.notify_all()

    def _read(self) -> None:
        # SIGTTIN stops a process that reads its terminal in the background of a shell. If it is blocked, reading fails.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTIN])
        data = b"more"
        while data:
            with self._changed:
                self._changed.wait_for(lambda: self._feed.wants_more)
            data = _read_once()
            with self._changed:
                self._changed.wait_for(lambda: self._feed.has_readers)
                if data.endswith(b"\n") and os.isatty(0):
                    self._typed()
                self._feed.put(data)
            self.wake()


def _read_once() -> bytes:
    """Waits for input and returns it; empty at the end."""
    while True:
        try:
            return os.read(0, READ_BYTES)
        except BlockingIOError:  # another process that shares it has made it so
            select.select([0], [], [])
        except OSError:
            if not _is_in_the_background():
                return b""
            threading.Event().wait(_PAUSE)


def _is_in_the_background() -> bool:
    try:
        return os.tcgetpgrp(0) != os.getpgrp()
    except OSError:  # no terminal, or none any more
        return False
