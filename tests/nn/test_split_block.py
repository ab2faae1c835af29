"""SplitBlock and SplitModel: as the dense layer and model of mlx-lm, and two submissions per layer."""

import pytest
from rank_counts import one_to_four

# Where compilers would take most of the time: the same without them.
INTERPRETED = {"MLX_DISABLE_COMPILE": "1"}


@one_to_four(2)
def test_as_the_dense_layer(run_scenarios, ranks):
    """Llama and Qwen3, GQA, fewer KV heads than ranks, uneven shards; prefill, tokens, a trimmed cache; bad input."""
    run_scenarios("split_block.py", ranks, "layers", "bad_input", environment=INTERPRETED)


@pytest.mark.long
@one_to_four(2)
def test_counts_and_writing_in_place(run_scenarios, ranks):
    run_scenarios("split_block.py", ranks, "counts", "in_place")


@pytest.mark.long
@one_to_four()
def test_as_the_dense_layer_when_compiled(run_scenarios, ranks):
    run_scenarios("split_block.py", ranks, "layers", timeout=120)


@one_to_four()
def test_other_caches(run_scenarios, ranks):
    """Rotating, quantized and batched caches between compiled shards."""
    run_scenarios("split_block.py", ranks, "caches", timeout=120)


@one_to_four()
def test_biases_odd_sizes_and_other_rotary_embeddings(run_scenarios, ranks):
    run_scenarios("split_block.py", ranks, "more_layers", timeout=120)


@pytest.mark.long
@one_to_four(2)
def test_models_generate_the_same_tokens(run_scenarios, ranks):
    run_scenarios("split_block.py", ranks, "models", timeout=120)


@one_to_four()
def test_quantized(run_scenarios, ranks):
    """Widths, group sizes and modes, also different ones in one layer."""
    run_scenarios("split_block.py", ranks, "quantized_layers", timeout=120)


@pytest.mark.long
def test_16_bit(run_scenarios):
    run_scenarios("split_block.py", 2, "dtypes", timeout=240)
