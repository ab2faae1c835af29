"""Draws latency and bandwidth over size, ours and the peers', both on logarithmic axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from mlxdist.tools.bench.axes import logarithmic
from mlxdist.tools.bench.bandwidth import algorithm_bandwidth
from mlxdist.tools.bench.sizes import format_size

NAMES = {"mlxdist": "mlxdist", "ring": "MLX ring", "mpi": "Open MPI through MLX", "gloo": "gloo (torch)"}
NAMES |= {"transfer": "from one core to the other", "memcpy": "copy by all ranks at once"}
STYLES = {"transfer": {"linestyle": ":", "color": "black"}, "memcpy": {"linestyle": "--", "color": "grey"}}


def draw(cases: list[dict[str, Any]], title: str, path: Path) -> None:
    """Writes a PNG of the cases of one operation and dtype: median, and the range of the blocks as a band."""
    cases = sorted(cases, key=lambda case: case["bytes"])
    sizes = [case["bytes"] for case in cases]
    figure, (latency, bandwidth) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for name in [*cases[0]["microseconds"], *(name for name in STYLES if cases[0][name])]:
        measured = [case[name] if name in STYLES else case["microseconds"][name] for case in cases]
        label, style = NAMES[name], STYLES.get(name, {"marker": "o"})
        for axes, value in ((latency, lambda size, time: time), (bandwidth, algorithm_bandwidth)):
            median, low, high = (
                [value(size, point[key]) for size, point in zip(sizes, measured)] for key in ("median", "min", "max")
            )
            (line,) = axes.plot(sizes, median, label=label, **style)
            axes.fill_between(sizes, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    for axes, text in ((latency, "microseconds per operation"), (bandwidth, "GB/s: size over time")):
        logarithmic(axes, sizes, format_size)
        axes.set_xlabel("size of the array")
        axes.set_ylabel(text)
        axes.tick_params(axis="x", rotation=45)
        axes.grid(True, which="both", alpha=0.2)
        axes.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)
