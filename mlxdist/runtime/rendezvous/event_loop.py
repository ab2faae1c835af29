"""The rendezvous' one background thread: it waits on all sockets at once, and on deadlines."""

import collections
import os
import selectors
import socket
import threading
from collections.abc import Callable

from mlxdist.runtime.internal_thread import InternalThread

__all__ = ["Loop"]


class Loop:
    """Runs callbacks when sockets are ready. Everything but ``call`` and ``stop`` belongs to its own thread.

    Not ``asyncio``: it costs 50 ms of import in every rank, and its event loop would share an epoll descriptor with
    every forked child. ``poll`` keeps no state in the kernel, so a child can close its copies without effect here.
    """

    def __init__(self, on_crash: Callable[[BaseException], None]) -> None:
        self._on_crash = on_crash
        self._selector = selectors.PollSelector()
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._resting: set[socket.socket] = set()
        self._selector.register(self._woken, selectors.EVENT_READ, lambda events: self._woken.recv(4096))
        self._stopping = False
        # Daemon: a program that never calls close() must still be able to exit.
        self._thread = InternalThread(target=self._run, name="mlxdist rendezvous", daemon=True)
        self._timers: list[Callable[[], float | None]] = []

    def start(self) -> None:
        self._thread.start()

    def add_timer(self, timer: Callable[[], float | None]) -> None:
        """Calls ``timer`` again and again, at the latest after the seconds that it returns (None: when it likes)."""
        self._timers.append(timer)

    def call(self, function: Callable[[], None]) -> None:
        """Runs ``function`` in the loop's thread, soon. From any thread."""
        self._calls.append(function)
        try:
            self._waker.send(b"\0")
        except BlockingIOError:
            return  # the pair is full of wake-ups already
        except OSError:
            return  # stopped

    def stop(self) -> None:
        """Ends the thread and closes every socket that it still watches. From any other thread, more than once."""

        def stopping() -> None:
            self._stopping = True

        self.call(stopping)
        if self._thread.ident is not None:
            self._thread.join()

    def is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def watch(self, sock: socket.socket, callback: Callable[[int], object], write: bool = False) -> None:
        """Calls ``callback(events)`` whenever ``sock`` can be read, or written if ``write``."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if write else 0)
        self._resting.discard(sock)
        if sock in self._selector.get_map():
            self._selector.modify(sock, events, callback)
        else:
            self._selector.register(sock, events, callback)

    def rest(self, sock: socket.socket) -> None:
        """Calls nothing for ``sock`` until the next ``watch``; it is still closed with the others."""
        self.forget(sock)
        self._resting.add(sock)

    def forget(self, sock: socket.socket) -> None:
        if sock in self._selector.get_map():
            self._selector.unregister(sock)

    def close_in_child(self) -> None:
        """After a fork, in the child: closes its copies of the sockets, or the parent's peers would not see it die."""
        for sock in (*self._sockets(), self._waker):
            os.close(sock.detach())

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn(self._step())
        except BaseException as error:  # whoever waits for this thread must hear of it
            self._on_crash(error)
            raise
        finally:
            for sock in (*self._sockets(), self._waker):
                self.forget(sock)
                sock.close()

    def _sockets(self) -> list[socket.socket]:
        return [*(key.fileobj for key in self._selector.get_map().values()), *self._resting]

    def _turn(self, seconds: float | None) -> int:
        """Waits for events and runs their callbacks. Returns how many came."""
        ready = self._selector.select(seconds)
        for key, events in ready:
            # An earlier callback may have closed it, and the next socket then has its number.
            now = self._selector.get_map().get(key.fd)
            if now is not None and now.fileobj is key.fileobj:
                now.data(events)
        return len(ready)

    def _step(self) -> float | None:
        while self._calls and not self._stopping:
            self._calls.popleft()()
        if self._stopping:
            return 0
        pauses = [timer() for timer in self._timers]
        return min((pause for pause in pauses if pause is not None), default=None)
