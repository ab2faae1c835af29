"""A thread that writes to the launcher's own two streams."""

import collections
import os
import threading
import time
from collections.abc import Callable

__all__ = ["MAX_BACKLOG", "Writer"]

# Reading from the ranks stops while this much waits for the reader of the launcher's output.
MAX_BACKLOG = 4 << 20


class Writer:
    """Writes in a thread of its own: the reader of the launcher's output may be slow, or a pager that waits for a
    key, and the launcher has to supervise ranks meanwhile."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.broken: dict[int, OSError] = {}  # descriptors whose reader is gone, or that cannot be written
        self._backlog = 0
        self._wake = wake
        self._queue: collections.deque[tuple[int, bytes]] = collections.deque()
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="mlxdist output", daemon=True).start()

    def put(self, target: int, data: bytes) -> None:
        with self._changed:
            self._queue.append((target, data))
            self._backlog += len(data)
            self._changed.notify_all()

    def is_full(self, most: int = MAX_BACKLOG) -> bool:
        return self._backlog > most

    def wait(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._backlog == 0, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                target, data = self._queue.popleft()
            self._write(target, data)
            with self._changed:
                was_full = self.is_full()
                self._backlog -= len(data)
                self._changed.notify_all()
            if target in self.broken or (was_full and not self.is_full()):
                self._wake()

    def _write(self, target: int, data: bytes) -> None:
        view = memoryview(data)
        while view and target not in self.broken:
            try:
                view = view[os.write(target, view) :]
            except BlockingIOError:
                # Another process that shares our terminal has made it non-blocking.
                time.sleep(0.01)
            except OSError as error:
                self.broken[target] = error
