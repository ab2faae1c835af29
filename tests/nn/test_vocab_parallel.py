"""Embedding and output layer sharded over the vocabulary: values, gradients and quantized forms of the full layers."""

from rank_counts import one_to_four


@one_to_four(3)
def test_as_the_full_layers(run_scenarios, ranks):
    """Embeddings and the way back bitwise, products and gradients within 1e-5."""
    checks = ["embedding", "tied", "quantized", "head", "bad_input"]
    run_scenarios("vocab_parallel.py", ranks, *checks)
