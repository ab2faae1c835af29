"""The plots of the suite's report: SVG to be put into a page, light or dark."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .axes import logarithmic
from .bandwidth import algorithm_bandwidth
from .results import backends_of, by_name, size_of
from .sizes import format_size

__all__ = ["curves", "layers"]

# Stands for the colour of the page's text, which matplotlib cannot name.
_TEXT = "#010203"
_COLORS = {"mlxdist": "#2f7ed8", "ring": "#e07b00", "mpi": "#2a9d4a", "jaccl": "#b04fc0"}
_SETTINGS = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9,
    **{f"{name}.color": _TEXT for name in ("text", "xtick", "ytick")},
    **{f"axes.{name}": _TEXT for name in ("labelcolor", "edgecolor", "titlecolor")},
    "legend.frameon": False,
}


def curves(results: dict[str, Any]) -> Iterator[str]:
    """Of every operation and dtype: time and bandwidth over size, a curve for each backend, the range as a band."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for case in results["cases"]:
        if not case.get("tokens"):
            found.setdefault((case["operation"], case["dtype"]), []).append(case)
    for number, ((operation, dtype), cases) in enumerate(found.items()):
        with matplotlib.rc_context(_SETTINGS):
            figure, (latency, bandwidth) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
            for name in backends_of(results):
                good = [case for case in cases if case["backend"] == name and case["microseconds"]]
                if good:
                    _curve(latency, name, sorted(good, key=lambda case: case["bytes"]), lambda size, time: time)
                    _curve(bandwidth, name, sorted(good, key=lambda case: case["bytes"]), algorithm_bandwidth)
            sizes = sorted({case["bytes"] for case in cases})
            _finish(latency, sizes, f"{operation}, {dtype}: microseconds")
            _finish(bandwidth, sizes, f"{operation}, {dtype}: GB/s")
            yield _svg(figure, f"curve{number}")


def layers(results: dict[str, Any]) -> Iterator[str]:
    """Of each layer: a bar for each backend, with its range."""
    rows = [row for row in by_name(results).values() if next(iter(row.values())).get("tokens")]
    if not rows:
        return
    with matplotlib.rc_context(_SETTINGS):
        figure, pictures = plt.subplots(
            1, len(rows), figsize=(max(4.0, 2.2 * len(rows)), 3.4), layout="constrained", squeeze=False
        )
        for axes, row in zip(pictures[0], rows):
            first = next(iter(row.values()))
            for place, (name, case) in enumerate(row.items()):
                if times := case["microseconds"]:
                    median = times["median"]
                    reach = [[median - times["min"]], [times["max"] - median]]
                    axes.bar(place, median, color=_color(name), yerr=reach, ecolor=_TEXT, capsize=3)
            axes.set_xticks(range(len(row)), list(row), rotation=30)
            axes.set_title(f"{first['operation']}\n{size_of(first)}, {first['dtype']}")
        pictures[0][0].set_ylabel("microseconds")
        yield _svg(figure, "layers")


def _curve(axes: Any, name: str, cases: list[dict[str, Any]], value: Any) -> None:
    sizes = [case["bytes"] for case in cases]
    median, low, high = (
        [value(case["bytes"], case["microseconds"][which]) for case in cases] for which in ("median", "min", "max")
    )
    axes.plot(sizes, median, marker="o", label=name, color=_color(name))
    axes.fill_between(sizes, low, high, color=_color(name), alpha=0.15, linewidth=0)


def _color(name: str) -> str:
    return _COLORS.get(name, "#888888")


def _finish(axes: Any, sizes: list[int], title: str) -> None:
    logarithmic(axes, sizes, format_size)
    axes.tick_params(axis="x", rotation=45)
    axes.grid(True, which="major", alpha=0.25)
    axes.set_title(title)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def _svg(figure: Any, prefix: str) -> str:
    """The element alone. Its names get a prefix: those of one picture must not be another's."""
    with io.StringIO() as file:
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        text = file.getvalue()
    plt.close(figure)
    text = text[text.index("<svg") :].replace(_TEXT, "currentColor")
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", text)
