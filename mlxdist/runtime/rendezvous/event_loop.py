"""The rendezvous' one background thread: it waits for events on all sockets at once, and for deadlines."""

import collections
import os
import selectors
import socket
import threading
from collections.abc import Callable

from mlxdist.runtime.internal_thread import InternalThread

from .protocol import RECEIVED, RELIABLE, Framing, Kind, ProtocolError

__all__ = ["Connection", "EventLoop"]

# What a rank sends before it is authenticated comes in two or three. Each is work for rank 0's thread.
MAX_UNAUTHENTICATED_READS = 64


class EventLoop:
    """Runs callbacks when sockets are ready. Everything but ``call`` and ``stop`` belongs to its own thread.

    Not ``asyncio``: it costs 50 ms of import in every rank, and its event loop would share an epoll descriptor with
    every forked child. ``poll`` keeps no state in the kernel, so a child can close its copies without effect here.
    """

    def __init__(self, on_crash: Callable[[BaseException], None]) -> None:
        self._on_crash = on_crash
        self._selector = selectors.PollSelector()
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._sockets = {self._wake_sender}  # all that are to be closed with the loop
        self.watch(self._wake_receiver, lambda _: self._wake_receiver.recv(4096))
        self._stopping = False
        # Daemon: a program that never calls close() must still be able to exit.
        self._thread = InternalThread(target=self._run, name="mlxdist rendezvous", daemon=True)
        self._timers: list[Callable[[], float | None]] = []

    def start(self) -> None:
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def add_timer(self, timer: Callable[[], float | None]) -> None:
        """Calls ``timer`` repeatedly, at the latest after the seconds that it returns (None: no limit)."""
        self._timers.append(timer)

    def call(self, function: Callable[[], None]) -> None:
        """Runs ``function`` in the loop's thread, soon. From any thread."""
        self._calls.append(function)
        try:
            self._wake_sender.send(b"\0")
        except OSError:
            return  # the pair is full of wake-ups already, or the loop is stopped

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
        self._sockets.add(sock)
        if sock in self._selector.get_map():
            self._selector.modify(sock, events, callback)
        else:
            self._selector.register(sock, events, callback)

    def pause(self, sock: socket.socket) -> None:
        """Calls nothing for ``sock`` until the next ``watch``; it is still closed with the others."""
        if sock in self._selector.get_map():
            self._selector.unregister(sock)

    def unwatch(self, sock: socket.socket) -> None:
        self.pause(sock)
        self._sockets.discard(sock)

    def close_in_child(self) -> None:
        """Closes a forked child's copies of the sockets: else the parent's peers would not see the parent die."""
        for sock in self._sockets:
            os.close(sock.detach())

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._poll(self._run_timers())
        except BaseException as error:  # threads that wait for this one must get the error
            self._on_crash(error)
            raise
        finally:
            for sock in list(self._sockets):
                self.unwatch(sock)
                sock.close()

    def _poll(self, seconds: float | None) -> int:
        """Waits for events and runs their callbacks. Returns how many came."""
        ready = self._selector.select(seconds)
        for key, events in ready:
            # An earlier callback may have closed it, and the next socket then has its number.
            now = self._selector.get_map().get(key.fd)
            if now is not None and now.fileobj is key.fileobj:
                now.data(events)
        return len(ready)

    def _run_timers(self) -> float | None:
        """Runs the timers, and what ``call`` has added. Returns the seconds until the next timer."""
        while self._calls and not self._stopping:
            self._calls.popleft()()
        if self._stopping:
            return 0
        pauses = [timer() for timer in self._timers]
        return min((pause for pause in pauses if pause is not None), default=None)


