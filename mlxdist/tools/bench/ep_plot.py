"""Draws the times of `mlxdist bench ep` over the number of tokens, both on logarithmic axes, one picture a layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .axes import logarithmic
from .ep import AUTO, LABELS, ONE_PROCESS, described

__all__ = ["draw"]


def draw(results: dict[str, Any], path: Path) -> None:
    """Writes a PNG: medians, and the range of the blocks as a band. Refused cases are left out."""
    shapes = list(dict.fromkeys(case["shape"] for case in results["cases"]))
    figure, pictures = plt.subplots(1, len(shapes), figsize=(7 * len(shapes), 5), layout="constrained", squeeze=False)
    for axes, shape in zip(pictures[0], shapes):
        cases = [case for case in results["cases"] if case["shape"] == shape and not case["refused"]]
        _draw_shape(axes, shape, cases)
    where = "each rank its part of the tokens" if results["sharded"] else "all ranks all tokens"
    figure.suptitle(f"A layer of experts on {results['ranks']} ranks, {where}; {results['provider']}")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_shape(axes: Any, shape: str, cases: list[dict[str, Any]]) -> None:
    tokens = [case["tokens"] for case in cases]
    for name in cases[0]["microseconds"] if cases else ():
        median, low, high = ([case["microseconds"][name][key] for case in cases] for key in ("median", "min", "max"))
        style = {ONE_PROCESS: {"linestyle": "--", "color": "grey"}, AUTO: {"linewidth": 3, "alpha": 0.4}}
        (line,) = axes.plot(tokens, median, label=LABELS.get(name, name), **style.get(name, {"marker": "o"}))
        axes.fill_between(tokens, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    logarithmic(axes, tokens, str)
    axes.set_xlabel("tokens in a call")
    axes.set_ylabel("microseconds of the layer")
    axes.grid(True, which="both", alpha=0.2)
    axes.legend()
    axes.set_title(described(cases[0]) if cases else f"{shape}: all refused")
