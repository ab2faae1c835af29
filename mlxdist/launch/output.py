"""Output of the ranks, line by line, with the rank in front.

Bytes pass through as they are. A line is only held back until it is complete, so that lines of different ranks do not
mix, and never without bound. On a terminal an unfinished line (a prompt, a progress bar, text that is generated token
by token) is shown too; when another rank prints in the meantime, it is erased and drawn again below. In a file nothing
can be erased: there an unfinished line appears with its next update (carriage return), or when it grows too long, and
is continued on a new line if another rank came between.
"""

import errno
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mlxdist.base.errors import ResourceError
from mlxdist.base.private_files import open_private

from .last_lines import LastLines
from .log_files import log_name
from .terminal import RANK_COLORS, colors_wanted, prefix_of, width_of
from .tracebacks import TracebackFilter, Tracebacks
from .writer import MAX_BACKLOG, Writer

__all__ = ["Output"]

READ_BYTES = 65536
# A pipe holds no more than this once its rank has ended: further bytes are from a process that has left the job.
MAX_PIPE = 1 << 20
# An unfinished line in a file is held back up to this size.
MAX_HELD = 65536
# Bytes of an unfinished line on a terminal; a longer line would wrap on any terminal, and cannot be erased.
MAX_DRAWN = 4096
# Seconds before an unfinished line is drawn: unbuffered Python writes a line and its end separately.
DELAY = 0.03
# A piece of a line, up to where the cursor goes back to the left: the end of the line or an update of a progress bar.
_PIECE = re.compile(rb"[^\r\n]*(?:\r?\n|\r(?!\n))")
# Progress bars erase the line before they draw it; the prefix has to come after that.
_ERASE = re.compile(rb"\A(?:\x1b\[[0-2]?K)*")
_PARTIAL_ERASE = re.compile(rb"\A(?:\x1b\[[0-2]?K)*(?:\x1b(?:\[[0-2]?)?)?")
_CLEAR = b"\r\x1b[2K\x1b[0m"


