"""Deadlines of single operations: ``timeout=``."""

from mlxdist.base import errors

__all__ = ["native_timeout"]

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
