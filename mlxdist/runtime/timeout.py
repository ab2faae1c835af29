"""Deadlines of single operations: ``timeout=``."""

import contextlib
from collections.abc import Iterator

from mlxdist.base import errors

from .native import lib

__all__ = ["checked_timeout", "native_timeout", "time_limit"]

_LONGEST = 1e9  # seconds: 31 years, and what MLXDIST_TIMEOUT takes


def checked_timeout(name: str, seconds: float | None) -> float | None:
    """``seconds`` itself, if it is a deadline: ``None`` for the group's, 0 for none.

    Raises:
        InvalidArgument: it is none.
    """
    if seconds is None:
        return None
    try:
        fits = 0 <= seconds <= _LONGEST
    except TypeError:
        fits = False
    if not fits:
        raise errors.InvalidArgument(
            f"{name}: timeout is {seconds!r}, but must be a number of seconds, 0 for no limit, or None for the group's"
        )
    return seconds


def native_timeout(name: str, seconds: float | None) -> float:
    """The same as the engine and the bridge take it: negative for the group's."""
    return -1.0 if seconds is None else float(checked_timeout(name, seconds))


@contextlib.contextmanager
def time_limit(name: str, seconds: float | None) -> Iterator[None]:
    """While it lasts, what this thread starts has ``seconds`` as its deadline."""
    if seconds is None:
        yield
        return
    limit = native_timeout(name, seconds)
    try:
        lib.mlxdist_set_timeout(limit)
        yield
    finally:
        lib.mlxdist_set_timeout(-1)