class Output:
    """The output of all ranks, on the launcher's two streams. ``wake`` is called when these can take more, or less."""

    def __init__(self, labels: Sequence[str], wake: Callable[[], None], logs: Path | None = None) -> None:
        """Opens the logs. ``labels``: texts of equal width in front of each rank's lines. ``logs``: their directory."""
        # A lock, because the launcher prints from other threads, too.
        self._lock = threading.RLock()
        self._wake = wake
        self._labels = labels
        self._logs = logs
        self._writer = Writer(wake)
        self._stdout = Screen(1, self._writer)
        self._stderr = self._stdout if os.path.sameopenfile(1, 2) else Screen(2, self._writer)
        self._screens = {self._stdout, self._stderr}
        self.streams: list[Stream] = []
        self._last: dict[int, LastLines] = {}
        self._repeating: set[LastLines] = set()  # of ranks whose last lines are another rank's traceback, too
        self._tracebacks = Tracebacks()
        for rank in range(len(labels)):  # before anything is started
            for number in (1, 2):
                if (log := self._open_log(rank, number)) is not None:
                    log.close()

    def add(self, rank: int, stdout: int, stderr: int) -> None:
        """Adds the two descriptors that a rank's output is read from; they belong to this object from now on."""
        last = self._last[rank] = LastLines()
        for source, number, screen in ((stdout, 1, self._stdout), (stderr, 2, self._stderr)):
            prefix = prefix_of(self._labels[rank])
            if os.isatty(number) and colors_wanted(os.environ):
                prefix = b"\x1b[%dm%s\x1b[0m" % (RANK_COLORS[rank % len(RANK_COLORS)], prefix)
            os.set_blocking(source, False)
            log = self._open_log(rank, number)
            shown = TracebackFilter(rank, self._tracebacks if number == 2 else None)
            self.streams.append(Stream(source, number, prefix, screen, last, self._lock, log, shown))

    def _open_log(self, rank: int, number: int) -> BinaryIO | None:
        """Opens a log file, unbuffered; each start of the job appends to it. Raises ResourceError."""
        if self._logs is None:
            return None
        path = self._logs / log_name(self._labels[rank].split()[0], number)
        try:
            return open(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab", buffering=0)
        except OSError as error:
            raise ResourceError(f"--log-dir: {path} cannot be written: {error.strerror}") from None

    def draw(self) -> float | None:
        """Shows unfinished lines that are due. Returns the seconds until the next one, or None."""
        with self._lock:
            pauses = [pause for screen in self._screens if (pause := screen.draw_waiting()) is not None]
        return min(pauses, default=None)

    def is_full(self, most: int = MAX_BACKLOG) -> bool:
        """Whether more bytes than ``most`` wait for the reader of the launcher's output."""
        return self._writer.is_full(most)

    def say(self, text: str) -> None:
        """Prints a line of the launcher's own."""
        with self._lock:
            self._stderr.write_lines(2, text.encode(errors="replace") + b"\n")

    def line_was_typed(self) -> None:
        """Notes that the terminal has echoed a typed line with its end: the cursor is at the left now."""
        with self._lock:
            for screen in self._screens:
                screen.line_was_typed()
        self._wake()  # another rank's unfinished line can be drawn now

    def say_last_lines(self, rank: int, name: str) -> None:
        """Prints the last lines of a rank, unless they are the last that were printed at all."""
        last = self._last[rank]
        lines = last.lines()
        hidden = any(last in screen.printed and screen.printed_last is not last for screen in self._screens)
        if lines and hidden and last not in self._repeating:
            heading = f"Last line{'s' * (len(lines) > 1)} of {name}:"
            self.say("\n".join([heading, *(f"    {line}".rstrip() for line in lines)]))

    def advice(self, rank: int) -> str:
        return self._last[rank].advice()

    def close_unread(self) -> list["Stream"]:
        """Closes and returns streams without a reader, so that ranks get the error that a shell's pipe gives."""
        return [stream for stream in self.streams if stream.target in self._writer.broken and stream.close()]

    def finish(self) -> None:
        """Reads the rest of the pipes and ends unfinished lines. After that, the next ranks can be added."""
        for stream in self.streams:
            for _ in range(MAX_PIPE // READ_BYTES):
                if not stream.read():
                    break
            stream.close()
        self._repeating = {stream.last for stream in self.streams if stream.tracebacks.repeats}
        self.streams.clear()

    def is_unread(self) -> bool:
        """Whether the reader of the launcher's output has gone."""
        return bool(self._writer.broken)

    def write_error(self) -> str:
        """The reason why the launcher's output cannot be written; empty if it can, or if only its reader is gone."""
        for target, error in self._writer.broken.items():
            if error.errno != errno.EPIPE:
                return f"the standard {'output' if target == 1 else 'error'} cannot be written: {error.strerror}"
        return ""

    def is_written(self, seconds: float) -> bool:
        """Waits until everything is written, or ``seconds`` have passed. Returns whether everything is."""
        return self._writer.wait(seconds)


@dataclass(eq=False)
class Stream:
    """A standard output or standard error of a rank."""

    source: int
    target: int
    prefix: bytes
    screen: "Screen"
    last: LastLines
    lock: AbstractContextManager
    log: BinaryIO | None
    tracebacks: TracebackFilter
    held: bytes = b""
    held_since: float = 0.0
    is_open: bool = True
    at_left: bool = True  # the next byte is the first of its line, or of an update of it

    def read(self) -> bool:
        """Reads once. Returns False if there is no data now, or at the end, when ``is_open`` becomes False."""
        if not self.is_open:
            return False
        try:
            data = os.read(self.source, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        if self.log is not None:
            self.log.write(data)
        with self.lock:
            self.held += data
            self.last.take(self.target, data)
            self.screen.printed.add(self.last)
            self.screen.show(self, final=False)
            if not self.tracebacks.repeats and not self.tracebacks.holds:
                self.screen.printed_last = self.last
        return True

    def close(self) -> bool:
        """Closes the stream. Returns False if it was closed before."""
        if not self.is_open:
            return False
        self.is_open = False
        os.close(self.source)
        if self.log is not None:
            self.log.close()
        with self.lock:
            self.screen.show(self, final=True)
        return True

    def take_lines(self) -> bytes:
        """Removes the complete lines from the held bytes, and returns them with prefixes."""
        end = self.held.rfind(b"\n") + 1
        lines, self.held = self.held[:end], self.held[end:]
        return self._decorate(self.tracebacks.take(lines))

    def take_updates(self) -> bytes:
        """Removes everything up to the last carriage return, and returns it with prefixes."""
        if self.tracebacks.holds:
            return b""
        end = self.held.rfind(b"\r", 0, len(self.held) - 1) + 1  # a last one may be half of a line's end
        pieces, self.held = self.held[:end], self.held[end:]
        return self._decorate(pieces)

    def take_rest(self, final: bool) -> bytes:
        """Removes the unfinished line and returns it with a prefix; keeps bytes that may be half of a unit."""
        if self.tracebacks.holds:
            if not final and len(self.held) <= MAX_HELD:
                return b""
            self.held = self.tracebacks.take_held() + self.held
        rest = self.held
        if not final and rest.endswith(b"\r"):
            rest = rest[:-1]
        if not final and self.at_left and _PARTIAL_ERASE.fullmatch(rest):
            rest = b""
        self.held = self.held[len(rest) :]
        return self._decorate(rest)

    def restart_line(self) -> None:
        """Notes that the unfinished line was broken: its continuation needs the prefix again."""
        self.at_left = True

    def _decorate(self, data: bytes) -> bytes:
        if b"\r" not in data and b"\x1b" not in data:  # the usual case, fast
            first = self.prefix if self.at_left and data else b""
            if data:
                self.at_left = data.endswith(b"\n")
            body = data[:-1].replace(b"\n", b"\n" + self.prefix) + data[-1:]
            return first + body
        decorated = []
        end = 0
        while end < len(data):
            match = _PIECE.match(data, end)
            piece = match.group() if match else data[end:]
            end += len(piece)
            if self.at_left and piece != b"\r":
                piece = _ERASE.sub(lambda erase: erase[0] + self.prefix, piece, count=1)
            decorated.append(piece)
            self.at_left = match is not None
        return b"".join(decorated)


class Screen:
    """A standard stream of the launcher, or both if they are the same file. Merges the lines of several ranks."""

    def __init__(self, target: int, writer: Writer) -> None:
        self._shows_unfinished = os.isatty(target)
        self._can_erase = os.isatty(target) and os.environ.get("TERM", "dumb") != "dumb"
        self._writer = writer
        self._owner: Stream | None = None  # whose unfinished line the cursor stands in
        self._drawn = b""  # that line since its start or last update, or more than MAX_DRAWN of it
        self._waiting: list[Stream] = []  # with unfinished lines, while another's is drawn
        self.printed: set[LastLines] = set()
        self.printed_last: LastLines | None = None

    def show(self, stream: Stream, final: bool) -> None:
        lines = stream.take_lines()
        if final and (rest := stream.take_rest(final=True)):
            # The last line may have no newline, and in a file the next rank would continue it.
            lines += rest if rest.endswith(b"\n") else rest + b"\n"
            stream.restart_line()
        if self._owner is stream:
            self._write(stream.target, lines)
            if lines.endswith(b"\n"):
                self._owner = None
        elif lines:
            self.write_lines(stream.target, lines)
        if final and self._owner is stream:
            self._write(stream.target, b"\n")
            self._owner = None
        if stream not in self._waiting:
            stream.held_since = time.monotonic()
            self._waiting.append(stream)
        self.draw_waiting()

    def write_lines(self, target: int, lines: bytes) -> None:
        """Writes complete lines where another stream's unfinished line may be."""
        owner, drawn = self._owner, self._drawn
        if owner is None:
            self._write(target, lines)
        elif self._can_erase and len(drawn) <= MAX_DRAWN and width_of(drawn) < shutil.get_terminal_size().columns:
            self._write(target, _CLEAR + lines + drawn)
        else:
            self._break_line(owner)
            self._write(target, lines)

    def line_was_typed(self) -> None:
        if self._owner is not None and self._shows_unfinished:
            self._owner.restart_line()
            self._owner = None
            self._drawn = b""

    def _break_line(self, owner: Stream) -> None:
        self._write(owner.target, b"\n")
        owner.restart_line()
        self._owner = None

    def draw_waiting(self) -> float | None:
        """Shows unfinished lines as far as possible. Returns the seconds until more may be possible, or None."""
        self._waiting = [stream for stream in self._waiting if stream.held]
        now = time.monotonic()
        for stream in self._waiting:
            if self._owner is not None and self._owner is not stream and len(stream.held) > MAX_HELD:
                self._break_line(self._owner)
            if self._owner is stream or (self._owner is None and now >= stream.held_since + DELAY):
                self._draw(stream)
        if self._owner is not None:
            return None
        pauses = [stream.held_since + DELAY - now for stream in self._waiting]
        return min((pause for pause in pauses if pause > 0), default=None)

    def _draw(self, stream: Stream) -> None:
        """Shows as much of an unfinished line as possible, and makes its stream the owner of the current line."""
        data = stream.take_updates()
        if self._shows_unfinished or len(stream.held) > MAX_HELD:
            data += stream.take_rest(final=False)
        if data:
            self._write(stream.target, data)
            self._owner = stream

    def _write(self, target: int, data: bytes) -> None:
        if data:
            left = max(data.rfind(b"\n", 0, -1), data.rfind(b"\r", 0, -1)) + 1
            if data.endswith((b"\n", b"\r")):
                self._drawn = b""
            elif left:
                self._drawn = data[left:]
            elif len(self._drawn) <= MAX_DRAWN:
                self._drawn += data
            self._writer.put(target, data)
