"""The client's end of a connection to a server process on a host; protocol.py says what passes over it."""

import contextlib
import os
import select
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable

from mlxdist.base.errors import ResourceError

from .protocol import Frames, after_greeting
from .ssh import SshConfig, cannot_run, why_lost

__all__ = ["CONNECT_SECONDS", "Connection"]

CONNECT_SECONDS = 30.0  # until the greeting: longer than ssh takes to give up
_READ_BYTES = 1 << 16
_KEPT_LINES = 20
# A process that ssh leaves behind (ControlPersist) holds the standard error open.
_ERRORS_SECONDS = 1.0


class Connection:
    """A connection to one host. Starts the server there by ssh, or directly where the host is this machine.

    ``on_error``: called with each line of the server's standard error after its greeting, in another thread.
    """

    def __init__(self, name: str, ssh_config: SshConfig, on_error: Callable[[str], None] | None = None) -> None:
        """Starts the server. Raises ResourceError: the command that leads to the host cannot be run."""
        self.name = name
        self.greeted = False
        self._on_error = on_error
        self._noise = b"\n"
        self._frames = Frames()
        self._last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._sending = threading.Lock()
        pipe = subprocess.PIPE
        command = ssh_config.server(name)
        try:  # in a session of its own: Ctrl-C is the caller's
            # Unbuffered, because `receive` polls the descriptor, and a poll does not see bytes in Python's own buffer.
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True
            )
        except OSError as error:
            raise ResourceError(cannot_run(name, error)) from None
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._stdin, self._stdout, self._stderr = self._process.stdin, self._process.stdout, self._process.stderr
        self._errors = threading.Thread(target=self._read_errors, name=f"mlxdist {name} errors", daemon=True)
        self._errors.start()

    def send(self, data: bytes) -> None:
        """Waits until the connection has taken all of ``data``. Only `receive` detects the end of a connection."""
        with self._sending, contextlib.suppress(BrokenPipeError, ValueError):
            view = memoryview(data)
            while view:
                view = view[self._stdin.write(view) :]

    def try_send(self, data: bytes) -> None:
        """Sends a short frame where nothing else is under way and the connection takes it at once."""
        if not self._sending.acquire(blocking=False):
            return
        try:
            # A pipe that is ready takes PIPE_BUF bytes at once, more than a short frame has: this write cannot block.
            if _is_ready(self._stdin.fileno(), select.POLLOUT, 0):
                self._stdin.write(data)
        except (BrokenPipeError, ValueError):
            return
        finally:
            self._sending.release()

    def receive(self, deadline: float | None = None) -> list[tuple[int, int, bytes]]:
        """The frames that one read completes: kind, number, payload.

        Raises:
            EOFError: the connection has ended; see `why_lost`.
            TimeoutError: nothing arrived until ``deadline``, of time.monotonic().
            FrameError: what arrived is no frame.
        """
        source = self._stdout.fileno()
        if deadline is not None and not _is_ready(source, select.POLLIN, deadline - time.monotonic()):
            raise TimeoutError
        data: bytes | None = os.read(source, _READ_BYTES)
        if not data:
            raise EOFError
        if not self.greeted:
            self._noise += data
            data = after_greeting(self._noise)
            if data is None:
                return []
            self.greeted = True
        return list(self._frames.feed(data))

    def why_lost(self) -> str:
        """The reason for the end of the connection, in words. Waits for the process to exit."""
        self._process.wait()
        self._errors.join(_ERRORS_SECONDS)
        lines = [*self._last_lines, *([] if self.greeted else self._noise.decode(errors="replace").splitlines())]
        words = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return why_lost(self.name, self.greeted, words)

    def kill(self) -> None:
        self._process.kill()

    def close(self, seconds: float, reader: threading.Thread | None = None) -> None:
        """Waits up to ``seconds`` until the server exits, then kills it.

        ``reader``: the thread that receives, if there is one.
        """
        with contextlib.suppress(BrokenPipeError):  # it has left already
            self._stdin.close()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if reader is not None:
            reader.join()
        self._errors.join(_ERRORS_SECONDS)
        self._stdout.close()
        if not self._errors.is_alive():
            self._stderr.close()

    def _read_errors(self) -> None:
        for line in self._stderr:
            text = line.decode(errors="replace").rstrip()
            self._last_lines.append(text)
            if self.greeted and self._on_error is not None:
                self._on_error(text)


def _is_ready(descriptor: int, event: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(1000 * max(0.0, seconds)))
