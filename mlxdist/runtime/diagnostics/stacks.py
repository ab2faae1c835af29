"""The Python stacks of a rank's threads, for `mlxdist dump`.

A rank reads its own, by `current_stacks`. In a call that holds the GIL it cannot: for that, faulthandler writes them
to a file of the rank in C when SIGUSR2 comes, and `read_stack_file` reads what it has written.
"""

import faulthandler
import re
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import FrameType

from mlxdist.base.validation import list_of, map_of, text

from ..internal_thread import InternalThread

__all__ = [
    "MAX_THREADS",
    "STACKS",
    "StackFile",
    "Stacks",
    "current_stacks",
    "program_frames",
    "program_stacks",
    "read_stack_file",
]

Stacks = dict[str, tuple[str, ...]]  # by thread: "train.py:88 step", the most recent call first

MAX_THREADS = 64
MAX_FRAMES = 100  # as many as faulthandler writes of a thread
_MAX_FILE_BYTES = 1 << 20
STACKS = map_of(list_of(text(4096), MAX_FRAMES), MAX_THREADS)

_THREAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[.*\])? \(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_OF_THREADING = re.compile(r".*/threading\.py:\d+ [\w.]+")
_INTERNAL = re.compile(r".*/mlxdist/runtime/.*")
_HANDLER = re.compile(r".*/mlxdist/runtime/signals\.py:\d+ _do_nothing")  # of SIGUSR2


def program_frames() -> dict[str, FrameType]:
    """Returns the frame of each thread of the program, by its name, the main thread first; none of mlxdist's own."""
    frames, main = sys._current_frames(), threading.main_thread()
    found: dict[str, FrameType] = {}
    for thread in sorted(threading.enumerate(), key=lambda thread: thread is not main):
        if thread.ident in frames and not isinstance(thread, InternalThread):
            name = thread.name if thread.name not in found else f"{thread.name} {thread.ident}"
            found[name] = frames[thread.ident]
    return dict(islice(found.items(), MAX_THREADS))


def current_stacks() -> Stacks:
    """The stacks of the program's threads, by their names, the main thread first."""
    return {name: _without_handler(islice(_calls(frame), MAX_FRAMES)) for name, frame in program_frames().items()}


def _calls(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back


class StackFile:
    """Has the stacks of all threads written to ``path`` when SIGUSR2 comes, also while one of them holds the GIL.

    The handler of SIGUSR2 that is installed is called after that.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab")  # appends: who reads it empties it first
        faulthandler.register(signal.SIGUSR2, self._file, all_threads=True, chain=True)

    def close(self) -> None:
        faulthandler.unregister(signal.SIGUSR2)
        self._file.close()
        self._path.unlink(missing_ok=True)


def read_stack_file(path: Path) -> Stacks:
    """The stacks of the program's threads that `StackFile` has written, "MainThread" first; empty where it has not.

    faulthandler knows no names, so other threads are named by their number.
    """
    try:
        with path.open("rb") as file:
            lines = file.read(_MAX_FILE_BYTES).decode(errors="replace").splitlines()
    except OSError:  # the rank has ended, or never had one
        return {}
    found: dict[str, list[str]] = {}
    calls: list[str] = []
    for line in lines:
        if thread := _THREAD.fullmatch(line):
            calls = found[thread[1]] = []
        elif frame := _FRAME.fullmatch(line):
            calls.append(f"{frame[1]}:{frame[2]} {frame[3]}")
    # Only the main thread begins with the code of a module.
    main = next((number for number, calls in found.items() if calls and calls[-1].endswith(" <module>")), None)
    return program_stacks({"MainThread" if number == main else number: calls for number, calls in found.items()})


def program_stacks(found: Mapping[str, Sequence[str]]) -> Stacks:
    """Selects the stacks of the program's threads from all of a process, by thread: "MainThread" first."""
    of_program = {name: calls for name, calls in found.items() if calls and not _is_internal(calls)}
    ordered = sorted(of_program.items(), key=lambda item: item[0] != "MainThread")
    return {name: _without_handler(calls[:MAX_FRAMES]) for name, calls in ordered[:MAX_THREADS]}


def _is_internal(calls: Sequence[str]) -> bool:
    """Whether mlxdist has started the thread."""
    first = next((call for call in reversed(calls) if not _OF_THREADING.fullmatch(call)), "")
    return bool(_INTERNAL.fullmatch(first))


def _without_handler(calls: Iterable[str]) -> tuple[str, ...]:
    """The stack as it was when the signal came."""
    return tuple(call for call in calls if not _HANDLER.fullmatch(call))
