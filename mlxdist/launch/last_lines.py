"""The last lines of a rank, kept for when it fails."""

import collections

from mlxdist.version import __version__

from . import metal_errors
from .terminal import as_shown

__all__ = ["LastLines"]

KEPT = 20
MAX_BYTES = 1000  # of a line

# The error of a rank whose Python has no mlxdist: `mlxdist launch -- /usr/bin/python3 program.py`, where uv has made an
# environment for mlxdist alone.
_OTHER_PYTHON = "ModuleNotFoundError: No module named 'mlxdist'"


class LastLines:
    """The last lines that a rank has printed on its two streams: a few, each shortened to a maximum length."""

    def __init__(self) -> None:
        self._lines: collections.deque[bytes] = collections.deque(maxlen=KEPT)
        self._unfinished: dict[int, bytes] = {}

    def take(self, target: int, data: bytes) -> None:
        pieces = (self._unfinished.get(target, b"") + data).rsplit(b"\n", KEPT)
        if len(pieces) > KEPT:
            pieces[0] = pieces[0][pieces[0].rfind(b"\n") + 1 :]
        self._lines.extend(_shortened(piece) for piece in pieces[:-1])
        self._unfinished[target] = _shortened(pieces[-1])

    def lines(self) -> list[str]:
        """The lines as text, without escape sequences and overwritten updates of a progress bar."""
        found = [*self._lines, *(piece for _, piece in sorted(self._unfinished.items()) if piece)][-KEPT:]
        return [as_shown(line) for line in found]

    def advice(self) -> str:
        """A clause with advice about the lines; empty where none is known."""
        lines = self.lines()
        if not any(line.strip() == _OTHER_PYTHON for line in lines[-1:]):
            explained = metal_errors.explain(lines)
            return f"; {explained}" if explained else ""
        return (
            "; that Python has no mlxdist: write `python` without a path for the one that runs this launcher, or "
            f"install mlxdist=={__version__} there"
        )


def _shortened(line: bytes) -> bytes:
    """The start of the line's last update, for a progress bar. A final carriage return may be half of a line's end."""
    line = line[line.rfind(b"\r", 0, -1) + 1 :]
    return line if len(line) <= MAX_BYTES else line[:MAX_BYTES] + b"..."
