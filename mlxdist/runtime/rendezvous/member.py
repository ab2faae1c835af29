"""A rank of the job, as rank 0 knows it."""

import time
from dataclasses import dataclass, field

from .event_loop import Connection
from .heartbeat import PeerStatus
from .outage import SignsOfLife

__all__ = ["Member"]


@dataclass
class Member:
    """A rank that has joined."""

    rank: int
    host: str
    pid: int
    connection: Connection
    left: bool = False
    lost: bool = False
    last_heartbeat: float | None = None  # when its last heartbeat came; None for one that sends none
    position: str = ""
    has_request: bool = False  # for its status
    epoch: int = 0  # of its connection: each is made with a higher one
    signs: SignsOfLife = field(default_factory=SignsOfLife)

    @property
    def is_here(self) -> bool:
        return not self.left and not self.lost

    @property
    def is_cut(self) -> bool:
        """Whether an outage has cut its connection, and it may come again."""
        return self.is_here and not self.connection.is_open

    @property
    def was_silent(self) -> bool:
        """Whether it has sent heartbeats, and lately none."""
        return self.last_heartbeat is not None and self.signs.is_silent

    def status(self) -> PeerStatus:
        age = None if self.last_heartbeat is None else time.monotonic() - self.last_heartbeat
        return PeerStatus(self.rank, self.host, self.pid, age, self.position, not self.is_here)

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"
