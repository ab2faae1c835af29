"""The ranks that have joined, as rank 0 knows them."""

import time
from dataclasses import dataclass

from .event_loop import Connection
from .heartbeat import PeerStatus

__all__ = ["Member"]


@dataclass
class Member:
    rank: int
    host: str
    pid: int
    connection: Connection
    left: bool = False
    lost: bool = False
    last_heartbeat: float | None = None  # when its last heartbeat came; None for one that sends none
    position: str = ""
    has_request: bool = False  # for its status

    @property
    def is_here(self) -> bool:
        return not self.left and not self.lost

    def status(self) -> PeerStatus:
        age = None if self.last_heartbeat is None else time.monotonic() - self.last_heartbeat
        return PeerStatus(self.rank, self.host, self.pid, age, self.position, not self.is_here)

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"
