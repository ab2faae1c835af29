"""Outages of the control network: what tells a rank that is cut off from one that has ended.

The kernel of a host that responds closes or resets the connection of a process that has ended: that rank is lost at
once. A connection that times out says only that the network is away, and the data path may be another network. So its
rank is lost once it is silent there, too; until then it connects again. While a rank is silent on its control
connection, the data path is asked for a sign of life every second (native/engine/liveness.c): progress threads reply,
whatever their programs do.
"""

import time
from collections.abc import Callable

from .heartbeat import HEARTBEAT_SECONDS, SILENT_SECONDS
from .protocol import ProtocolError

__all__ = ["LOST_SECONDS", "SignsOfLife", "how_lost", "is_outage", "outage_notice"]

# A connection whose other end does not respond is given up after this time, and a rank without a sign of life is lost.
LOST_SECONDS = 30.0
# But a process that was stopped meanwhile, or whose machine slept, has to ask first.
MIN_PROBES = 5


class SignsOfLife:
    """When a rank was last heard, on its control connection and on the data path. For one thread."""

    def __init__(self) -> None:
        self._control_at = self._data_at = time.monotonic()
        self._next_probe = 0.0
        self._unanswered = 0  # probes in a row
        self._count: int | None = None

    def heard(self) -> None:
        """Notes that a frame has come."""
        self._control_at = time.monotonic()
        self._unanswered, self._count = 0, None

    def probe(self, count: Callable[[], int]) -> None:
        """Asks once a second for ``count()``, the signs of life that the data path has brought so far."""
        now = time.monotonic()
        if now < self._next_probe:
            return
        self._next_probe = now + HEARTBEAT_SECONDS
        before, self._count = self._count, count()
        self._unanswered += 1
        if before is not None and before != self._count:
            self._data_at, self._unanswered = now, 0

    @property
    def control_silence(self) -> float:
        """Seconds since the last frame."""
        return time.monotonic() - self._control_at

    @property
    def is_silent(self) -> bool:
        return self.control_silence >= SILENT_SECONDS

    @property
    def _silence(self) -> float:
        return time.monotonic() - max(self._control_at, self._data_at)

    @property
    def is_lost(self) -> bool:
        return self._silence >= LOST_SECONDS and self._unanswered >= MIN_PROBES

    def __str__(self) -> str:
        control = f"silent for {self.control_silence:.0f} s on its control connection"
        return f"has been {control} and {self._silence:.0f} s on the data path"


def is_outage(error: OSError | ProtocolError | None, was_silent: bool) -> bool:
    """Whether a connection that was lost by ``error`` (None: closed) says nothing about the process at its other end.

    A reset after a silence may be of a connection that the other end has given up while the network was away.
    """
    return isinstance(error, OSError) and (was_silent or not isinstance(error, ConnectionResetError))


def how_lost(error: OSError | ProtocolError | None) -> str:
    """Says what is known of a rank whose connection was lost by ``error``, in words that follow its name."""
    if isinstance(error, ProtocolError):
        return f"was cut off: it sent {error}"
    return "has died or closed its connection"


def outage_notice(who: object, signs: SignsOfLife) -> str:
    """The warning about an outage, for the side that has lost the connection to ``who``."""
    return (
        f"the control connection to {who} is cut after {signs.control_silence:.0f} s of silence. The job goes on, and "
        f"connects again; without a sign of life on the data path for {LOST_SECONDS:g} s that rank counts as lost"
    )
