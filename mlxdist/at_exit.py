"""The end of a program that uses mlxdist: its world is finalized, and the exit status tells when that has failed."""

import atexit
import os
import signal
import sys

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
    # Set by the interpreter when an exception has ended the main module: the others need not wait for more.
    uncaught = getattr(sys, "last_value", None)
    if uncaught is not None and not world.closed:
        world.end_with(uncaught)
    try:
        world.finalize()
    except errors.Error as error:
        print(f"mlxdist: {type(error).__name__}: {error}", file=sys.stderr)
        _exit_status.append(1)
    except KeyboardInterrupt:
        print("mlxdist: interrupted at the end, while other ranks were waited for", file=sys.stderr)
        _exit_status.append(128 + signal.SIGINT)
    except SystemExit as error:
        _exit_status.append(error.code)


# The interpreter would end with status 0 whatever an exit handler raises, and a job that has failed must not.
_exit_status: list[int] = []


def _exit_with_status() -> None:
    if _exit_status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_status[0])


# Handlers run in reverse order: this one after those of the program, which imports mlxdist before it registers them.
atexit.register(_exit_with_status)
