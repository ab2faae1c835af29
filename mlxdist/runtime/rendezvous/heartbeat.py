"""Heartbeats: once a second every rank tells rank 0 where it is, and rank 0 tells all where the others are.

    rank -> rank 0   PULSE   text
    rank 0 -> rank   NEWS    for each rank: rank (4 bytes, big-endian), seconds since its last PULSE (float32), length
                             of the text (2 bytes), text

A rank that is stopped, or whose machine is overloaded, falls silent while its connection stays open: that is no failure
by itself, and what it has missed is still there when it goes on. A rank that has died is known by its connection.
"""

import math
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .event_loop import Loop
from .protocol import Connection, Kind, WireError

__all__ = [
    "MAX_POSITION",
    "PULSE_SECONDS",
    "SILENT_SECONDS",
    "Heartbeat",
    "Pulse",
    "guarded",
    "pack_news",
    "pack_position",
    "unpack_news",
    "unpack_position",
]

PULSE_SECONDS = 1.0
# A rank is called silent from then on. Python may keep a thread waiting while the program is in C code for long.
SILENT_SECONDS = 5.0
MAX_POSITION = 256  # in UTF-8

_HEAD = struct.Struct(">IfH")


@dataclass(frozen=True)
class Pulse:
    rank: int
    age: float  # seconds since it came to rank 0
    position: str


def pack_position(position: str) -> bytes:
    return position.encode()[:MAX_POSITION]


def unpack_position(payload: bytes) -> str:
    """The text of a PULSE.

    Raises:
        WireError: it is too long.
    """
    if len(payload) > MAX_POSITION:
        raise WireError(f"a position of {len(payload)} bytes")
    # It ends in messages, on terminals.
    return "".join(c if c.isprintable() else "?" for c in payload.decode(errors="replace"))


def pack_news(pulses: list[Pulse]) -> bytes:
    parts = []
    for pulse in pulses:
        text = pack_position(pulse.position)
        parts += [_HEAD.pack(pulse.rank, pulse.age, len(text)), text]
    return b"".join(parts)


def unpack_news(payload: bytes, size: int) -> list[Pulse]:
    """What ``pack_news`` has packed, of a job of ``size`` ranks.

    Raises:
        WireError: it is truncated, or speaks of a rank that there is not, or of one twice.
    """
    pulses: dict[int, Pulse] = {}
    at = 0
    while at < len(payload):
        if len(payload) - at < _HEAD.size:
            raise WireError("truncated news")
        rank, age, length = _HEAD.unpack_from(payload, at)
        at += _HEAD.size
        if rank >= size or rank in pulses or not (math.isfinite(age) and age >= 0) or length > len(payload) - at:
            raise WireError("malformed news")
        pulses[rank] = Pulse(rank, age, unpack_position(payload[at : at + length]))
        at += length
    return list(pulses.values())


class Heartbeat:
    """A rank's own, and what it hears of the others'. All methods but ``stop`` belong to the loop's thread."""

    def __init__(self, loop: Loop, connection: Connection, rank: int, size: int) -> None:
        self._loop = loop
        self._connection = connection
        self._rank = rank
        self._size = size
        self._position: Callable[[], str] | None = None
        self._on_news: Callable[[int, str], None] | None = None
        self._next = 0.0
        self._pulses: list[Pulse] = []
        self._news_came = 0.0  # when

    def start(self, position: Callable[[], str], on_news: Callable[[int, str], None] | None) -> None:
        if self._position is None:
            self._loop.add_timer(self._beat)
        self._position, self._on_news = position, on_news
        self._news_came = time.monotonic()

    def stop(self) -> None:
        self._position = self._on_news = None

    def take(self, payload: bytes) -> None:
        """A frame of kind NEWS."""
        self._pulses, self._news_came = unpack_news(payload, self._size), time.monotonic()
        self._tell()

    def _beat(self) -> float | None:
        position = self._position  # another thread may call stop()
        if position is None:
            return None
        now = time.monotonic()
        if now >= self._next:
            silent = now - self._news_came > SILENT_SECONDS
            # Rank 0 tells nothing to a rank that it does not hear; but while it is stopped, this piles up there.
            self._next = now + (SILENT_SECONDS / 2 if silent else PULSE_SECONDS)
            if not self._connection.unsent:
                self._connection.send(Kind.PULSE, pack_position(guarded(position) or ""))
            if silent:
                self._tell()
        return self._next - now

    def _tell(self) -> None:
        since, on_news = time.monotonic() - self._news_came, self._on_news
        for pulse in self._pulses:
            if on_news is not None and pulse.rank != self._rank:
                guarded(on_news, pulse.rank, _describe(pulse, since))


def _describe(pulse: Pulse, since: float) -> str:
    """Where a rank is, in words that follow its number; ``since``: seconds since the last news."""
    age = pulse.age + since
    if age < SILENT_SECONDS:
        return pulse.position
    if pulse.rank == 0 or since < SILENT_SECONDS:
        text = f"silent for {age:.0f} s: stopped, or its machine is overloaded"
    else:
        text = f"not heard of for {age:.0f} s: rank 0, which passes the news on, is silent itself"
    return f"{text}; before that {pulse.position}" if pulse.position else text


def guarded(callback: Callable, *arguments: object) -> Any:
    """Calls it in the loop's thread, which an error in it must not end: the thread watches the ranks."""
    try:
        return callback(*arguments)
    except Exception:
        sys.excepthook(*sys.exc_info())  # the caller's mistake must be seen
        return None
