"""Asks other hosts: one connection to each, and functions of answers.py called through it.

A call is a line of JSON, and so is what comes back. Nothing is unpickled, and only functions that answers.py lists can
be called.
"""

import contextlib
import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mlxdist.base.errors import ResourceError

from .rpc_server import GREETING, MAX_LINE
from .ssh import SshConfig, cannot_run, why_lost

__all__ = ["CallError", "Connections", "unpack_answer"]

_MAX_NOISE = 1 << 16  # what the start files of a shell may print before the greeting
_READ_BYTES = 1 << 16
_CONNECT_SECONDS = 30.0  # longer than ssh takes to give up
_LEAVE_SECONDS = 2.0


class CallError(ResourceError):
    """A host could not be asked, or its answer is an error. ``name``: the host; ``connected``: whether it answers."""

    def __init__(self, name: str, text: str, connected: bool) -> None:
        super().__init__(text)
        self.name = name
        self.connected = connected


class Connections:
    """To several hosts at once. A context manager: on leaving it, nothing that was started there is left."""

    def __init__(self, names: Sequence[str], ssh_config: SshConfig = SshConfig()) -> None:
        self.names = list(names)
        self._hosts = [_Connection(name, ssh_config) for name in names]
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
        """Calls a function on all hosts at once. For each, in their order: its result, or a CallError (not raised).

        Args:
            function: a name in the table of answers.py.
            arguments: keyword arguments, which must be JSON: the same for all hosts, or a sequence with one per host.
            seconds: how long each host has.
        """
        each = [arguments] * len(self._hosts) if isinstance(arguments, Mapping) else arguments
        return list(self._threads.map(lambda pair: pair[0].ask(function, pair[1], seconds), zip(self._hosts, each)))


def unpack_answer(line: bytes) -> dict[str, Any]:
    """{"result": ...} or {"error": text}. Raises ValueError: it is neither."""
    try:
        answer = json.loads(line)
    except RecursionError:
        answer = None
    if not isinstance(answer, dict) or not ("result" in answer or isinstance(answer.get("error"), str)):
        raise ValueError(f"no answer: {line[:80]!r}")
    return answer


class _Connection:
    def __init__(self, name: str, ssh_config: SshConfig) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile()
        self._held = b"\n"
        self._greeted = False
        self._lost: str | None = None
        try:
            self._process = subprocess.Popen(
                ssh_config.module(name, "mlxdist.cluster.ssh.rpc_server"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            self._process = None
            self._lost = cannot_run(name, error)

    def ask(self, function: str, arguments: Mapping[str, Any], seconds: float) -> Any:
        """The result, or a CallError. Once an answer is missing, the connection is of no use any more."""
        if self._lost is None:
            try:
                return self._exchange({"call": function, "arguments": dict(arguments)}, seconds)
            except EOFError:
                self._lost = self._why_lost()
            except TimeoutError as late:
                self._lost = f"{self.name} {late}"
            except ValueError as error:
                self._lost = f"what {self.name} sends is not understood: {error}"
            self._process.kill()
        return CallError(self.name, self._lost, False)

    def close(self) -> None:
        if self._process is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            try:
                self._process.wait(_LEAVE_SECONDS if self._lost is None else 0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process.stdout.close()
        self._errors.close()

    def _exchange(self, message: dict[str, Any], seconds: float) -> Any:
        if not self._greeted:
            self._until(GREETING, time.monotonic() + _CONNECT_SECONDS, _MAX_NOISE, f"within {_CONNECT_SECONDS:g} s")
            self._greeted = True
        view = memoryview(json.dumps(message).encode() + b"\n")
        with contextlib.suppress(BrokenPipeError):  # what it has said before it left is read first
            while view:
                view = view[os.write(self._process.stdin.fileno(), view) :]
        line = self._until(b"\n", time.monotonic() + seconds, MAX_LINE, f"{message['call']} within {seconds:g} s")
        answer = unpack_answer(line)
        return CallError(self.name, answer["error"], True) if "error" in answer else answer["result"]

    def _until(self, end: bytes, deadline: float, most: int, what: str) -> bytes:
        """What comes before ``end``; what follows it is kept."""
        while end not in self._held:
            if len(self._held) > most:
                raise ValueError(f"more than {most} bytes without an end, beginning with {self._held[:80]!r}")
            if not select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"does not answer {what}")
            data = os.read(self._process.stdout.fileno(), _READ_BYTES)
            if not data:
                raise EOFError
            self._held += data
        found, _, self._held = self._held.partition(end)
        return found

    def _why_lost(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        lines = (self._errors.read() + b"\n" + (b"" if self._greeted else self._held)).decode(errors="replace")
        words = next((line.strip() for line in reversed(lines.splitlines()) if line.strip()), "")
        return why_lost(self.name, self._greeted, words)
