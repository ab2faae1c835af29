"""Waits for the ranks of a job and decides how it ends.

a rank fails      the others learn it from their rendezvous and have the grace to leave by themselves; then SIGTERM,
                  and SIGKILL for those that run after the same time again. The exit status is that of the first
                  failing rank.
SIGINT, SIGHUP    to all ranks; then the same. A second one skips to the next signal at once; where ranks do not leave
                  soon after SIGINT, the launcher reports it. With --pass-sigint no other signal follows SIGINT.
SIGTERM           to all ranks, with --drain a second one after that time; then SIGKILL. Where all of them end with
                  status 0, so does the launcher: they have saved what they had.
a loss            with --elastic, while enough ranks are left: no signal; they ask for a smaller group (elastic.py).
                  Where all that are left end with status 0, so does the launcher.
a stall           found by another thread (--stall-timeout): SIGTERM, and SIGKILL after the grace. The exit status is
                  124, and a restart may follow.
SIGUSR1           to all ranks, which end by themselves when they have come to a good place (mlxdist.train.Control); no
                  other signal follows.

A signal to the agent of the job on another host is one to the launcher, but for its being the second.
"""

from __future__ import annotations

import math
import selectors
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from mlxdist.base.errors import name_ranks

from .executable import CannotRun
from .exit_status import TOO_LATE, Ending, FirstFailure, describe
from .output import Output
from .reaper import LOST_DOMAINS
from .wakeup import Wakeup
from .writer import MAX_BACKLOG

if TYPE_CHECKING:  # a job on this machine alone does not load what reaches others
    from .elastic import Elastic
    from .hosts import HostsJob
    from .local import LocalJob, LocalRank
    from .options import Options
    from .remote import RemoteRank

    Job = LocalJob | HostsJob
    Rank = LocalRank | RemoteRank

__all__ = ["Supervisor"]

# Seconds after SIGKILL in which a process ends, unless it is in an uninterruptible system call.
AFTER_KILL = 5.0
# Bytes of output that an interrupted launcher still takes without a reader: the exit status of a rank on another host
# follows the rank's output on the connection.
_MAX_LAST_BACKLOG = 64 << 20
# Seconds after Ctrl-C until the launcher prints which ranks still run, and what it does next.
HINT_SECONDS = 1.0


