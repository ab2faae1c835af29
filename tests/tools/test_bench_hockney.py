"""The line through the times of an operation over sizes, and the sizes at which its bandwidth is used."""

import numpy as np
import pytest

from mlxdist.tools.bench.hockney import COLUMNS, fit, fits, rows_of

SIZES = [4**n << 10 for n in range(1, 8)]  # 4 KiB to 16 MiB


def results(times: dict[int, float], variant: str = "mlxdist", **more: str) -> dict:
    cases = [
        {"case": {"operation": "all_reduce", "dtype": "float32", "bytes": size}, "variant": variant}
        | {"microseconds": {"median": time}, **more}
        for size, time in times.items()
    ]
    return {"cases": cases}


def test_the_line_of_times_without_noise():
    """20 us and 0.25 ns per byte: 4 GB/s at most, half of them at 80,000 bytes and nine tenths at 720,000."""
    times = {size: 20 + 0.25e-3 * size for size in SIZES}
    (found,) = fits(results(times, path="shared memory and TCP"))
    assert found["path"] == "shared memory and TCP"
    assert (found["alpha"], found["beta"]) == (pytest.approx(20), pytest.approx(0.25))
    assert found["half_peak_bytes"] == pytest.approx(80_000)
    best = times[16 << 20]
    reached = [size for size in SIZES if size / times[size] >= 0.9 * (16 << 20) / best]
    assert found["saturation_bytes"] == min(reached) == 1 << 20
    assert found["algbw"] == pytest.approx((16 << 20) / best / 1e3)
    assert found["error"] == pytest.approx(0, abs=1e-9)
    cells = dict(zip(COLUMNS, rows_of([found])[0], strict=True))
    assert (cells["saturation"], cells["n_1/2"]) == ("1 MiB", "78.12 KiB")
    assert (cells["alpha us"], cells["beta ns/B"], cells["off by"]) == ("20.0", "0.250", "0%")


def test_the_fit_is_that_of_relative_least_squares():
    """No other line near it has a smaller sum of squares of relative errors."""
    times = np.array([22.0, 19.0, 40.0, 90.0, 260.0, 1200.0, 3900.0])
    alpha, beta = fit(SIZES, times)

    def squares(alpha: float, beta: float) -> float:
        return float((((alpha + beta * np.array(SIZES)) / times - 1) ** 2).sum())

    least = squares(alpha, beta)
    for change in (0.99, 1.01):
        assert squares(alpha * change, beta) > least < squares(alpha, beta * change)
    absolute = np.polyfit(SIZES, times, 1)[1]  # the large sizes decide: no small one took so long
    assert 15 < alpha < 22 < 40 < absolute


def test_the_largest_message_is_not_the_fastest():
    """The best bandwidth counts: it falls again where large arrays leave the caches."""
    (found,) = fits(results({1 << 10: 10.0, 1 << 20: 100.0, 1 << 24: 3200.0}))
    assert (found["saturation_bytes"], found["algbw"]) == (1 << 20, pytest.approx((1 << 20) / 1e5))


def test_times_that_do_not_grow_have_no_half_peak():
    (found,) = fits(results(dict.fromkeys(SIZES, 10.0) | {SIZES[-1]: 9.0}))
    assert found["beta"] < 0 and found["half_peak_bytes"] is None
    assert rows_of([found])[0][COLUMNS.index("n_1/2")] == "-"


def test_what_has_no_line():
    """Two sizes, refused results, and what has no size."""
    assert fits(results({4096: 10.0, 8192: 11.0})) == []
    found = results(dict.fromkeys(SIZES[:3], 10.0), "ring")
    assert [one["path"] for one in fits(found)] == [None]
    found["cases"][0]["microseconds"] = None
    assert fits(found) == []
    found["cases"] = [{"case": {"operation": "barrier"}, "variant": "mlxdist", "microseconds": {"median": 1.0}}]
    assert fits(found) == []
