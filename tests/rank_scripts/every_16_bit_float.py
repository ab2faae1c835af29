"""All values of the 16-bit floats: unchanged by adding zero, and rounded to nearest even after a sum."""

import sys
from pathlib import Path

import numpy as np

import mlxdist

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import reference

rank = mlxdist.init().rank()
every = np.arange(1 << 16, dtype=np.uint16)

for dtype in ("float16", "bfloat16"):
    keyword = {"dtype": "bfloat16"} if dtype == "bfloat16" else {}
    bits = every.view(reference.storage(dtype))
    zero = np.zeros_like(bits)
    # max with minus infinity is the identity for every value but NaN; so is adding zero but for minus zero.
    lowest = np.full_like(every, 0xFC00 if dtype == "float16" else 0xFF80).view(bits.dtype)
    same = mlxdist.all_max(bits if rank == 0 else lowest, **keyword).view(np.uint16)
    nan = np.isnan(reference.widen(bits, dtype))
    assert np.array_equal(same[~nan], every[~nan]), f"{dtype}: {np.flatnonzero(same != every)[:5]}"
    assert np.isnan(reference.widen(same.view(bits.dtype), dtype))[nan].all()
    # Sums of every value with values that make every rounding case: halves, just above, just below.
    for other in (0x0001, 0x0400, 0x1400, 0x3C00, 0x3555, 0x7BFF, 0x8001):
        added = np.full_like(every, other).view(bits.dtype)
        total = mlxdist.all_sum(bits if rank == 0 else added, **keyword)
        expected = reference.all_reduce([bits, added], dtype)
        a, b = reference.widen(total, dtype), reference.widen(expected, dtype)
        assert np.array_equal(a, b, equal_nan=True), f"{dtype} + {other:#x}"
    assert np.array_equal(mlxdist.all_sum(zero, **keyword), zero)
print("exact")
