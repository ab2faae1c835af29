"""The gated MLP of which each rank computes a part: values and gradients of the whole one, plain and quantized."""

import pytest

RANKS = pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.long), 2, 3, pytest.param(4, marks=pytest.mark.long)]
)


@RANKS
def test_as_the_whole_layer(run_ranks, ranks):
    """Within 1e-4 of the plain formula; the way back bitwise."""
    checks = ["dense", "collectives", "quantized", "bad_input"]
    assert all("right" in output for output in run_ranks("parallel_mlp.py", ranks, *checks))
