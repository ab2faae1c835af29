"""The Python stacks of processes that do not write them themselves, by py-spy, where it is installed and permitted.

Such a process is stopped, has not come to `mlxdist.init()`, or handles SIGUSR2 itself. py-spy reads its memory from
outside; it does not stop it here, since it would let a process run on that something else has stopped. A stack that
changes while it is read is none, so it tries again.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxdist.base.json_reader import parse_json
from mlxdist.base.validation import as_text, checked, list_of, number, object_of, or_null, printable, text
from mlxdist.runtime.diagnostics.stacks import Stacks, program_stacks

__all__ = ["stacks_by_py_spy"]

_SECONDS = 5.0
_ATTEMPTS = 5
_MAX_PROCESSES = 16  # of a rank, such as a shell and the program that it has started


def stacks_by_py_spy(sessions: Mapping[int, int]) -> tuple[dict[int, Stacks], str]:
    """Reads the stacks of ranks.

    Args:
        sessions: of each rank the process that the launcher has started, which leads a session.

    Returns:
        The stacks of those ranks whose could be read, and why others could not, or "".
    """
    if not sessions:
        return {}, ""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    command = shutil.which("py-spy", path=places)
    if command is None:
        return {}, "py-spy, which would show their stacks, is not installed here: pip install py-spy"
    found: dict[int, Stacks] = {}
    problems: dict[str, None] = {}
    for rank, session in sessions.items():
        for pid in _processes(session):
            threads, problem = _read(command, pid)
            if threads:
                found[rank] = threads
                break
            problems[problem] = None
    missing = sessions.keys() - found.keys()
    return found, f"py-spy: {next(iter(problems))}" if missing and problems else ""


def _read(command: str, pid: int) -> tuple[Stacks, str]:
    problem = ""
    for _ in range(_ATTEMPTS):
        try:
            words = [command, "dump", "--json", "--nonblocking", "--pid", str(pid)]
            read = subprocess.run(words, capture_output=True, stdin=subprocess.DEVNULL, timeout=_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            return {}, printable(str(error))[:200]
        with contextlib.suppress(ValueError):
            return _stacks(parse_json(read.stdout)), "it has found no thread"
        lines = read.stderr.decode(errors="replace").strip().splitlines() or ["it has shown nothing"]
        problem = printable(lines[0])[:200]
        if "ermission" in problem or "No such" in problem:
            break
    return {}, problem


@dataclass(frozen=True)
class _Call:
    """A call, as py-spy has it; there are other fields."""

    filename: str = checked(text(4096))
    line: int = checked(number(0, 2**31 - 1))
    name: str = checked(text(4096))


_THREADS = list_of(
    object_of({"thread_name": or_null(text()), "thread_id": as_text, "frames": list_of(object_of(_Call), 1 << 16)}),
    1 << 12,
)


def _stacks(value: Any) -> Stacks:
    """Raises ValueError: it is not what py-spy writes."""
    threads = {each["thread_name"] or each["thread_id"]: each["frames"] for each in _THREADS("threads", value)}
    calls = {name: [f"{c.filename}:{c.line} {c.name}" for c in frames] for name, frames in threads.items()}
    return program_stacks(calls)


def _processes(session: int) -> Iterable[int]:
    """The processes of a session, its leader first: a shell may have started the program."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,sess="], capture_output=True, text=True, timeout=_SECONDS).stdout
    rows = [line.split() for line in listed.splitlines()]
    others = [int(row[0]) for row in rows if len(row) == 2 and row[1] == str(session) and row[0] != row[1]]
    return [session, *others][:_MAX_PROCESSES]
