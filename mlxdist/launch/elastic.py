"""Lets a job go on with the ranks that are left (`mlxdist launch --elastic`); membership.py has the agreement."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from mlxdist.base.errors import name_ranks

from .local import new_secret
from .membership import Epoch, Membership, NotAMember
from .restarts import FIRST_PAUSE, LONGEST_PAUSE

if TYPE_CHECKING:  # a job on this machine alone does not load what reaches others
    from .hosts import HostsJob
    from .local import LocalJob, LocalRank
    from .membership_socket import Question
    from .plan import LaunchPlan
    from .remote import RemoteRank

__all__ = ["Elastic", "member_variables"]

# Lists with a number for each rank.
_BY_RANK = ("MLXDIST_RANK_SHARES_MEMORY", "MLXDIST_RANK_SHARES_COMPUTE", "MLXDIST_MEMORY_GBPS")


class Elastic:
    """The epochs of one start of a job. The supervisor's thread calls its methods."""

    def __init__(
        self,
        job: LocalJob | HostsJob,
        size: int,
        least: int,
        patience: float,
        restarts: int,
        variables: Callable[[Collection[int]], Mapping[str, str]],
        on_epoch: Callable[[bool, str], None],
        start_again: Callable[[int], LocalRank | RemoteRank],
    ) -> None:
        """``least``: ranks that are enough. ``patience``: seconds that a member may let others wait. ``restarts``: of
        lost ranks, all together.

        ``variables(members)``: those whose values depend on who the ranks are. ``on_epoch(has_grown, text)``
        is called for each epoch that begins. ``start_again(rank)`` starts a rank in the place of a lost one; it raises
        CannotRun.
        """
        self.start_again = start_again
        self._job = job
        self._membership = Membership(size, least)
        self._patience = patience
        self._restarts = restarts
        self._pause = FIRST_PAUSE
        self._to_start: dict[int, float] = {}  # lost ranks, and when
        self._variables = variables
        self._on_epoch = on_epoch
        self._waits_since = math.inf
        self._shown = False  # to the ranks: that processes wait to join

    @property
    def can_go_on(self) -> bool:
        """Whether enough ranks are left."""
        return self._membership.is_enough

    def has_left_behind(self, rank: int) -> bool:
        """Whether the others have gone on without this rank."""
        return rank not in self._membership.members

    def end(self, rank: int) -> None:
        """Notes that a rank has ended."""
        self._membership.end(rank)

    def lose(self, rank: int) -> None:
        """Notes that the others have gone on without this rank, which has failed: it is started again, if it may be."""
        if self._restarts:
            self._restarts -= 1
            self._to_start[rank] = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def due(self) -> Collection[int]:
        """The lost ranks that are to be started again now, to join."""
        due = [rank for rank, when in self._to_start.items() if time.monotonic() >= when]
        for rank in due:
            del self._to_start[rank]
        return due

    def until_next(self) -> float:
        """The time when `step`, `late` or `due` is to be called at the latest."""
        return min([self._waits_since + self._patience, *self._to_start.values()])

    def step(self, lost: Mapping[int, str]) -> Epoch | None:
        """Takes the ranks' questions and answers them once it can. Returns the epoch that begins, if one does.

        ``lost``: how ranks have failed since the last one.
        """
        for question, address in self._job.questions():
            self._take(question, address)
        for member in self._membership.refuse():
            left, least = len(self._membership.living), self._membership.least
            self._job.refuse(member, f"{left} of at least {least} ranks are left (--elastic {least})")
        epoch = self._membership.decide()
        if epoch is not None:
            joined = self._membership.joined
            self._job.begin_epoch(epoch, new_secret(), self._variables(epoch.members))
            self._on_epoch(bool(joined), _in_words(epoch, lost, joined))
        if self._shown != bool(self._membership.joining):
            self._shown = not self._shown
            self._job.show_joining(self._shown)
        waits = bool(self._membership.waiting)
        self._waits_since = min(self._waits_since, time.monotonic()) if waits else math.inf
        return epoch

    @property
    def is_over(self) -> bool:
        """Whether all members have ended."""
        return not self._membership.living

    def late(self) -> Collection[int]:
        """The ranks that have let others wait for too long. They count as gone from now on."""
        if time.monotonic() < self._waits_since + self._patience:
            return []
        late = list(self._membership.missing)
        for member in late:
            self._membership.end(member)
        return late

    def _take(self, question: Question, address: str) -> None:
        member, attempt = question.member, question.attempt
        if not question.port:
            self._membership.withdraw(member, attempt)
            return
        try:
            if question.kind == "join":
                decided = self._membership.join(member, attempt, address)
            else:
                grows = question.kind == "grow"
                decided = self._membership.ask(member, question.epoch, attempt, address, grows)
        except NotAMember as error:
            self._job.refuse(member, str(error))
            return
        if decided is not None:
            self._job.answer(member)


def _in_words(epoch: Epoch, lost: Mapping[int, str], joined: Collection[int]) -> str:
    members, size = epoch.members, len(epoch.members)
    how = [f"rank {rank} is lost ({fate})" for rank, fate in lost.items()]
    how += [f"rank {rank} has joined again" for rank in joined]
    order = "" if members == tuple(sorted(members)) else f", in the order {', '.join(map(str, members))}"
    left = f"{name_ranks(sorted(members))} go{'es' * (size == 1)} on in a group of {size}{order}"
    return "; ".join([", ".join(how), left] if how else [left])


def member_variables(plan: LaunchPlan, members: Collection[int]) -> dict[str, str]:
    """The variables that name each rank, for a world of these ranks of the plan."""
    kept = {member: rank for rank, member in enumerate(members)}
    found = {}
    for name in _BY_RANK:
        numbers = plan.variables.get(name, "").split(",")
        if len(numbers) == plan.size:
            found[name] = ",".join(numbers[member] for member in kept)
    if text := plan.variables.get("MLXDIST_DEVICE_MAP"):
        from mlxdist.cluster.hostfile import device_map

        found["MLXDIST_DEVICE_MAP"] = device_map.load(text).of_ranks(plan.hosts_of_ranks(), list(kept))
    return found
