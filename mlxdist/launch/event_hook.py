"""Passes events of a job on to a command or a web hook: `mlxdist launch --on-event`, `mlxdist watch --on-event`."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from mlxdist.base.errors import InvalidArgument

__all__ = ["Event", "EventHook"]

# Seconds for one event: a command that takes longer is ended, with what it has started.
HOOK_SECONDS = 10.0
_CLOSE_SECONDS = 15.0  # for those that are left when the job has ended
_MAX_ERROR = 500  # characters of what a command has printed


@dataclass(frozen=True)
class Event:
    """Something that has happened to a job.

    Attributes:
        event: "started", "failed", "shrunk", "grown", "stalled", "interrupted", "ended", or what `mlxdist watch` has
            found.
        job: the full name of the job.
        text: a sentence.
        over: whether it ends what an event of the same name, rank and host began.
        rank: the rank that it is about, if it is about one.
        host: the host that it is about, if it is about one.
        restart: how often the job had been started again, where the launcher says it.
        status: the exit status of the job, where it has one.
        time: seconds since 1970.
    """

    event: str
    job: str
    text: str
    over: bool = False
    rank: int | None = None
    host: str = ""
    restart: int | None = None
    status: int | None = None
    time: float = field(default_factory=time.time)


class EventHook:
    """Passes events on, one after the other, in a thread: what it calls delays no job. A context manager, whose exit
    waits for the last ones.

    Args:
        target: a URL that begins with http:// or https:// and gets each event as JSON (POST); or a command of the
            shell, which gets it on its standard input.
        say: called with a sentence where that fails; any thread calls it.

    Raises:
        InvalidArgument: the target is empty, or no URL in spite of its beginning.
    """

    def __init__(self, target: str, say: Callable[[str], None]) -> None:
        _check(target)
        self._target, self._say = target, say
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mlxdist events", daemon=True)
        self._thread.start()

    def __enter__(self) -> EventHook:
        return self

    def __exit__(self, *exception: object) -> None:
        self._events.put(None)
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            self._say(f"--on-event: not all events were passed on in {_CLOSE_SECONDS:g} s after the end")

    def send(self, event: Event) -> None:
        self._events.put(event)

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            data = json.dumps(asdict(event)).encode()
            problem = _post(self._target, data) if _is_url(self._target) else _run(self._target, data)
            if problem:
                self._say(f"--on-event {self._target}: {problem}, on {event.event!r}")


def _is_url(target: str) -> bool:
    return target.startswith(("http://", "https://"))


def _check(target: str) -> None:
    if not target.strip():
        raise InvalidArgument("--on-event is empty; give a command, or a URL")
    if _is_url(target):
        from urllib.parse import urlsplit

        try:
            if not urlsplit(target).hostname:
                raise ValueError("it names no host")
        except ValueError as error:
            raise InvalidArgument(f"--on-event {target!r:.200}: {error}") from None


def _post(url: str, data: bytes) -> str:
    """Sends the event. Returns what has failed, or nothing."""
    import urllib.error
    import urllib.request

    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=HOOK_SECONDS):
            return ""
    except urllib.error.HTTPError as error:
        return f"it has responded {error.code}"
    except OSError as error:
        return str(getattr(error, "reason", error))


def _run(command: str, data: bytes) -> str:
    """Runs the command. Returns what has failed, or nothing."""
    pipe = subprocess.PIPE
    # A session of its own: a Ctrl-C that ends the job does not end what says so.
    with subprocess.Popen(
        command, shell=True, stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe, start_new_session=True
    ) as process:
        try:
            _, errors = process.communicate(data, HOOK_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return f"it was ended after {HOOK_SECONDS:g} s"
    if process.returncode == 0:
        return ""
    printed = errors.decode(errors="replace").strip()[-_MAX_ERROR:]
    return f"it has ended with status {process.returncode}" + (f" ({printed})" if printed else "")
