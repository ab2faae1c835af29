"""A TCP proxy between a rank and rank 0, which a test can make lose what it carries.

As a program: proxy.py HOST PORT TARGET_HOST TARGET_PORT, until it is killed.
"""

import contextlib
import selectors
import socket
import struct
import sys
import threading

__all__ = ["Proxy"]

_LINGER_0 = struct.pack("ii", 1, 0)  # closing then sends a reset
_STEP = 0.01


class Proxy:
    """Forwards connections to ``target``. A context manager: its exit resets them all."""

    def __init__(self, target, address=("127.0.0.1", 0)):
        self._target = target
        self._listener = socket.create_server(address)
        self.address = self._listener.getsockname()[:2]
        self._selector = selectors.DefaultSelector()
        self._others = {}  # each end, and the one that its bytes go to
        self._lock = threading.Lock()
        self._is_up = True
        self._ends = False
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._ends = True
        self._thread.join()
        self.reset()
        self._listener.close()
        self._selector.close()

    def stall(self):
        """Carries nothing from now on, and leaves the connections open."""
        with self._lock:
            self._is_up = False

    def reset(self):
        """Loses what it holds, and resets all connections."""
        with self._lock:
            for end in list(self._others):
                self._selector.unregister(end)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)
                end.close()
            self._others.clear()

    def resume(self):
        with self._lock:
            self._is_up = True

    def _run(self):
        while not self._ends:
            ready = self._selector.select(_STEP)
            with self._lock:
                for key, _ in ready if self._is_up else ():
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj in self._others:
                        self._forward(key.fileobj)

    def _accept(self):
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection(self._target)
        except OSError:  # it does not listen yet
            client.close()
            return
        self._others |= {client: server, server: client}
        for end in (client, server):
            self._selector.register(end, selectors.EVENT_READ)

    def _forward(self, end):
        other = self._others[end]
        with contextlib.suppress(OSError):
            if data := end.recv(65536):
                other.sendall(data)
                return
        for closed in (end, other):
            self._selector.unregister(closed)
            del self._others[closed]
            closed.close()


if __name__ == "__main__":
    with Proxy((sys.argv[3], int(sys.argv[4])), (sys.argv[1], int(sys.argv[2]))):
        print("ready", flush=True)
        threading.Event().wait()
