"""The far side of calls.py: `python -m mlxdist.cluster.ssh.rpc_server`, started by ssh, answers line after line.

What can be asked is in the table below, and nothing else is ever called. Whatever a function does must be harmless, or
what the user who asks has the right to do on this host anyway: ssh has let that user in.
"""

import importlib
import json
import os
import platform
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

from mlxdist.version import __version__

from .streams import claim_streams

__all__ = ["CALLS", "GREETING", "MAX_LINE", "answer", "main", "who"]

GREETING = b"\nmlxdist answers 1\n"
MAX_LINE = 64 << 20

# Imported when they are asked for. Each takes keyword arguments and returns what JSON can say.
CALLS = {
    "calibrate.machine": "mlxdist.tools.calibrate.measure:machine",
    "calibrate.measure": "mlxdist.tools.calibrate.measure:measure",
    "doctor.allocate": "mlxdist.tools.doctor.facts:allocate",
    "doctor.clock": "mlxdist.tools.doctor.facts:clock",
    "doctor.connect": "mlxdist.tools.doctor.network:connect",
    "doctor.crossing": "mlxdist.tools.doctor.gpu:crossing",
    "doctor.digest": "mlxdist.tools.doctor.files:digest",
    "doctor.facts": "mlxdist.tools.doctor.facts:read",
    "doctor.installation": "mlxdist.tools.doctor.installation:installation",
    "doctor.listen": "mlxdist.tools.doctor.network:listen",
    "doctor.model": "mlxdist.tools.doctor.files:list_model",
    "doctor.program": "mlxdist.tools.doctor.files:program",
    "doctor.rdma": "mlxdist.tools.doctor.rdma:devices",
    "dump.ask": "mlxdist.tools.observe.ask:answer",
    "dump.time": "mlxdist.tools.observe.ask:wall_ns",
    "jobs.list": "mlxdist.launch.jobs_on_hosts:list_here",
    "jobs.recorded": "mlxdist.launch.jobs:has_recordings",
    "jobs.stop": "mlxdist.launch.jobs_on_hosts:stop_here",
    "who": "mlxdist.cluster.ssh.rpc_server:who",
}


def who() -> dict[str, Any]:
    """The host that answers."""
    return {"host": socket.gethostname(), "python": platform.python_version(), "mlxdist": __version__}


def main() -> None:
    source, target = claim_streams()
    lines: queue.Queue[bytes | None] = queue.Queue()
    busy = threading.Event()
    threading.Thread(target=_read, args=(source, lines, busy), daemon=True).start()
    _write(target, GREETING)
    while (line := lines.get()) is not None:
        busy.set()
        data = json.dumps(answer(line)).encode() + b"\n"
        busy.clear()
        _write(target, data)


def answer(line: bytes) -> dict[str, Any]:
    """{"result": ...} or {"error": text}, whatever the line is."""
    try:
        message = json.loads(line)
        function = _find(message["call"])
        return {"result": function(**message["arguments"])}
    except Exception as error:  # whatever it is, who asked has to hear of it
        return {"error": str(error) or type(error).__name__}


def _find(name: str) -> Callable[..., Any]:
    if name not in CALLS:
        raise ValueError(f"there is no call {name!r:.80} in this version of mlxdist")
    module, function = CALLS[name].split(":")
    return getattr(importlib.import_module(module), function)


def _read(source: int, lines: "queue.Queue[bytes | None]", busy: threading.Event) -> None:
    """Lines, until the connection ends. Nobody waits for a function that is running then."""
    with open(source, "rb") as stream:
        while line := stream.readline(MAX_LINE):
            if not line.endswith(b"\n"):
                break
            lines.put(line)
    if busy.is_set():
        os._exit(1)
    lines.put(None)


def _write(target: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]


if __name__ == "__main__":
    main()
