"""Plain calls to several hosts at once: one connection to each, and functions of the server's table called over it."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mlxdist.base.errors import ResourceError
from mlxdist.base.validation import Check, printable

from .connection import CONNECT_SECONDS, Connection
from .protocol import FrameError, Kind, pack_json, unpack_json
from .ssh import SshConfig

__all__ = ["CallError", "Connections", "checked_call", "unpack_response"]

_LEAVE_SECONDS = 2.0


class CallError(ResourceError):
    """A call failed, or a host did not respond. ``name``: the host; ``connected``: whether the server there runs."""

    def __init__(self, name: str, text: str, connected: bool) -> None:
        super().__init__(text)
        self.name = name
        self.connected = connected


class Connections:
    """Connections to several hosts at once. A context manager: its exit ends everything that was started there."""

    def __init__(self, names: Sequence[str], ssh_config: SshConfig = SshConfig()) -> None:
        self.names = list(names)
        self._hosts = [_Host(name, ssh_config) for name in names]
        self._threads = ThreadPoolExecutor(max(1, len(names)))

    def __enter__(self) -> "Connections":
        return self

    def __exit__(self, *exception: object) -> None:
        for host in self._hosts:
            host.close()
        self._threads.shutdown()

    def call(
        self, function: str, arguments: Mapping[str, Any] | Sequence[Mapping[str, Any]] = {}, seconds: float = 30.0
    ) -> list[Any]:
        """Calls a function on all hosts at once. Returns, in host order, each result, or a CallError (not raised).

        Args:
            function: a name in the server's table.
            arguments: keyword arguments, which must be JSON: the same for all hosts, or a sequence with one per host.
            seconds: how long each host has.
        """
        each = [arguments] * len(self._hosts) if isinstance(arguments, Mapping) else arguments
        return list(self._threads.map(lambda pair: pair[0].call(function, pair[1], seconds), zip(self._hosts, each)))


def checked_call(connections: Connections, check: Check, *call: Any) -> tuple[dict[str, Any], list[str]]:
    """Calls a function on all hosts. Returns the checked results by host, and messages about the other hosts."""
    results, problems = {}, []
    for host, result in zip(connections.names, connections.call(*call)):
        try:
            if isinstance(result, CallError):
                said = printable(str(result))
                problems.append(f"{host}: {said}" if result.connected else said)  # which names the host itself
            else:
                results[host] = check(host, result)
        except ValueError as error:
            problems.append(f"{host}: {error}")
    return results, problems


def unpack_response(kind: int, payload: bytes) -> Any:
    """The result of a call, from the frame of its response.

    Raises:
        FrameError: the frame is no response.
        CallError: the function raised an error, with that text. The name of the host is not set yet.
    """
    fields = unpack_json(payload)
    if kind == Kind.RESULT and "result" in fields:
        return fields["result"]
    if kind == Kind.ERROR and isinstance(fields.get("error"), str):
        raise CallError("", fields["error"], True)
    raise FrameError(f"no response: {payload[:80]!r}")


class _Host:
    def __init__(self, name: str, ssh_config: SshConfig) -> None:
        self._name = name
        self._connection: Connection | None = None
        self._lost = ""
        try:
            self._connection = Connection(name, ssh_config)
        except ResourceError as error:
            self._lost = str(error)

    def call(self, function: str, arguments: Mapping[str, Any], seconds: float) -> Any:
        """Returns the result, or a CallError. After a response that did not come, the connection is unusable."""
        connection = self._connection
        if connection is not None and not self._lost:
            try:
                return _exchange(connection, function, arguments, seconds)
            except CallError as error:
                return CallError(self._name, str(error), True)
            except EOFError:
                self._lost = connection.why_lost()
            except TimeoutError as late:
                self._lost = f"{self._name} {late}"
            except FrameError as error:
                self._lost = f"what {self._name} sends is not understood: {error}"
            connection.kill()
        return CallError(self._name, self._lost, False)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close(0 if self._lost else _LEAVE_SECONDS)


def _exchange(connection: Connection, function: str, arguments: Mapping[str, Any], seconds: float) -> Any:
    deadline = time.monotonic() + CONNECT_SECONDS
    while not connection.greeted:
        _receive(connection, deadline, f"within {CONNECT_SECONDS:g} s")
    connection.send(pack_json(Kind.CALL, {"call": function, "arguments": dict(arguments)}))
    deadline = time.monotonic() + seconds
    while True:
        for kind, _, payload in _receive(connection, deadline, f"{function} within {seconds:g} s"):
            if kind != Kind.HELLO:
                return unpack_response(kind, payload)


def _receive(connection: Connection, deadline: float, what: str) -> list[tuple[int, int, bytes]]:
    try:
        return connection.receive(deadline)
    except TimeoutError:
        raise TimeoutError(f"does not respond to {what}") from None
