"""Embedding and output layer cut over the vocabulary: values, gradients and quantized forms of the whole layers."""

import pytest

RANKS = pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.long), 2, 3, pytest.param(4, marks=pytest.mark.long)]
)


@RANKS
def test_as_the_whole_layers(run_ranks, ranks):
    """Embeddings and the way back bitwise, products and gradients within 1e-5."""
    checks = ["embedding", "tied", "quantized", "head", "bad_input"]
    assert all("right" in output for output in run_ranks("vocab_parallel.py", ranks, *checks))
