"""Deadlines of single operations: ``timeout=``."""

import contextlib
from collections.abc import Iterator

from mlxdist.base import errors

from .native import lib

__all__ = ["native_timeout", "time_limit"]

_MAX_SECONDS = 1e9  # 31 years, and what MLXDIST_TIMEOUT takes


def native_timeout(name: str, seconds: float | None) -> float:
    """A deadline as the engine and the bridge take it: 0 for none, negative for the group's (``None``).

    Raises:
        InvalidArgument: it is none.
    """
    if seconds is None:
        return -1.0
    try:
        fits = 0 <= seconds <= _MAX_SECONDS
    except TypeError:
        fits = False
    if not fits:
        raise errors.InvalidArgument(
            f"{name}: timeout is {seconds!r}, but must be a number of seconds, 0 for no limit, or None for the group's"
        )
    return float(seconds)


@contextlib.contextmanager
def time_limit(limit: float) -> Iterator[None]:
    """While it lasts, what this thread starts has ``limit``, from `native_timeout`, as its deadline."""
    try:
        lib.mlxdist_set_timeout(limit)
        yield
    finally:
        lib.mlxdist_set_timeout(-1)
