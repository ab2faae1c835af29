"""The step of its work that the program is at, for `mlxdist top` and `mlxdist dump`."""

from collections.abc import Sequence
from typing import NamedTuple

from mlxdist.base.errors import InvalidArgument

__all__ = ["Computed", "Computing", "current_computing", "current_step", "set_computing", "set_step"]

_MAX = 2**63 - 1


class Computed(NamedTuple):
    """A part of a step that a rank has computed, from when to when, by its monotonic clock."""

    name: str
    started_ns: int
    ended_ns: int


class Computing(NamedTuple):
    """A step of a rank whose parts are measured, such as that of a stage of a pipeline: the share of the time in which
    it computes nothing, and what it computes, in order."""

    bubble: float
    spans: tuple[Computed, ...]


_computing: Computing | None = None
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
    """The step and the total that were reported last; None, None if nothing was."""
    return _current


def set_computing(bubble: float, spans: Sequence[Computed]) -> None:
    """Reports what this rank has computed in its last step. :func:`mlxdist.train.value_and_grad` does for a stage of a
    pipeline."""
    global _computing
    _computing = Computing(bubble, tuple(spans))


def current_computing() -> Computing | None:
    """The measurement of a step that was reported last; None if nothing was."""
    return _computing
