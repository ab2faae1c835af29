"""A Unix socket in the job's directory, where the ranks of this host ask for the next epoch: `mlxdist.Group.shrink`,
`grow`.

A rank connects, sends a line of JSON, and reads one: the variables of its new world, or why there is none. A connection
that ends before that takes the question back. Other users cannot enter the directory.

Rejected: a TCP port of the launcher, which hosts that are reached by ssh cannot always reach; and a descriptor that
ranks inherit, which wrappers such as subprocess.run close.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlxdist.base.environment import MAX_RANKS
from mlxdist.base.json_reader import parse_json
from mlxdist.base.validation import build, checked, number, one_of, text

__all__ = ["MembershipSocket", "Question"]

_MAX_BYTES = 4096  # of a question
_MAX_CONNECTIONS = 4 * MAX_RANKS
_SEND_SECONDS = 5.0  # a rank that is stopped reads nothing


@dataclass(frozen=True)
class Question:
    """A question of a member, or, with port 0, its end: the member does not wait for the answer any more.

    Attributes:
        kind: how it goes on: "shrink", "grow", or "join" for a process that is in no epoch yet.
        member: its rank at the start of the job, or that of the process whose place it takes.
        token: which process it is: another one may have had its place before.
        attempt: grows with each question of a member.
        port: where it listens for the others of the new world.
    """

    kind: str = checked(one_of(("shrink", "grow", "join")))
    member: int = checked(number(0, MAX_RANKS - 1))
    token: str = checked(text())
    epoch: int = checked(number(0, 2**31))
    attempt: int = checked(number(0, 2**63))
    port: int = checked(number(0, 65535))


class MembershipSocket:
    """Takes questions in a thread of its own. Its methods may be called from any other one.

    A file beside the socket is there while processes wait to join: for a rank to look at often.
    """

    def __init__(self, path: Path, wake: Callable[[], None]) -> None:
        """``wake()`` is called, in that thread, when `questions` has something new."""
        self._wake = wake
        self._joining = Path(f"{path}.joining")
        self._lock = threading.Lock()  # guards the two that follow
        self._new: list[Question] = []
        self._waiting: dict[socket.socket, Question] = {}
        self._received: dict[socket.socket, bytes] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(MAX_RANKS)
        self._stop, stopped = socket.socketpair()
        for source in (self._listener, stopped):
            self._selector.register(source, selectors.EVENT_READ)
        self._stopped = stopped
        self._thread = threading.Thread(target=self._run, name="mlxdist membership", daemon=True)
        self._thread.start()

    def questions(self) -> list[Question]:
        """The questions since the last call."""
        with self._lock:
            new, self._new = self._new, []
        return new

    def answer(self, member: int, fields: Mapping[str, Any]) -> None:
        """Answers the questions of a member that wait."""
        with self._lock:
            found = [connection for connection, question in self._waiting.items() if question.member == member]
            for connection in found:
                del self._waiting[connection]
        line = json.dumps(fields).encode() + b"\n"
        for connection in found:
            with contextlib.suppress(OSError):  # the rank has gone
                connection.settimeout(_SEND_SECONDS)
                connection.sendall(line)
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # its end makes the thread close it

    def show_joining(self, some: bool) -> None:
        """Shows the ranks whether processes wait to join."""
        with contextlib.suppress(OSError):  # the disk is full: they join later
            self._joining.touch() if some else self._joining.unlink(missing_ok=True)

    def close(self) -> None:
        self._stop.close()
        self._thread.join()
        for source in (self._listener, self._stopped, *self._received):
            source.close()
        self._selector.close()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._stopped:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._read(key.fileobj)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # no descriptor is left, or the rank has gone
            return
        if len(self._received) >= _MAX_CONNECTIONS:
            connection.close()
            return
        self._received[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(_MAX_BYTES)
        except OSError:
            data = b""
        held = self._received[connection] + data
        line, end, _ = held.partition(b"\n")
        with self._lock:
            is_waiting = connection in self._waiting
        if not data or len(held) > _MAX_BYTES or (end and not is_waiting and not self._take(connection, line)):
            self._drop(connection)
        else:
            self._received[connection] = held

    def _take(self, connection: socket.socket, line: bytes) -> bool:
        try:
            question = build(Question, parse_json(line))
        except ValueError:
            return False
        if question.port == 0:
            return False
        with self._lock:
            self._new.append(question)
            self._waiting[connection] = question
        self._wake()
        return True

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._received[connection]
        connection.close()
        with self._lock:
            if question := self._waiting.pop(connection, None):
                self._new.append(replace(question, port=0))
        if question:
            self._wake()
