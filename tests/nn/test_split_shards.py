"""Split blocks of models that load_sharded has sharded: the full model's logits, in no more memory than a layer."""

import pytest
from rank_counts import one_to_four

# Where compilers would take most of the time: the same without them.
INTERPRETED = {"MLX_DISABLE_COMPILE": "1"}


@pytest.mark.long
@one_to_four(2)
def test_every_kind_of_shard(run_ranks, tmp_path, ranks):
    """Local and streamed files, fewer KV heads than ranks, biases, quantized, unequal shards; with adapters."""
    outputs = run_ranks("split_shards.py", ranks, "shards,adapters", tmp_path, environment=INTERPRETED)
    assert all(output.count("right") == 2 for output in outputs)


@one_to_four(2)
def test_stages(run_ranks, tmp_path, ranks):
    outputs = run_ranks("split_shards.py", ranks, "stages", tmp_path, environment=INTERPRETED)
    assert all("right" in output for output in outputs)


@pytest.mark.long
@one_to_four(2)
def test_memory_at_load_is_the_shard_and_one_layer(run_ranks, tmp_path, ranks):
    outputs = run_ranks("split_shards.py", ranks, "memory", tmp_path, environment=INTERPRETED)
    assert all("right" in output for output in outputs)


@one_to_four(2)
def test_ranks_decide_together_which_layers_are_faster(run_ranks, tmp_path, ranks):
    outputs = run_ranks("split_shards.py", ranks, "faster,refused", tmp_path, environment=INTERPRETED)
    assert all(output.count("right") == 2 for output in outputs)


@pytest.mark.long
@one_to_four()
def test_compiled(run_ranks, tmp_path, ranks):
    outputs = run_ranks("split_shards.py", ranks, "shards,adapters,stages", tmp_path, timeout=240)
    assert all(output.count("right") == 3 for output in outputs)
