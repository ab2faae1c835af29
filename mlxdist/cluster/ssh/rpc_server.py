"""The server's end of a connection: a process that ssh starts on a host, which calls functions of a table.

The table comes from above, from the command `mlxdist rpc-server`, and nothing else is ever called. Whatever a
function does must be harmless, or what the user of the client has the right to do on this host anyway: ssh has let that
user in.
"""

import importlib
import os
import platform
import queue
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mlxdist.base.host_identity import host_identity
from mlxdist.version import __version__

from .protocol import GREETING, FrameError, Frames, Kind, pack_json, unpack_json

__all__ = ["claim_streams", "respond", "serve", "who"]

_READ_BYTES = 1 << 16
# Seconds until the first call. A client whose machine is gone sends nothing, and ssh does not detect that on the
# server's side: without a limit this process would wait for good.
_FIRST_CALL_SECONDS = 120.0


def who() -> dict[str, Any]:
    """The identity of this host, for clients that compare hosts."""
    return {
        "host": socket.gethostname(),
        "identity": host_identity(),
        "system": sys.platform,
        "python": platform.python_version(),
        "mlxdist": __version__,
        # The client's address and port of this connection, and the server's.
        "ssh": os.environ.get("SSH_CONNECTION", "").split(),
    }


def serve(functions: Mapping[str, str], streaming: Mapping[str, str]) -> None:
    """Serves one client over the standard streams, until it ends the connection.

    Args:
        functions: names for the client, each with "module:function", which is imported at its first call. The function
            takes keyword arguments and returns a value that JSON can express.
        streaming: the same for calls with streams, which must be the first of their connection. The function takes the
            two descriptors of the connection, the `Frames` read so far, and the call's arguments.
    """
    source, target = claim_streams()
    _write(target, GREETING + pack_json(Kind.HELLO, who()))
    frames = Frames()
    received = _calls(source, frames)
    if (first := next(received, None)) is None:
        return
    call = unpack_json(first)
    if call.get("call") in streaming:
        _find(call["call"], streaming)(source, target, frames, call["arguments"])
        return
    calls: queue.Queue[bytes | None] = queue.Queue()
    calls.put(first)
    busy = threading.Event()
    threading.Thread(target=_read, args=(received, calls, busy), daemon=True).start()
    while (payload := calls.get()) is not None:
        busy.set()
        response = respond(payload, functions)
        busy.clear()
        _write(target, response)


def claim_streams() -> tuple[int, int]:
    """Returns two descriptors of the connection, to read and to write, that only the caller can use.

    Afterwards, what other code in this process prints to standard output goes to standard error.
    """
    target = os.dup(1)
    os.dup2(2, 1)
    source = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return source, target


def respond(payload: bytes, functions: Mapping[str, str]) -> bytes:
    """The frame that responds to a call: its result, or any error that it raises."""
    try:
        call = unpack_json(payload)
        function = _find(call["call"], functions)
        return pack_json(Kind.RESULT, {"result": function(**call["arguments"])})
    except Exception as error:  # the client reports it, whatever it is
        return pack_json(Kind.ERROR, {"error": str(error) or type(error).__name__})


def _find(name: str, functions: Mapping[str, str]) -> Callable[..., Any]:
    if name not in functions:
        raise ValueError(f"there is no call {name!r:.80} in this version of mlxdist")
    module, function = functions[name].split(":")
    return getattr(importlib.import_module(module), function)


def _calls(source: int, frames: Frames) -> Iterator[bytes]:
    """Yields the payloads of calls until the connection ends; none if the first one misses its time limit."""
    poll = select.poll()
    poll.register(source, select.POLLIN)
    milliseconds: float | None = 1000 * _FIRST_CALL_SECONDS
    while poll.poll(milliseconds) and (data := os.read(source, _READ_BYTES)):
        for kind, _, payload in frames.feed(data):
            if kind != Kind.CALL:
                raise FrameError(f"a frame of kind {kind} is no call")
            milliseconds = None
            yield payload


def _read(received: Iterator[bytes], calls: "queue.Queue[bytes | None]", busy: threading.Event) -> None:
    """Queues calls until the connection ends, then ends the process if a function is still running."""
    try:
        for payload in received:
            calls.put(payload)
    finally:
        if busy.is_set():
            # Not sys.exit: the function runs in the main thread, which no other thread can interrupt.
            os._exit(1)
        calls.put(None)


def _write(target: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]
