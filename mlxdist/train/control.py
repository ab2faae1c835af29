"""When a training job saves and when it ends: one decision per step, the same on all ranks.

An event that only one rank sees (a signal, a full memory, a file, the clock of rank 0) must not end that rank alone:
the others would wait for it in the next collective. So each rank reports, and all of them decide by the same function
of all reports: one all_gather of 11 numbers per rank, in a group of its own, so that it meets no gradient on its way.
"""

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from mlxdist.base import logger
from mlxdist.base.errors import InvalidArgument, Mismatch, name_ranks
from mlxdist.nn.rank_checks import agreed
from mlxdist.runtime.group.group import GroupLike
from mlxdist.runtime.operations.arguments import group_of
from mlxdist.runtime.operations.collectives import all_gather

from .loss_alarm import LossAlarm
from .memory_limits import MemoryLimits

__all__ = ["Control", "Decision"]

_SLURM_END = "SLURM_JOB_END_TIME"  # seconds since 1970, which sbatch and srun set


@dataclass(frozen=True)
class Decision:
    """A decision before a step: whether the ranks save, and whether they stop. Equal on all of them.

    Attributes:
        step: the number of steps that are done.
        stop: leave the loop, and exit with status 0.
        save: save a checkpoint first.
        reason: why, in words; empty for neither, and for a checkpoint that is due.
        alarm: the text of the loss alarm; empty for none.
        loss: the mean of the losses that ranks have reported; NaN for none.
    """

    step: int
    stop: bool
    save: bool
    reason: str = ""
    alarm: str = ""
    loss: float = math.nan


class _Report(NamedTuple):
    """The report of one rank; or the reports of all, with an array for each field. Only rank 0 sets the last fields."""

    is_wrong: Any  # step or loss is nothing that this function takes
    step: Any
    signal: Any  # its number, or 0
    host_memory: Any  # share in use
    device_memory: Any  # bytes that are free
    loss: Any  # NaN for none
    has_loss: Any
    # Of rank 0.
    is_killed: Any = 0.0
    is_save_wanted: Any = 0.0
    elapsed: Any = 0.0  # seconds since the beginning
    time_left: Any = math.inf  # seconds until the end of the job


