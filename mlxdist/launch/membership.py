"""Which ranks go on: the agreement of `mlxdist launch --elastic`, without sockets and without a clock.

A job that has lost ranks goes on in a new world of those that are left: an epoch. Every living member asks for the next
epoch (`mlxdist.Group.shrink`, `grow`), and once all have, the launcher decides: one value, which it gives to each of
them. A member that dies meanwhile is simply no more waited for; one that dies after the decision lets the new world
fail, and the others ask for the epoch after it. Where all ask to grow, processes that wait to join are in it, too.

The launcher decides alone, because it alone knows for certain who is dead: it has seen the process end, or ended it.
Rejected: an agreement among the ranks (ULFM's, Raft), which has to guess that from silence, needs a majority that two
Macs do not have, and would still leave the launcher to be asked. A job that loses its launcher ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Epoch", "Membership", "NotAMember"]


class Epoch(NamedTuple):
    """An epoch: the members in the order of their ranks in it, and the address where the first of them listens."""

    number: int
    members: tuple[int, ...]
    address: str


class NotAMember(ValueError):
    """A process asks that has no place in the epoch it names."""


class Membership:
    """The members are the ranks of the start, by their numbers then: a process that takes the place of a lost one has
    the number of that.

    Attributes:
        joined: the members that the latest epoch has taken in.
    """

    def __init__(self, size: int, least: int) -> None:
        """``least``: with fewer living members nothing is decided any more."""
        self._latest = Epoch(0, tuple(range(size)), "")  # the start
        self.joined: tuple[int, ...] = ()
        self.least = least
        self._ended: set[int] = set()
        self._asked: dict[int, str] = {}  # members that wait for the next epoch, and where they listen
        self._grows: dict[int, bool] = {}  # whether they ask to grow
        self._joining: dict[int, str] = {}  # processes that wait to join, likewise
        self._attempts: dict[int, int] = {}  # of each member, the latest

    @property
    def epoch(self) -> int:
        """The number of the epoch that was decided last; 0 is the start."""
        return self._latest.number

    @property
    def members(self) -> tuple[int, ...]:
        """The members of that epoch, in the order of their ranks in it."""
        return self._latest.members

    @property
    def living(self) -> Sequence[int]:
        """The members that have not ended."""
        return [member for member in self.members if member not in self._ended]

    @property
    def is_enough(self) -> bool:
        """Whether those that live can go on."""
        return len(self.living) >= self.least

    @property
    def waiting(self) -> Sequence[int]:
        """The members that have asked for the next epoch."""
        return sorted(self._asked)

    @property
    def joining(self) -> Sequence[int]:
        """The numbers of the processes that wait to join."""
        return sorted(self._joining)

    @property
    def missing(self) -> Sequence[int]:
        """The living members that others wait for: they have not asked."""
        return [member for member in self.living if member not in self._asked] if self._asked else []

    def end(self, member: int) -> None:
        """Notes that a member, or what was to take its place, has ended, or counts as gone from now on."""
        if self._joining.pop(member, None) is None:
            self._ended.add(member)
            self._asked.pop(member, None)

    def join(self, member: int, attempt: int, address: str) -> Epoch | None:
        """Notes that a process asks to take the place of a member that has ended; see `ask`.

        Raises:
            NotAMember: that place is taken.
        """
        if member in self.living:
            if member in self.joined:
                return self._latest
            raise NotAMember(f"the place of rank {member} of the start is taken")
        if attempt >= self._attempts.get(member, 0):
            self._attempts[member], self._joining[member] = attempt, address
        return None

    def ask(self, member: int, epoch: int, attempt: int, address: str, grows: bool = False) -> Epoch | None:
        """Notes that a member of ``epoch`` asks for the next one, and listens at ``address``.

        ``attempt`` grows with each question of a member: what is late or comes twice changes nothing. Returns the next
        epoch, if it has been decided before: the member has not got the answer. ``grows``: processes may join.

        Raises:
            NotAMember: it is none of that epoch, counts as gone, or the epoch is none to go on from.
        """
        if member in self._ended or member not in self.members:
            raise NotAMember(f"rank {member} of the start is no member of epoch {self.epoch} any more")
        if epoch == self.epoch:
            if attempt >= self._attempts.get(member, 0):
                self._attempts[member], self._asked[member], self._grows[member] = attempt, address, grows
            return None
        if epoch == self.epoch - 1:
            return self._latest
        raise NotAMember(f"rank {member} of the start asks from epoch {epoch}, and the job is at {self.epoch}")

    def withdraw(self, member: int, attempt: int) -> None:
        """Notes that a member does not wait for the answer to its question ``attempt`` any more."""
        if attempt >= self._attempts.get(member, 0):
            self._attempts[member] = attempt + 1
            self._asked.pop(member, None)
            self._joining.pop(member, None)

    def refuse(self) -> Sequence[int]:
        """Returns the members that wait in vain, since too few are left. They do not wait any more."""
        vain = [] if self.is_enough else self.waiting
        for member in vain:
            del self._asked[member]
        return vain

    def decide(self) -> Epoch | None:
        """Begins the next epoch once all living members have asked, and are enough; else returns None."""
        living = tuple(self.living)
        if not self._asked or self.missing or not self.is_enough:
            return None
        # Who joins comes last: rank 0 has the state that it needs.
        self.joined = tuple(self.joining) if all(self._grows[member] for member in living) else ()
        self._latest = Epoch(self.epoch + 1, living + self.joined, self._asked[living[0]])
        for member in self.joined:
            del self._joining[member]
        self._ended -= set(self.joined)
        self._asked.clear()
        return self._latest