class Supervisor:
    """Supervises ranks that have been started. ``output`` is None where they write to the launcher's own streams."""

    def __init__(
        self,
        job: Job,
        wakeup: Wakeup,
        output: Output | None,
        say: Callable[[str], None],
        options: Options,
        elastic: Elastic | None = None,
    ) -> None:
        self._job = job
        self._wakeup = wakeup
        self._output = output
        self._say = say
        self._verbose, self._limit, self._grace = options.verbose, options.limit, job.grace
        self._passes_sigint, self._drain = options.pass_sigint, options.drain
        self._started = time.monotonic()
        self._late_at = math.inf if options.limit is None else self._started + options.limit
        self._is_late = False
        self._elastic = elastic
        self._lost: list[int] = []  # ranks that have failed, without which the others have gone on
        self._stalled = ""  # how, once another thread has found it
        self._running: dict[int, Rank] = {}
        self._names: dict[int, str] = {}
        self._statuses: dict[int, int] = {}
        self._noted: FirstFailure | None = None  # by the ranks, once all have ended
        self._failed: list[tuple[int, float]] = []  # rank and time, in the order in which they ended
        self._left_after: dict[int, str] = {}  # what had been sent when a rank ended
        self._interrupted_by: signal.Signals | None = None
        self._was_asked = False  # by SIGUSR1, to end
        self._interrupts: list[str] = []  # where they came: the names of hosts, empty for the launcher itself
        self._sent: signal.Signals | None = None
        self._rungs: list[signal.Signals] = []
        self._next = math.inf  # when the next signal is due
        self._hint_at = math.inf
        self._watched = 0  # streams of the output that the selector has had
        self._selector = selectors.DefaultSelector()
        self._selector.register(wakeup, selectors.EVENT_READ)

    def add(self, rank: Rank) -> None:
        self._running[rank.rank] = rank
        self._names[rank.rank] = str(rank)
        if self._output is not None:
            for stream in self._output.streams[self._watched :]:
                self._selector.register(stream.source, selectors.EVENT_READ, stream)
            self._watched = len(self._output.streams)
        if self._verbose:
            self._say(f"{rank} started")

    def stall(self, how: str) -> None:
        """Ends a job that stands still, as one that has failed. Any thread may call it."""
        self._stalled = how
        self._wakeup.wake()

    def run(self) -> Ending:
        """Returns when no rank is left."""
        while self._running and not self._has_given_up():
            self._wait(self._until_next())
            self._reap()
            self._end_if_late()
            self._end_if_stalled()
            self._go_on()
            self._hint()
            self._press()
        # A rank that a signal ended (above 128) may have left a half-written kernel in the JIT cache.
        self._job.succeeded = not self._running and all(status <= 128 for status in self._statuses.values())
        self._noted = self._job.first_failed()  # which the end of the job removes
        status, clauses = self._verdict()
        first = self._first_failure()[0] if self._failed else None
        step = self._noted.step if self._noted is not None and self._noted.rank == first else None
        text = "; ".join(clauses) + self._lost_domains()
        if status == 0:
            self._job.remove_recordings()
        self._job.end()
        # Processes that the ranks have left behind may print until the reaper has ended them, too.
        while not self._job.has_ended():
            self._wait(1.0)
        if status != 0 and (recordings := self._job.recordings()):
            text += f"; their flight recordings are in {recordings}"
        self._selector.close()
        if self._output is not None:
            self._output.finish()
            if first is not None and self._interrupted_by is None:
                self._output.say_last_lines(first, self._names[first])
                text += self._output.advice(first)
        unread = self._output is not None and self._output.is_unread()
        was_interrupted = self._was_asked or self._interrupted_by is not None
        failed = bool(self._failed or self._stalled) and not was_interrupted and not self._running and not unread
        return Ending(status, text, failed, cause=clauses[0] if clauses else "", rank=first, step=step)

    def _wait(self, seconds: float | None) -> None:
        full = self._is_full()
        pauses = [seconds, 0.05 if full else None, self._output.draw() if self._output is not None else None]
        seconds = min((pause for pause in pauses if pause is not None), default=None)
        if full:  # what the ranks print stays in their pipes, which are readable all the time
            if self._wakeup.is_awake(seconds):
                self._take_signals()
            return
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._take_signals()
            elif key.data.is_open and not key.data.read() and not key.data.is_open:
                self._selector.unregister(key.fd)

    def _is_full(self) -> bool:
        most = MAX_BACKLOG if self._interrupted_by is None else _MAX_LAST_BACKLOG
        return self._output is not None and self._output.is_full(most)

    def _take_signals(self) -> None:
        for number in self._wakeup.read():
            self._interrupt(number)
        for number, host in self._job.interrupts():
            self._interrupt(number, host)
        if self._output is not None:
            for stream in self._output.close_unread():
                self._selector.unregister(stream.source)

    def _interrupt(self, number: signal.Signals, host: str = "") -> None:
        if number == signal.SIGUSR1 or (number == signal.SIGINT and self._passes_sigint):
            self._was_asked = self._was_asked or number == signal.SIGUSR1
            for rank in self._running.values():
                if self._elastic is None or not self._elastic.has_left_behind(rank.rank):  # else it waits to join
                    rank.signal(number)
            return
        is_again = host in self._interrupts  # `mlxdist stop --hosts` sends one to every host, and means the same
        self._interrupts.append(host)
        if self._interrupted_by is not None:
            if is_again:
                self._next = time.monotonic()  # impatient: the next signal now
            return
        self._interrupted_by = number
        if self._can_go_on:
            self._failed.clear()  # the job did not end for these
        self._send(number)
        drains = number == signal.SIGTERM and self._drain > 0
        self._rungs = [signal.SIGTERM, signal.SIGKILL] if drains or number != signal.SIGTERM else [signal.SIGKILL]
        now = time.monotonic()
        self._next = now + (self._drain if drains else self._grace)
        if number == signal.SIGINT and self._grace > HINT_SECONDS:
            self._hint_at = now + HINT_SECONDS

    def _hint(self) -> None:
        """Prints, once it is due, which ranks still run after SIGINT, and what another Ctrl-C does."""
        now = time.monotonic()
        if now < self._hint_at or not self._running:
            return
        self._hint_at = math.inf
        if self._sent == signal.SIGINT:
            ranks = sorted(self._running)
            runs = f"{name_ranks(ranks)} still run{'s' * (len(ranks) == 1)} after SIGINT"
            left = f"SIGTERM follows in {max(0.0, self._next - now):.0f} s, SIGKILL {self._grace:g} s later"
            self._say(f"{runs}; {left}. Another Ctrl-C ends them now, a third one kills them")

    def _reap(self) -> None:
        ended = []
        for rank in list(self._running.values()):
            status = rank.poll()
            if status is not None:
                ended.append((rank, status))
        # These ranks ended in an unknown order. A rank that was killed is more likely the cause than a consequence.
        for rank, status in sorted(ended, key=lambda pair: pair[1] <= 128):
            self._take_end(rank, status)

    def _take_end(self, rank: Rank, status: int) -> None:
        del self._running[rank.rank]
        self._job.ended(rank.rank, status)
        self._statuses[rank.rank] = status
        now = time.monotonic()
        if self._verbose:
            self._say(f"{rank} ended {describe(status)} after {now - self._started:.1f} s")
        if self._sent is not None:
            self._left_after[rank.rank] = self._sent.name
        elif self._elastic is not None and self._elastic.has_left_behind(rank.rank):
            self._lose(self._elastic, rank.rank)
        elif status != 0:
            self._failed.append((rank.rank, now - self._started))
        if self._elastic is not None:
            self._elastic.end(rank.rank)
        if self._failed and self._sent is None and self._next == math.inf and not self._can_go_on:
            self._rungs = [signal.SIGTERM, signal.SIGKILL]
            self._next = now + self._grace

    @property
    def _can_go_on(self) -> bool:
        """Whether enough ranks are left after a loss."""
        return self._elastic is not None and self._elastic.can_go_on

    def _start_due(self, elastic: Elastic) -> None:
        for rank in elastic.due():
            try:
                self.add(elastic.start_again(rank))
            except CannotRun as error:
                self._say(str(error))

    def _lose(self, elastic: Elastic, rank: int) -> None:
        self._lost.append(rank)
        elastic.lose(rank)

    def _is_lost(self, rank: int) -> bool:
        """Whether the others have gone on without this rank, and it has not joined them again."""
        return rank in self._lost and self._elastic is not None and self._elastic.has_left_behind(rank)

    def _go_on(self) -> None:
        """Lets the ranks that are left agree on a smaller group, and ends those that keep them waiting."""
        if self._elastic is None or self._sent is not None:
            return
        fates = {rank: f"{describe(self._statuses[rank])} after {seconds:.1f} s" for rank, seconds in self._failed}
        if self._elastic.step(fates) is not None:
            self._failed.clear()
            for rank in fates:
                self._lose(self._elastic, rank)
        self._start_due(self._elastic)
        if self._elastic.is_over and self._running:  # what waits to join, waits in vain
            self._send(signal.SIGTERM)
            self._rungs, self._next = [signal.SIGKILL], time.monotonic() + self._grace
        for rank in self._elastic.late():
            self._say(f"rank {rank} has not come to Group.shrink() in time, and is killed")
            if rank in self._running:
                self._running[rank].signal(signal.SIGKILL)

    def _press(self) -> None:
        """Sends the next signal after the grace period for the previous one."""
        if self._rungs and self._running and time.monotonic() >= self._next:
            self._send(self._rungs.pop(0))
            self._next = time.monotonic() + (self._grace if self._rungs else AFTER_KILL)

    def _send(self, number: signal.Signals) -> None:
        self._sent = number
        for rank in self._running.values():
            rank.signal(number)

    def _until_next(self) -> float | None:
        elastic = math.inf if self._elastic is None or self._sent is not None else self._elastic.until_next()
        first = min(self._next, self._hint_at, self._late_at, elastic)
        return None if first == math.inf else max(0.0, first - time.monotonic())

    def _end_if_late(self) -> None:
        if time.monotonic() < self._late_at:
            return
        self._is_late, self._late_at = True, math.inf
        if self._interrupted_by is None and self._next == math.inf:  # else it is being ended already
            self._interrupt(signal.SIGTERM)

    def _end_if_stalled(self) -> None:
        if self._stalled and self._next == math.inf and self._sent is None:  # else it is being ended already
            self._rungs, self._next = [signal.SIGTERM, signal.SIGKILL], time.monotonic()

    def _has_given_up(self) -> bool:
        return self._sent == signal.SIGKILL and not self._rungs and time.monotonic() >= self._next

    def _verdict(self) -> tuple[int, list[str]]:
        """The exit status, and the clauses of the closing line. The first clause is the cause."""
        seconds = time.monotonic() - self._started
        if self._is_late and not self._failed:
            first = f"it has not ended after {self._limit:g} s (--timeout)"
            return TOO_LATE, [first, *self._fates(None)]
        if self._stalled and self._interrupted_by is None and not self._failed:
            return TOO_LATE, [self._stalled, *self._fates(None)]
        if self._interrupted_by is not None and not self._failed:
            where = f" on {self._interrupts[0]}" if self._interrupts[0] else ""
            all_ended = not any(status and not self._is_lost(rank) for rank, status in self._statuses.items())
            if self._interrupted_by == signal.SIGTERM and not self._running and all_ended:
                return 0, [f"all ranks ended with status 0 after SIGTERM{where}, after {seconds:.1f} s"]
            first = f"interrupted by {self._interrupted_by.name}{where} after {seconds:.1f} s"
            return 128 + self._interrupted_by, [first, *self._fates(None)]
        if not self._failed and (lost := sorted(filter(self._is_lost, self._statuses))):
            left = name_ranks(sorted(self._statuses.keys() - set(lost)))
            return 0, [f"{left} succeeded after {seconds:.1f} s; {name_ranks(lost)} had been lost"]
        if not self._failed:
            return 0, [f"all ranks succeeded after {seconds:.1f} s"] if self._verbose else []
        if self._output is not None and (trouble := self._output.write_error()):  # their end is its consequence
            return 1, [trouble]
        failed, seconds = self._first_failure()
        status = self._statuses[failed]
        first = f"rank {failed} failed first, {describe(status)} after {seconds:.1f} s"
        return status, [first, *self._fates(failed)]

    def _lost_domains(self) -> str:
        """A clause about protection domains that ranks killed on Macs may have cost."""
        killed = 128 + signal.SIGKILL
        ranks = [rank for rank, status in self._statuses.items() if status == killed and self._job.is_on_mac(rank)]
        if not ranks:
            return ""
        return f"; {name_ranks(sorted(ranks))} killed on a Mac: {LOST_DOMAINS}"

    def _first_failure(self) -> tuple[int, float]:
        """The rank that failed first, by the ranks' notes: cause and consequence end within ms, in any order."""
        rank = self._noted.rank if self._noted is not None else None
        return next((failure for failure in self._failed if failure[0] == rank), self._failed[0])

    def _fates(self, besides: int | None) -> list[str]:
        """Clauses about the ends of the other ranks."""
        fates: dict[str, list[int]] = {}
        for rank, status in self._statuses.items():
            if rank == besides:
                continue
            sent = self._left_after.get(rank)
            if self._is_lost(rank):
                fate = "had been lost"
            elif sent is not None:
                fate = f"ended after {sent}" if sent != "SIGKILL" else "had to be killed (SIGKILL)"
            else:
                fate = (
                    "finished"
                    if status == 0
                    else "left by itself"
                    if status <= 128
                    else f"ended too, {describe(status)}"
                )
            fates.setdefault(fate, []).append(rank)
        for rank in self._running:
            fates.setdefault("does not even end after SIGKILL", []).append(rank)
        return [f"{name_ranks(ranks)} {fate if len(ranks) == 1 else _plural(fate)}" for fate, ranks in fates.items()]


def _plural(fate: str) -> str:
    return fate.replace("itself", "themselves").replace("does not", "do not")
