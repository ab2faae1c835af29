"""The end of a program that uses mlxdist: its world is finalized, and a failure of that is in the exit status.

A rank that exits with a status that is not 0 has failed, and reports that to the other ranks. When exit handlers
run, Python has forgotten the status, so the bridge notes that of the SystemExit with which the interpreter ends.
"""

import atexit
import functools
import os
import signal
import sys
from collections.abc import Callable

from mlxdist.base import errors

from ..native import bridge
from .world import World

__all__ = ["exit_in_progress", "register", "unregister"]


def register(world: World) -> None:
    """Registers ``world`` to be finalized when the process ends."""
    atexit.register(_finalize, world)


def unregister() -> None:
    """Undoes :func:`register`: the program finalizes the world itself."""
    atexit.unregister(_finalize)


def exit_in_progress() -> SystemExit | None:
    """The SystemExit with which the program ends or, in a ``finally``, is about to; None: it does not, or with 0."""
    leaving = sys.exc_info()[1]
    status = bridge.exit_status() or (errors.exit_status(leaving) if isinstance(leaving, SystemExit) else 0)
    return SystemExit(status) if status else None


def _finalize(world: World) -> None:
    if world.forked:
        return
    # The first is set by the interpreter when an exception has ended the main module, but for SystemExit.
    ended_by = getattr(sys, "last_value", None) or exit_in_progress()
    if ended_by is not None and not world.closed:
        world.end_with(ended_by)  # the others need not wait for more
    try:
        world.finalize()
    except errors.Error as error:
        print(f"mlxdist: {type(error).__name__}: {error}", file=sys.stderr)
        _exit_status.append(bridge.exit_status() or 1)
    except KeyboardInterrupt:
        print("mlxdist: interrupted at the end, while other ranks were waited for", file=sys.stderr)
        _exit_status.append(128 + signal.SIGINT)
    except SystemExit as error:
        _exit_status.append(errors.exit_status(error))


# The interpreter would end with status 0 whatever an exit handler raises, and a job that has failed must not.
_exit_status: list[int] = []


def _exit_with_status() -> None:
    if _exit_status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_status[0])


bridge.watch_exits()
if sys.version_info < (3, 12):  # where sys.exit raises what becomes an object only when it is caught

    def _caught(leave: Callable) -> Callable:
        @functools.wraps(leave)
        def exit(*args: object) -> None:
            try:
                leave(*args)
            except SystemExit:
                raise

        return exit

    sys.exit = _caught(sys.exit)

# Handlers run in reverse order: this one after those of the program, which imports mlxdist before it registers them.
atexit.register(_exit_with_status)
