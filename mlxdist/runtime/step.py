"""Where in its work the program is, for `mlxdist top` and `mlxdist dump`."""

from mlxdist.base.errors import InvalidArgument

__all__ = ["current_step", "set_step"]

_MAX = 2**63 - 1

_current: tuple[int | None, int | None] = (None, None)


def set_step(step: int, total: int | None = None) -> None:
    """Reports which step of its work this rank is at: a number of the program's own, of a training step or a request.

    `mlxdist top` and `mlxdist dump` show it. It costs nothing else, and may be called without a group.

    Args:
        step: from 0.
        total: how many there will be, if that is known.

    Raises:
        InvalidArgument: one of them is not an integer from 0.
    """
    global _current
    for name, value in (("step", step), ("total", total)):
        if not (value is None and name == "total") and (type(value) is not int or not 0 <= value <= _MAX):
            raise InvalidArgument(f"set_step: {name} is {value!r:.50}, not an integer from 0")
    _current = (step, total)


def current_step() -> tuple[int | None, int | None]:
    """What was reported last; None, None if nothing was."""
    return _current
