"""NaN and infinity as numpy.maximum treats them, whichever rank they come from."""

import sys
from pathlib import Path

import numpy as np

import mlxdist

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import reference

group = mlxdist.init()
special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 6e4, -6e4, 1e-7]
for dtype in ("float16", "bfloat16", "float32", "float64", "complex64"):
    # Every combination of special values over the ranks, and for complex64 NaN in either part.
    values = np.array(special, np.float32)
    if dtype == "complex64":
        parts = np.stack(np.meshgrid(values, values), axis=-1)  # not a + 1j * b, where infinities make NaNs
        values = parts.view(np.complex64).ravel()[::7]
    grids = np.meshgrid(*[values] * group.size(), indexing="ij")
    with np.errstate(over="ignore"):
        inputs = [reference.narrow(grid.ravel(), dtype) for grid in grids]
    keyword = {"dtype": "bfloat16"} if dtype == "bfloat16" else {}
    for op in ("max", "min", "sum"):
        result = reference.widen(mlxdist.all_reduce(inputs[group.rank()], op, **keyword), dtype)
        expected = reference.widen(reference.all_reduce(inputs, dtype, op), dtype)
        if op == "sum" and dtype == "complex64":
            result, expected = result.view(np.float32), expected.view(np.float32)
        assert np.array_equal(result, expected, equal_nan=True), (dtype, op)
print("exact")
