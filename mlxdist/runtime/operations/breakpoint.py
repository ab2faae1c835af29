"""A breakpoint on one rank: ``pdb`` there, while the other ranks wait without a deadline.

`mlxdist launch` gives what is typed to all ranks, each through a pipe. So that a later breakpoint on another rank does
not read the commands of an earlier one, each rank counts the lines that its debugger has read, and the others skip as
many. They meet for that before the debugger begins and after it ends.
"""

import bdb
import contextlib
import ctypes
import os
import pdb
import stat
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np

from mlxdist.base.errors import InvalidArgument, Mismatch

from ..group.group import Group, GroupLike
from .arguments import group_of
from .collectives import all_gather

__all__ = ["breakpoint"]

_NO_LIMIT = 0.0


def breakpoint(rank: int = 0, *, group: GroupLike | None = None) -> None:
    """Starts Python's debugger ``pdb`` on one rank, in the line that calls this. The others wait until it goes on.

    Collective: all ranks of the group must call it. While the debugger has the rank, the others wait without a
    deadline. With ``c`` all go on. With ``n``, ``s``, ``r`` and ``unt`` the others go on too, and the rank stops again
    in its next line; then the deadlines of operations count. ``q`` ends the program, and with it the job. Where the
    standard input of the rank has ended, the program goes on.

    Args:
        rank: that of the debugger, in the group. Its standard input is read.
        group: a :class:`mlxdist.Group`; ``None`` is the group of ``mlxdist.init()``.

    Raises:
        InvalidArgument: there is no such rank.
        Mismatch: on all ranks: they name different ranks.
    """
    members = group_of(group)
    if not 0 <= rank < members.size():
        raise InvalidArgument(f"breakpoint: rank is {rank}, but the ranks are 0 to {members.size() - 1}")
    ranks = _synchronize(rank, members, None)
    if (ranks != ranks[0]).any():
        raise Mismatch(f"breakpoint: ranks 0 to {members.size() - 1} name ranks {', '.join(map(str, ranks))}")
    frame = sys._getframe(1)
    debugger = None
    if members.rank() == rank:
        debugger = _RankDebugger(rank if members.size() > 1 else None)
        debugger.hold(frame)
    _synchronize(rank, members, _NO_LIMIT)
    if debugger is not None and debugger.steps:
        debugger.set_trace(frame)


class _Input:
    """The standard input of this rank. It counts the lines that the debugger has read or skipped."""

    def __init__(self) -> None:
        self.position = 0

    def readline(self) -> str:
        line = sys.__stdin__.readline() if sys.__stdin__ is not None else ""
        self.position += bool(line)
        return line

    def skip_to(self, position: int) -> None:
        """Skips what other ranks have read. Ranks without a pipe of their own skip nothing."""
        while self.position < position and _is_pipe() and self.readline():
            pass
        self.position = position

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Makes ``input()`` read here, too."""
        before, sys.stdin = sys.stdin, self
        try:
            yield
        finally:
            sys.stdin = before


_input = _Input()


class _RankDebugger(pdb.Pdb):
    """The debugger of one rank.

    Attributes:
        steps: whether to stop again in the next line, once the other ranks go on.
    """

    def __init__(self, rank: int | None) -> None:
        """``rank``: None in a group of one."""
        # A terminal has its lines edited by Python; no other rank has it.
        options = {} if os.isatty(0) else {"stdin": _input, "stdout": sys.stdout}
        super().__init__(nosigint=True, **options)  # type: ignore[arg-type]
        self.steps = False
        self._holds = False
        self._rank = rank

    def hold(self, frame: FrameType) -> None:
        """Reads commands for ``frame`` until one of them lets the program go on. Raises BdbQuit."""
        if self._rank is not None:
            self.message(f"The debugger has rank {self._rank}; the other ranks wait. c: all go on.")
        self._holds = True
        self.reset()
        self.interaction(frame, None)
        self._holds = False
        if self.quitting:
            raise bdb.BdbQuit
        if sys.version_info < (3, 13):  # later ones write through; a frame that is traced gets its variables back
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))

    def _step(self, command: Any, argument: str) -> Any:
        if not self._holds:
            return command(argument)
        self.steps = True
        return 1  # ends the commands

    def do_next(self, arg: str) -> Any:
        return self._step(super().do_next, arg)

    def do_step(self, arg: str) -> Any:
        return self._step(super().do_step, arg)

    def do_return(self, arg: str) -> Any:
        return self._step(super().do_return, arg)

    def do_until(self, arg: str) -> Any:
        return self._step(super().do_until, arg)

    def do_continue(self, arg: str) -> Any:
        return 1 if self._holds else super().do_continue(arg)

    def do_EOF(self, arg: str) -> Any:
        self.message("The standard input has ended: the program goes on.")
        return self.do_continue(arg)

    def do_interact(self, arg: str) -> Any:
        with contextlib.nullcontext() if os.isatty(0) else _input.in_place():
            return super().do_interact(arg)

    do_n, do_s, do_r, do_unt = do_next, do_step, do_return, do_until
    do_c = do_cont = do_continue


def _synchronize(rank: int, group: Group, timeout: float | None) -> np.ndarray:
    """Waits for all ranks, and skips input that another one has read. Returns the ranks that they name."""
    if group.size() == 1:
        return np.array([rank])
    table = all_gather(np.array([[rank, _input.position]], np.int64), group=group, timeout=timeout)
    _input.skip_to(int(table[:, 1].max()))
    ranks: np.ndarray = table[:, 0]
    return ranks


def _is_pipe() -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(0).st_mode)
    except OSError:  # closed
        return False
