"""The plots of benchmarks: times over sizes or numbers of tokens, and bars; as PNG, or as SVG to be put into a page."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, LogFormatter, NullFormatter

from mlxdist.base import tables

from .bandwidth import algorithm_bandwidth
from .limits import LIMITS
from .results import case_name, variants_of

__all__ = ["curves", "draw_operation", "draw_tokens", "layers"]

# Stands for the colour of the page's text, which matplotlib cannot name.
_TEXT = "#010203"
_COLORS = {"mlxdist": "#2f7ed8", "ring": "#e07b00", "mpi": "#2a9d4a", "jaccl": "#b04fc0", "gloo": "#c0504f"}
_STYLES = {"transfer": {"linestyle": ":", "color": "black"}, "memcpy": {"linestyle": "--", "color": "grey"}}
# SVG: without a background of their own.
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9,
    **{f"{name}.color": _TEXT for name in ("text", "xtick", "ytick")},
    **{f"axes.{name}": _TEXT for name in ("labelcolor", "edgecolor", "titlecolor")},
    "legend.frameon": False,
}

Results = Sequence[dict[str, Any]]


def curves(results: dict[str, Any]) -> Iterator[str]:
    """Yields an SVG for each operation and dtype: time and bandwidth over size, a curve for each variant."""
    sized = [result for result in results["cases"] if "tokens" not in result["case"] and "bytes" in result["case"]]
    found = _grouped(sized, lambda case: (case["operation"], case["dtype"]))
    for number, ((operation, dtype), of_operation) in enumerate(found.items()):
        with matplotlib.rc_context(_SETTINGS):
            figure, pictures = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
            _time_and_bandwidth(pictures, of_operation)
            for axes, unit in zip(pictures, ("microseconds", "GB/s")):
                axes.set_title(f"{operation}, {dtype}: {unit}")
            yield _svg(figure, f"curve{number}")


def draw_operation(results: Results, title: str, path: Path) -> None:
    """Writes a PNG of one operation, with the machine's limits."""
    figure, pictures = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    _time_and_bandwidth(pictures, results)
    first = list({result["case"]["bytes"]: result for result in results}.values())
    for name in LIMITS:
        limits = [{"case": one["case"], "variant": name, "microseconds": one.get(name)} for one in first]
        _curve(pictures[0], name, limits, "bytes", lambda size, time: time)
        _curve(pictures[1], name, limits, "bytes", algorithm_bandwidth)
    for axes, unit in zip(pictures, ("microseconds per operation", "GB/s: size over time")):
        axes.set_title(unit)
        axes.legend()
    _save(figure, title, path)


def draw_tokens(results: dict[str, Any], labels: dict[str, str], styles: dict[str, dict], path: Path) -> None:
    """Writes a PNG: times over the number of tokens, a picture for each operation."""
    operations = _grouped(results["cases"], lambda case: case["operation"])
    width = 7 * len(operations)
    figure, pictures = plt.subplots(1, len(operations), figsize=(width, 5), layout="constrained", squeeze=False)
    for axes, (operation, found) in zip(pictures[0], operations.items()):
        for name in variants_of(results):
            _curve(axes, name, found, "tokens", lambda tokens, time: time, labels.get(name, name), styles.get(name))
        _finish(axes, sorted({result["case"]["tokens"] for result in found}), str)
        axes.set_xlabel("tokens in a call")
        axes.set_ylabel("microseconds of the layer")
        axes.set_title(f"{operation}: {found[0]['described']}")
    _save(figure, f"A layer of experts on {results['setup']['ranks']} ranks; {results['setup']['provider']}", path)


def layers(results: dict[str, Any]) -> Iterator[str]:
    """Yields one SVG of all layers, if there are any: a bar for each variant, with its range."""
    of_tokens = [result for result in results["cases"] if "tokens" in result["case"]]
    rows = _grouped(of_tokens, lambda case: case_name(case).replace(", ", "\n", 1))
    if not rows:
        return
    with matplotlib.rc_context(_SETTINGS):
        width = max(4.0, 2.2 * len(rows))
        figure, pictures = plt.subplots(1, len(rows), figsize=(width, 3.4), layout="constrained", squeeze=False)
        for axes, (title, row) in zip(pictures[0], rows.items()):
            for place, result in enumerate(row):
                if times := result["microseconds"]:
                    median = times["median"]
                    reach = [[median - times["min"]], [times["max"] - median]]
                    axes.bar(place, median, color=_color(result["variant"]), yerr=reach, ecolor=_TEXT, capsize=3)
            axes.set_xticks(range(len(row)), [result["variant"] for result in row], rotation=30)
            axes.set_title(title)
        pictures[0][0].set_ylabel("microseconds")
        yield _svg(figure, "layers")


def _grouped(results: Results, by: Callable[[dict[str, Any]], Any]) -> dict[Any, list[dict[str, Any]]]:
    found: dict[Any, list[dict[str, Any]]] = {}
    for result in results:
        found.setdefault(by(result["case"]), []).append(result)
    return found


def _time_and_bandwidth(pictures: Sequence[Any], results: Results) -> None:
    for axes, value in zip(pictures, (lambda size, time: time, algorithm_bandwidth)):
        for name in variants_of({"cases": results}):
            _curve(axes, name, results, "bytes", value)
        _finish(axes, sorted({result["case"]["bytes"] for result in results}), tables.size)


def _curve(
    axes: Any,
    name: str,
    results: Results,
    over: str,
    value: Callable[[int, float], float],
    label: str | None = None,
    style: dict[str, Any] | None = None,
) -> None:
    """Draws the medians of one variant, with the range as a band; leaves refused results out."""
    good = [result for result in results if result["variant"] == name and result["microseconds"]]
    if not good:
        return
    good.sort(key=lambda result: result["case"][over])
    places = [result["case"][over] for result in good]
    median, low, high = (
        [value(result["case"][over], result["microseconds"][which]) for result in good]
        for which in ("median", "min", "max")
    )
    known = {"color": _color(name)} if name in _COLORS else {}
    style = style or _STYLES.get(name) or {"marker": "o"} | known
    (line,) = axes.plot(places, median, label=label or name, **style)
    axes.fill_between(places, low, high, color=line.get_color(), alpha=0.15, linewidth=0)


def _color(name: str) -> str:
    return _COLORS.get(name, "#888888")


class _Plain(LogFormatter):
    """1000, not 10 to the power of 3: matplotlib writes that as TeX, which stays TeX where math is not parsed."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:.12g}" if super().__call__(x, pos) else ""


def _finish(axes: Any, places: Sequence[int], name: Callable[[int], str]) -> None:
    """Makes both axes logarithmic: x has a named tick at each of ``places``, y has plain numbers."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(places)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda place, _: name(int(place))))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(_Plain())
    axes.yaxis.set_minor_formatter(_Plain())
    axes.tick_params(axis="x", rotation=45)
    axes.grid(True, which="major", alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def _save(figure: Any, title: str, path: Path) -> None:
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _svg(figure: Any, prefix: str) -> str:
    """The <svg> element alone. Its ids get a prefix, since all pictures of a page share one space of ids."""
    with io.StringIO() as file:
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        text = file.getvalue()
    plt.close(figure)
    text = text[text.index("<svg") :].replace(_TEXT, "currentColor")
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", text)
