"""The files of `mlxdist launch --log-dir`: their names, and their lines, in bounded memory."""

import os
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mlxdist.base.errors import InvalidArgument
from mlxdist.base.validation import printable

from .terminal import as_shown

__all__ = ["LogFile", "find_logs", "log_name"]

_STREAMS = {1: "out", 2: "err"}
_NAME = re.compile(r"rank-(\d+|mpi)\.(out|err)")
_BLOCK = 1 << 16
_MAX_LINE = 4096  # bytes of a line that are shown


@dataclass(frozen=True)
class LogFile:
    """A file with what a rank has printed. ``rank``: its number, or "mpi"; ``stream``: "out" or "err"."""

    path: Path
    rank: str
    stream: str

    def lines(self, last: int | None = None, pattern: re.Pattern[str] | None = None) -> Iterator[str]:
        """The lines that have a match of ``pattern``, or of these only the ``last`` ones, as they would be shown on a
        terminal: of a progress bar the last update, without colors. A long line is cut."""
        with open(self.path, "rb") as file:
            end = file.seek(0, os.SEEK_END)  # a job that runs prints more meanwhile
            begin = _begin_of_last(file, end, last) if last is not None and pattern is None else 0
            lines = map(_cleaned, _lines(file, begin, end))
            found = lines if pattern is None else filter(pattern.search, lines)
            yield from found if last is None else deque(found, maxlen=last)


def log_name(rank: str, number: int) -> str:
    """The name of the file for a stream of a rank. ``number``: the stream's descriptor, 1 or 2."""
    return f"rank-{rank}.{_STREAMS[number]}"


def find_logs(directory: Path) -> list[LogFile]:
    """The files in ``directory``, in the order of the ranks. Raises InvalidArgument: there are none."""
    found = [
        LogFile(path, match[1], match[2])
        for path in directory.iterdir()
        if (match := _NAME.fullmatch(path.name)) and path.is_file()
    ]
    if not found:
        raise InvalidArgument(f"{directory} has no files of `mlxdist launch --log-dir`, such as {log_name('0', 1)}")
    order = list(_STREAMS.values())
    return sorted(
        found, key=lambda log: (log.rank == "mpi", int(log.rank) if log.rank != "mpi" else 0, order.index(log.stream))
    )


def _begin_of_last(file: BinaryIO, end: int, count: int) -> int:
    """The position at which the last ``count`` lines before ``end`` begin, found from behind."""
    position = end
    while position > 0:
        block_begin = max(0, position - _BLOCK)
        file.seek(block_begin)
        block = file.read(position - block_begin)
        at = len(block) - (position == end and block.endswith(b"\n"))  # which ends the last line
        while (at := block.rfind(b"\n", 0, at)) >= 0:
            count -= 1
            if count == 0:
                return block_begin + at + 1
        position = block_begin
    return 0


def _lines(file: BinaryIO, position: int, end: int) -> Iterator[bytes]:
    file.seek(position)
    held = b""
    while position < end and (block := file.read(min(_BLOCK, end - position))):
        position += len(block)
        *complete, rest = (held + block).split(b"\n")
        yield from complete
        # Of a progress bar the last update; a final carriage return may be half of a line's end.
        held = rest[rest.rfind(b"\r", 0, -1) + 1 :][: _MAX_LINE + 1]
    if held:
        yield held


def _cleaned(line: bytes) -> str:
    text = printable(as_shown(line).expandtabs())
    return text if len(text) <= _MAX_LINE else f"{text[:_MAX_LINE]}..."