class Control:
    """Decides before each step whether all ranks save a checkpoint, and whether they stop.

    ::

        with mlxdist.train.Control(save_every=100, kill_switch="STOP") as control:
            for step in range(first, steps):
                decision = control.decide(step, loss)
                if decision.save:
                    save(step)
                if decision.stop:
                    break
                loss = train(step)

    Ranks stop, and save first if steps have been done since the last checkpoint, when

    - a rank has received SIGUSR1 or SIGTERM: the step is finished. ``mlxdist launch`` passes both on to all ranks.
    - the file ``kill_switch`` is there. It stays, so that jobs in a queue stop at their first step, too.
    - ``max_seconds`` have passed, or ``end_at`` is less than ``end_margin`` seconds away.
    - the memory of one rank's host, or that of its device, is full.

    They save when the file ``save_switch`` is there, which rank 0 then removes, after each ``save_every`` steps, and
    when ``save_every_seconds`` have passed since their last decision to save, or since the first call of ``decide``.
    Files and times are those of rank 0, which also writes each decision to the standard error.

    Args:
        group: the ranks that train together; ``None`` for that of ``mlxdist.init()``. All of them call this, and
            ``decide``, with the same arguments.
        kill_switch, save_switch: names of files.
        save_every: steps.
        save_every_seconds: at the end of a step; beside ``save_every``, or in place of it.
        max_seconds: from this call on.
        end_at: seconds since 1970. By default the end of the SLURM job, where SLURM says it (SLURM_JOB_END_TIME).
        end_margin: seconds for the last step and its checkpoint.
        max_host_memory: the share of a host's memory, or of the container's or SLURM job's, that may be in use: 0.95.
        min_device_memory: bytes that MLX must have left of its memory limit (``mx.get_memory_limit``); 2 GiB is usual.
            Before a rank reports less it collects garbage and clears MLX's cache.
        memory_every: calls of ``decide`` from one measurement of memory to the next.
        signals: the signals that end the job so. While the control is open, their earlier handlers are not called. So
            SIGTERM does not end the process; Ctrl-C and SIGKILL do.
        loss_alarm: gets the mean of all ranks' losses.
        saved: the step of the last checkpoint, if it is none that ``decide`` has been called with: a checkpoint that is
            due since then is made at once. By default, the first step of ``decide``.
        previous: the control of the group before, where ranks were lost or have joined. Its time goes on, and a signal
            that it has got is not lost. It is closed.

    Attributes:
        group: the ranks, as a group of its own.

    Raises:
        InvalidArgument: an argument is wrong on a rank; with ``signals``, this is not the main thread. On all ranks.
        Mismatch: arguments differ between ranks. On all ranks.
    """

    def __init__(
        self,
        *,
        group: GroupLike | None = None,
        kill_switch: str | os.PathLike[str] | None = None,
        save_switch: str | os.PathLike[str] | None = None,
        save_every: int | None = None,
        save_every_seconds: float | None = None,
        max_seconds: float | None = None,
        end_at: float | None = None,
        end_margin: float = 120.0,
        max_host_memory: float | None = None,
        min_device_memory: int | None = None,
        memory_every: int = 10,
        signals: Sequence[signal.Signals] = (signal.SIGUSR1, signal.SIGTERM),
        loss_alarm: LossAlarm | None = None,
        saved: int | None = None,
        previous: "Control | None" = None,
    ) -> None:
        group = group_of(group)
        self._received = 0
        with agreed(
            "Control", group, kill_switch, save_switch, save_every, save_every_seconds, max_seconds, end_at, end_margin,
            max_host_memory, min_device_memory, memory_every, [int(number) for number in signals], loss_alarm, saved,
        ):  # fmt: skip
            for name, value in {"save_every": save_every, "memory_every": memory_every}.items():
                if value is not None and (type(value) is not int or value < 1):
                    raise InvalidArgument(f"Control: {name} is {value!r}, not a number of steps from 1")
            for name, seconds in {
                "save_every_seconds": save_every_seconds,
                "max_seconds": max_seconds,
                "end_at": end_at,
                "end_margin": end_margin,
            }.items():
                if seconds is not None and not 0 <= _number(seconds) < math.inf:
                    raise InvalidArgument(f"Control: {name} is {seconds!r}, not a number of seconds from 0")
            self._end_at = _end_of_slurm() if end_at is None and group.rank() == 0 else end_at
            self._kill_switch = None if kill_switch is None else Path(kill_switch).expanduser().absolute()
            self._save_switch = None if save_switch is None else Path(save_switch).expanduser().absolute()
            self._memory = MemoryLimits(max_host_memory, min_device_memory)
            _require_signals(signals)
        self._save_every, self._save_every_seconds, self._memory_every = save_every, save_every_seconds, memory_every
        self._max_seconds, self._end_margin = max_seconds, end_margin
        self._loss_alarm = loss_alarm
        self._started: float = time.monotonic() if previous is None else previous._started
        self._calls = 0
        self._saved = saved  # the step of the last checkpoint, or the first one
        self._saved_at = 0.0  # when that was, in seconds of rank 0
        self._last: Decision | None = None  # that to stop
        own = group.split(0, group.rank())
        assert own is not None  # the color is not negative
        self.group = own
        self._previous = {number: signal.signal(number, self._take) for number in signals}
        if previous is not None:
            self._received = self._received or previous._received
            self._previous |= {
                number: previous._previous[number] for number in previous._previous.keys() & self._previous
            }
            previous._previous = {}

    def decide(self, step: int, loss: Any = None) -> Decision:
        """Whether to save and to stop, before the step with this number. Collective: one all_gather, awaited.

        Before the first step nothing is saved for the end's sake: the program has just loaded it. Once it is decided
        to stop, that decision stays, without another collective.

        Args:
            step: the number of steps that are done, the same on all ranks.
            loss: this rank's of the last step, a float or an array of one element, which is awaited; or None.

        Raises:
            InvalidArgument: a rank gave no such step or loss. On all ranks.
            Mismatch: ranks are at different steps. On all ranks.
        """
        if self._last is not None:
            return self._last
        problem, report = self._report(step, loss)
        self._calls += 1
        reports = _Report(*all_gather(np.array([report], np.float64), group=self.group).T)
        _check(reports, problem)
        elapsed = float(reports.elapsed[0])
        if self._saved is None:
            self._saved, self._saved_at = step, elapsed
        decision = self._decision(step, reports)
        if decision.save:
            self._saved, self._saved_at = step, elapsed
        self._last = decision if decision.stop else None
        if self.group.rank() == 0:
            self._announce(decision)
            if reports.is_save_wanted[0]:
                self._remove_switch()
        return decision

    def close(self) -> None:
        """Gives the signals back to their handlers; not after a decision to stop.

        The program is about to end then, and more of the same signals must not turn that into a failure: SLURM signals
        every process of a step, and the launcher passes on what it gets.
        """
        if self._last is None:
            for number, handler in self._previous.items():
                if signal.getsignal(number) == self._take:
                    signal.signal(number, handler)
        self._previous = {}

    def __enter__(self) -> "Control":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._received = number

    def _report(self, step: Any, loss: Any) -> tuple[str, _Report]:
        """The problem with this rank's arguments, empty for none; and its report."""
        problem, value = "", math.nan
        if type(step) is not int or step < 0:
            problem, step = f"the step is {step!r:.80}, not an integer from 0", 0
        try:
            value = math.nan if loss is None else float(loss.item() if hasattr(loss, "item") else loss)
        except (TypeError, ValueError):
            problem = f"the loss is a {type(loss).__name__}, not a float or an array of one element"
        measured = self._memory.measure() if self._calls % self._memory_every == 0 else (0.0, math.inf)
        mine = _Report(float(bool(problem)), step, self._received, *measured, value, float(loss is not None))
        if self.group.rank() == 0:
            mine = mine._replace(
                is_killed=_is_there(self._kill_switch),
                is_save_wanted=_is_there(self._save_switch),
                elapsed=time.monotonic() - self._started,
                time_left=math.inf if self._end_at is None else self._end_at - time.time(),
            )
        return problem, mine

    def _decision(self, step: int, reports: _Report) -> Decision:
        why = [
            f"{name_ranks(np.flatnonzero(reports.signal == number).tolist())} received {signal.Signals(number).name}"
            for number in sorted({int(number) for number in reports.signal if number})
        ]
        if reports.is_killed[0]:
            why.append(f"the kill switch {self._kill_switch} is there")
        elapsed, left = float(reports.elapsed[0]), float(reports.time_left[0])
        if self._max_seconds is not None and elapsed >= self._max_seconds:
            why.append(f"{elapsed:.0f} s have passed, and max_seconds is {self._max_seconds:g}")
        if left <= self._end_margin:
            why.append(f"the job's time ends in {max(left, 0):.0f} s")
        why += self._memory.exceeded(reports.host_memory, reports.device_memory)
        stop = bool(why)
        save = bool(reports.is_save_wanted[0])
        if save:
            why.append(f"the save switch {self._save_switch} is there")
        if step != self._saved:
            save |= stop or self._is_save_due(step, elapsed)
        losses = reports.loss[reports.has_loss > 0].tolist()
        loss = math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) and losses else math.nan
        alarm = self._loss_alarm.observe(step, loss) if self._loss_alarm is not None and losses else ""
        return Decision(step, stop, save, "; ".join(why), alarm, loss)

    def _is_save_due(self, step: int, elapsed: float) -> bool:
        """Whether a checkpoint is due by steps or by the time of rank 0, ``elapsed``."""
        # Not where it divides the step: steps are left out (Batches.skip_steps).
        every = self._save_every
        by_steps = every is not None and step // every > (self._saved or 0) // every
        seconds = self._save_every_seconds
        return by_steps or (seconds is not None and elapsed - self._saved_at >= seconds)

    def _announce(self, decision: Decision) -> None:
        if decision.alarm:
            _say(f"step {decision.step}: {decision.alarm}")
        if decision.reason:
            what = [*(["saves a checkpoint"] * decision.save), *(["exits with status 0"] * decision.stop)]
            _say(f"step {decision.step}: {decision.reason}: the job {' and '.join(what)}")

    def _remove_switch(self) -> None:
        assert self._save_switch is not None
        try:
            with contextlib.suppress(FileNotFoundError):
                self._save_switch.unlink()
        except OSError as error:  # it would ask for a checkpoint at every step
            logger.warn("failure", f"the save switch {self._save_switch} stays, and counts no more: {error.strerror}")
            self._save_switch = None


