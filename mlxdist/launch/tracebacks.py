"""Tracebacks of ranks that fail alike: one is shown; for the other ranks only the last line, which is the error."""

import re
from collections import Counter
from pathlib import Path

__all__ = ["TracebackFilter", "Tracebacks"]

_START = b"Traceback (most recent call last):\n"
# The first line that Python prints for a program that it cannot compile: there is no header of a traceback.
_NOT_COMPILED = re.compile(rb'  File "[^"\n]+", line \d+\n')
# Between the tracebacks of an exception and its cause.
_BETWEEN = (
    b"\n",
    b"During handling of the above exception, another exception occurred:\n",
    b"The above exception was the direct cause of the following exception:\n",
)
# A longer text is no traceback: it is shown, and not held any longer.
_MOST_LINES = 500
# The number of texts that are kept: a program that logs tracebacks in a loop may make each one different.
_MOST_KEPT = 4096
_FRAME = re.compile(rb'  File "([^"]+)", line ')
_OURS = (str(Path(__file__).parents[1]).encode() + b"/", b"/site-packages/mlxdist/")


class Tracebacks:
    """Counts tracebacks of all ranks, each as one text."""

    def __init__(self) -> None:
        self._shown: Counter[bytes] = Counter()
        self._had: Counter[tuple[int, bytes]] = Counter()

    def is_new(self, rank: int, text: bytes) -> bool:
        """Whether no other rank has printed ``text`` as often as this one has now."""
        if len(self._had) >= _MOST_KEPT:
            self._shown.clear()
            self._had.clear()
        self._had[rank, text] += 1
        if self._had[rank, text] <= self._shown[text]:
            return False
        self._shown[text] += 1
        return True


class TracebackFilter:
    """Selects the lines of a rank's standard error to show."""

    def __init__(self, rank: int, tracebacks: Tracebacks | None) -> None:
        """Filters lines of ``rank``. ``tracebacks``: None to show all tracebacks at once."""
        self._rank = rank
        self._tracebacks = tracebacks
        self._held: list[bytes] = []  # of a traceback that is not complete
        self.repeats = False  # what came last was another rank's traceback, too

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def take(self, lines: bytes) -> bytes:
        """The lines to show. ``lines``: complete ones, each with its end."""
        tracebacks = self._tracebacks
        if tracebacks is None or not (self._held or self.repeats or _START in lines or b'  File "' in lines):
            return lines  # the usual case, fast
        return b"".join(self._take_line(line, tracebacks) for line in lines.splitlines(keepends=True))

    def take_held(self) -> bytes:
        """The held lines to show, because no more lines follow."""
        held, self._held = b"".join(self._held), []
        return held

    def _take_line(self, line: bytes, tracebacks: Tracebacks) -> bytes:
        if self._held:
            self._held.append(line)
            if line.startswith(b" ") and len(self._held) < _MOST_LINES:
                return b""
            text = _without_inner_frames(self._held)
            self._held = []
            self.repeats = not tracebacks.is_new(self._rank, text)
            return line if self.repeats else text
        if line == _START or _NOT_COMPILED.fullmatch(line):
            self._held = [line]
            return b""
        self.repeats &= line in _BETWEEN
        return b"" if self.repeats else line


def _without_inner_frames(lines: list[bytes]) -> bytes:
    """The traceback without frames inside mlxdist: they mean nothing to its user, and `--log-dir` keeps them."""
    if not lines[-1].startswith(b"mlxdist."):
        return b"".join(lines)
    frames = [(place, frame[1]) for place, line in enumerate(lines) if (frame := _FRAME.match(line))]
    kept = len(lines) - 1
    for place, file in reversed(frames[1:]):
        if not any(ours in file for ours in _OURS):
            break
        kept = place
    return b"".join([*lines[:kept], lines[-1]])
