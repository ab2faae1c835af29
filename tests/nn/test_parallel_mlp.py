"""The gated MLP of which each rank computes a shard: values and gradients of the full one, plain and quantized."""

from rank_counts import one_to_four


@one_to_four(2)
def test_as_the_full_layer(run_scenarios, ranks):
    """Within 1e-4 of the plain formula; the way back bitwise."""
    checks = ["dense", "collectives", "quantized", "bad_input"]
    run_scenarios("parallel_mlp.py", ranks, *checks)