def _check(reports: _Report, problem: str) -> None:
    if reports.is_wrong.any():
        rank = int(np.argmax(reports.is_wrong))
        raise InvalidArgument(f"Control.decide: {problem or f'rank {rank} gave a step or a loss that is none'}")
    if (reports.step != reports.step[0]).any():
        rank = int(np.argmax(reports.step != reports.step[0]))
        steps = f"rank 0 at {reports.step[0]:.0f}, rank {rank} at {reports.step[rank]:.0f}"
        raise Mismatch(f"Control.decide: the ranks are at different steps, {steps}")


def _require_signals(numbers: Sequence[signal.Signals]) -> None:
    for number in numbers:
        if number not in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            raise InvalidArgument(f"Control: signals has {number!r:.80}, which no process can handle")
    if numbers and threading.current_thread() is not threading.main_thread():
        raise InvalidArgument(
            "Control: Python handles signals in the main thread alone; make the control there, or pass signals=()"
        )


def _is_there(path: Path | None) -> float:
    return float(path is not None and os.path.exists(path))


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _end_of_slurm() -> float | None:
    text = os.environ.get(_SLURM_END)
    if text is None:
        return None
    if not text.isdecimal():
        raise InvalidArgument(f"Control: {_SLURM_END}={text!r:.80} is not seconds since 1970; unset it, or pass end_at")
    return float(text)


def _say(text: str) -> None:
    print(f"mlxdist: {text}", file=sys.stderr, flush=True)
