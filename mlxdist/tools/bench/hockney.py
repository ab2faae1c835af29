"""Hockney's line through the times of an operation over sizes, and the sizes from which its bandwidth is used.

R. W. Hockney, The communication challenge for MPP: Intel Paragon and Meiko CS-2, Parallel Computing 20 (1994), 389-398:
a message of n bytes takes alpha + beta n. alpha is the latency, 1 / beta the asymptotic bandwidth, and alpha / beta the
half-peak size n_1/2, whose message has half of that bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mlxdist.base import tables

__all__ = ["COLUMNS", "EXPLAINED", "fit", "fits", "rows_of"]

SATURATED = 0.9  # of the best bandwidth that was measured
MIN_SIZES = 3  # any two points are on a line

COLUMNS = ["operation", "by", "path", "saturation", "n_1/2", "alpha us", "beta ns/B", "GB/s at most", "off by"]
EXPLAINED = (
    "saturation: the smallest size with 90 % of the best bandwidth. alpha + beta * bytes is the line with the least "
    "squares of relative errors (Hockney 1994), n_1/2 = alpha / beta the size with half of its bandwidth, and off by "
    "how far the median of a size is from it at most."
)


def fit(sizes: Sequence[int], microseconds: Sequence[float]) -> tuple[float, float]:
    """alpha in microseconds and beta in microseconds per byte of the line with the least squares of relative errors.

    Relative, because sizes go up by factors: the errors of large ones alone would decide, and alpha be anything.
    """
    n, t = np.asarray(sizes, np.float64), np.asarray(microseconds, np.float64)
    (alpha, beta), *_ = np.linalg.lstsq(np.stack([1 / t, n / t], axis=1), np.ones(len(n)), rcond=None)
    return float(alpha), float(beta)


def fits(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The fit of each operation, dtype and variant that has times of three sizes or more.

    Returns dicts: "operation", "dtype", "variant", "path" (that of its results), "sizes" (how many),
    "saturation_bytes", "half_peak_bytes" (None where the line has no point with half of its bandwidth), "alpha" in
    microseconds, "beta" in nanoseconds per byte, "algbw" (the best that was measured, in GB/s), "error" (the largest
    relative one of the line).
    """
    curves: dict[tuple[str, str, str, str | None], dict[int, float]] = {}
    for result in results["cases"]:
        case, times = result["case"], result["microseconds"]
        if "bytes" in case and times:
            key = case["operation"], case["dtype"], result["variant"], result.get("path")
            curves.setdefault(key, {})[case["bytes"]] = times["median"]
    return [
        dict(zip(("operation", "dtype", "variant", "path"), key)) | _fitted(curve)
        for key, curve in curves.items()
        if len(curve) >= MIN_SIZES
    ]


def _fitted(curve: dict[int, float]) -> dict[str, Any]:
    """``curve``: microseconds by size."""
    alpha, beta = fit(list(curve), list(curve.values()))
    best = max(size / time for size, time in curve.items())
    return {
        "sizes": len(curve),
        "saturation_bytes": min(size for size, time in curve.items() if size / time >= SATURATED * best),
        "half_peak_bytes": alpha / beta if alpha > 0 and beta > 0 else None,
        "alpha": alpha,
        "beta": 1e3 * beta,
        "algbw": best / 1e3,
        "error": max(abs(alpha + beta * size - time) / time for size, time in curve.items()),
    }


def rows_of(fitted: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The rows of a table with `COLUMNS`."""
    return [
        [
            f"{one['operation']} {one['dtype']}",
            one["variant"],
            one["path"] or "-",
            tables.size(one["saturation_bytes"]),
            "-" if one["half_peak_bytes"] is None else tables.size(round(one["half_peak_bytes"])),
            f"{one['alpha']:.1f}",
            f"{one['beta']:.3f}",
            f"{one['algbw']:.2f}",
            f"{one['error']:.0%}",
        ]
        for one in fitted
    ]