class Connection:
    """A socket in a loop. All methods belong to the loop's thread.

    The owner sets ``on_frame(kind, payload)``, which may raise ProtocolError, and ``on_lost(error)``, which is called
    once, unless ``close`` came first: with None where the peer has closed it. Reliable frames that are sent after that
    are kept for the connection that replaces this one.
    """

    on_frame: Callable[[int, bytes], None]
    on_lost: Callable[[OSError | ProtocolError | None], None]

    def __init__(self, loop: EventLoop, sock: socket.socket, framing: Framing | None = None) -> None:
        """``framing``: None for a socket pair within this process, where both ends trust each other."""
        self.framing = framing or Framing()
        if framing is None:
            self.framing.secure(b"own", b"own")
        self.sock = sock
        self._loop = loop
        self._unsent = bytearray()
        self.received = self._announced = 0  # reliable frames from the peer, and what the peer has been sent of that
        self._unacknowledged: collections.deque[tuple[Kind, bytes]] = collections.deque()
        self._acknowledged = 0  # reliable frames before these
        self._unacknowledged_bytes = 0
        self._send_error: OSError | None = None
        self._open = True
        self._close_when_sent = False
        self._reads = 0
        sock.setblocking(False)
        loop.watch(sock, self.read)

    @property
    def is_open(self) -> bool:
        return self._open

    @property
    def unsent(self) -> int:
        """Bytes that the socket has not accepted yet. Any thread may call it."""
        return len(self._unsent)

    @property
    def unacknowledged(self) -> int:
        """Bytes of reliable frames that the peer has not acknowledged yet. Any thread may call it."""
        return self._unacknowledged_bytes

    @property
    def is_acknowledged(self) -> bool:
        """Whether the peer has acknowledged all reliable frames. Any thread may call it."""
        return not self._unacknowledged

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Sends now what the socket accepts, the rest when it accepts more: a stopped peer blocks no other."""
        if kind in RELIABLE:
            self._unacknowledged.append((kind, payload))
            self._unacknowledged_bytes += len(payload)
        self._write(kind, payload)

    def replace(self, previous: "Connection") -> None:
        """Continues ``previous``: retransmits what its peer has not acknowledged."""
        previous.close()
        self.received = self._announced = previous.received
        self._unacknowledged, self._acknowledged = previous._unacknowledged, previous._acknowledged
        self._unacknowledged_bytes = previous._unacknowledged_bytes
        for kind, payload in self._unacknowledged:
            self._write(kind, payload)

    def _write(self, kind: Kind, payload: bytes) -> None:
        if self._open and not self._close_when_sent:
            self._unsent += self.framing.frame(kind, payload)
            self._flush()

    def acknowledge(self, received: int) -> None:
        """Forgets the first ``received`` reliable frames. Raises ProtocolError: fewer have been sent."""
        if not 0 <= received - self._acknowledged <= len(self._unacknowledged):
            raise ProtocolError(f"an acknowledgement of {received} frames")
        for _ in range(received - self._acknowledged):
            self._unacknowledged_bytes -= len(self._unacknowledged.popleft()[1])
        self._acknowledged = received

    def close(self, when_sent: bool = False) -> None:
        """Closes it. ``when_sent``: first sends what is waiting; the owner still has to close it after some time."""
        if when_sent and self._unsent:
            self._close_when_sent = True
        elif self._open:
            self._open = False
            self._loop.unwatch(self.sock)
            self.sock.close()

    def read(self, events: int = 0) -> None:
        """Processes what has arrived, also without an event."""
        try:
            data = self.sock.recv(65536)
        except BlockingIOError:
            self._flush()
            return
        except OSError as error:
            self._lose(error)
            return
        if not data:
            self._lose(self._send_error)
            return
        self.process(data)
        self._flush()

    def process(self, data: bytes = b"") -> None:
        """Processes the frames in ``data``, and those that came with the handshake's end: no event follows for them."""
        if self._close_when_sent:
            return  # what a refused client sends is discarded
        self.framing.feed(data)
        self._reads += 1
        try:
            while self._open and not self._close_when_sent and (frame := self.framing.next_frame()):
                self._take(*frame)
            if self.received != self._announced:
                self._announced = self.received
                self._write(Kind.RECEIVED, RECEIVED.pack(self.received))
            if self._reads > MAX_UNAUTHENTICATED_READS and not self.framing.is_secure:
                raise ProtocolError(f"its greeting in more than {MAX_UNAUTHENTICATED_READS} pieces")
        except ProtocolError as error:
            self._lose(error)

    def _take(self, kind: int, payload: bytes) -> None:
        if kind == Kind.RECEIVED and self.framing.is_secure:
            if len(payload) != RECEIVED.size:
                raise ProtocolError("a malformed acknowledgement")
            self.acknowledge(*RECEIVED.unpack(payload))
            return
        self.received += kind in RELIABLE
        self.on_frame(kind, payload)

    def _lose(self, error: OSError | ProtocolError | None) -> None:
        if self._open:
            self.close()
            self.on_lost(error)

    def _flush(self) -> None:
        if not self._open:
            return
        try:
            while self._unsent:
                del self._unsent[: self.sock.send(bytes(self._unsent[:65536]))]
        except BlockingIOError:
            self._loop.watch(self.sock, self.read, write=True)
            return
        except OSError as error:
            # Not lost here: what the peer sent before it went away is still to be read, and reading ends in _lose.
            self._unsent.clear()
            # The kernel gives an error to one call only. After this one the peer has closed the connection in order.
            if not isinstance(error, BrokenPipeError):
                self._send_error = error
            if self._close_when_sent:
                self.close()
            return
        if self._close_when_sent:
            self.close()
        else:
            self._loop.watch(self.sock, self.read)
