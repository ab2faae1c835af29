"""The log of the Python code: MLXDIST_DEBUG, MLXDIST_DEBUG_FILE. docs/debugging.md is for users.

The engine has its own writer (native/transport/debug.h), with the same levels, subsystems and format: the lines of both
may go to the same file. A line looks like this:

    12:34:56.789012 mlxdist rank 1 pid 4711 warn rendezvous: rank 0 (a, pid 4242) is connected again, after 45 s
"""

import contextlib
import os
import re
import sys
import time

from .environment import DEBUG_LEVELS, Environment
from .private_files import open_private

__all__ = ["file_of", "info", "open_output", "trace", "warn"]

_WARN, _INFO, _TRACE = (DEBUG_LEVELS.index(level) for level in ("warn", "info", "trace"))


class _Output:
    """The destination of this process's log lines, and the level and subsystems that are selected."""

    def __init__(self) -> None:
        self.level = _WARN
        self.subsystems: frozenset[str] = frozenset()  # empty: all
        self.rank = "-"
        self.descriptor: int | None = None  # None: stderr

    def write(self, level: int, subsystem: str, text: str) -> None:
        # Subsystems that are not selected write warnings, too: a filter for details must not hide a failure.
        if level > self.level or (level > _WARN and self.subsystems and subsystem not in self.subsystems):
            return
        now = time.time_ns()
        clock = time.strftime("%H:%M:%S", time.localtime(now // 10**9))
        who = f"{clock}.{now // 1000 % 10**6:06} mlxdist rank {self.rank} pid {os.getpid()}"
        line = f"{who} {DEBUG_LEVELS[level]} {subsystem}: {text}\n".encode(errors="replace")
        with contextlib.suppress(OSError):  # a full disk is no reason to fail
            if self.descriptor is None:
                sys.stderr.flush()
            # One write per line, so that lines of processes that share the file do not mix.
            os.write(2 if self.descriptor is None else self.descriptor, line)


_output = _Output()


def open_output(environment: Environment) -> int:
    """Applies the variables of ``environment`` to the log. Returns the descriptor of its file, or -1 without one.

    Raises:
        OSError: the file cannot be written.
    """
    level, _, subsystems = (environment.debug or "warn").partition(":")
    _output.level = DEBUG_LEVELS.index(level)
    _output.subsystems = frozenset(subsystems.split(",")) if subsystems else frozenset()
    _output.rank = str(environment.rank)
    if _output.descriptor is not None:
        os.close(_output.descriptor)
        _output.descriptor = None
    path = file_of(environment)
    if path:
        _output.descriptor = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    return -1 if _output.descriptor is None else _output.descriptor


def file_of(environment: Environment) -> str:
    """The file that MLXDIST_DEBUG_FILE means for this process; "" for stderr."""
    path = environment.debug_file or ""
    host = environment.host_name.partition(".")[0]
    values = {"h": host, "p": str(os.getpid()), "r": str(environment.rank), "%": "%"}
    return re.sub("%(.)", lambda match: values[match[1]], path)


def warn(subsystem: str, text: str) -> None:
    _output.write(_WARN, subsystem, text)


def info(subsystem: str, text: str) -> None:
    _output.write(_INFO, subsystem, text)


def trace(subsystem: str, text: str) -> None:
    _output.write(_TRACE, subsystem, text)
