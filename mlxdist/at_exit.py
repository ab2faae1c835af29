"""The end of a program that uses mlxdist: its world is finalized, and the exit status tells when that has failed.

A rank that exits with a status that is not 0 has failed, and tells the others before they miss it. When exit handlers
run, Python has forgotten the status. So ``sys.exit`` and ``exit`` raise a SystemExit that notes it when the interpreter
drops it. A plain ``raise SystemExit(7)`` is not seen: there the world ends as if the program had come to its end.
"""

import atexit
import builtins
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable

from . import errors
from .world import World

__all__ = ["register", "unregister"]


def register(world: World) -> None:
    """``world`` is finalized when the process ends."""
    atexit.register(_finalize, world)


def unregister() -> None:
    """It has been finalized before."""
    atexit.unregister(_finalize)


def _finalize(world: World) -> None:
    if world.forked:
        return
    # Set by the interpreter when an exception has ended the main module, but for SystemExit.
    ended_by = getattr(sys, "last_value", None)
    status = _statuses[-1] if _statuses else 0
    if ended_by is None and status:
        ended_by = SystemExit(status)
    if ended_by is not None and not world.closed:
        world.end_with(ended_by)  # the others need not wait for more
    try:
        world.finalize()
    except errors.Error as error:
        print(f"mlxdist: {type(error).__name__}: {error}", file=sys.stderr)
        _exit_status.append(status or 1)
    except KeyboardInterrupt:
        print("mlxdist: interrupted at the end, while other ranks were waited for", file=sys.stderr)
        _exit_status.append(128 + signal.SIGINT)
    except SystemExit as error:
        _exit_status.append(error.code)


# The interpreter would end with status 0 whatever an exit handler raises, and a job that has failed must not.
_exit_status: list[int] = []

# That with which the program has exited.
_statuses: list[int] = []


def _exit_with_status() -> None:
    if _exit_status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_status[0])


class _Exit(SystemExit):
    """Where the program catches it, it is dropped while a frame of Python runs; by the interpreter, while none does."""

    def __del__(self, frame: Callable = sys._getframe, status: Callable = errors.exit_status) -> None:
        if frame().f_back is None:
            _statuses.append(status(self))


def _noting(leave: Callable) -> Callable:
    @functools.wraps(leave)
    def exit(*args: object, **keywords: object) -> None:
        try:
            leave(*args, **keywords)
        except SystemExit as error:
            if threading.current_thread() is not threading.main_thread():  # only the thread ends
                raise
            raise _Exit(*error.args) from None

    return exit


sys.exit = _noting(sys.exit)
if hasattr(builtins, "exit"):  # not with python -S
    _Quitter = type(builtins.exit)
    _Quitter.__call__ = _noting(_Quitter.__call__)

# Handlers run in reverse order: this one after those of the program, which imports mlxdist before it registers them.
atexit.register(_exit_with_status)
