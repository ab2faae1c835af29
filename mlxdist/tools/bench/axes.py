"""Logarithmic axes for plots of benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.ticker import FuncFormatter, LogFormatter, NullFormatter

__all__ = ["logarithmic"]


class _Plain(LogFormatter):
    """1000, not 10 to the power of 3: matplotlib writes that as TeX, which stays TeX where math is not parsed."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:.12g}" if super().__call__(x, pos) else ""


def logarithmic(axes: Any, places: Sequence[int], name: Callable[[int], str]) -> None:
    """Makes both axes logarithmic: x with a tick and its name at each of ``places``, y with plain numbers."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(places)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda place, _: name(int(place))))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(_Plain())
    axes.yaxis.set_minor_formatter(_Plain())
