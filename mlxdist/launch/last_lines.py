"""The last lines of a rank, kept for when it fails."""

import collections

from .terminal import without_escapes

__all__ = ["LastLines"]

KEPT = 20
MAX_BYTES = 1000  # of a line


class LastLines:
    """What a rank has printed last on its two streams: few lines, and no long ones."""

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
        """Without what is for a terminal only."""
        found = [*self._lines, *(piece for _, piece in sorted(self._unfinished.items()) if piece)][-KEPT:]
        lines = [without_escapes(line).rstrip(b"\r").rpartition(b"\r")[2] for line in found]
        return [line.decode(errors="replace") for line in lines]


def _shortened(line: bytes) -> bytes:
    """Its start, from the last update of a progress bar on. A carriage return may be half of a line's end."""
    line = line[line.rfind(b"\r", 0, -1) + 1 :]
    return line if len(line) <= MAX_BYTES else line[:MAX_BYTES] + b"..."
