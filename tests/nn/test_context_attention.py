"""Ulysses and ring attention: as MLX's attention over the full sequence in one process, forward and backward."""

import mlx.core as mx
import pytest

import mlxdist
from mlxdist.nn import gather_sequence, shard_sequence
from mlxdist.nn.context.sequence import chunk_starts, in_order, zigzag

RANKS = pytest.mark.parametrize(
    "ranks", [1, 2, pytest.param(3, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)]
)
SCENARIOS = ["cases", "dtypes", "bad_input"]


@RANKS
@pytest.mark.parametrize("scenario", SCENARIOS + ["messages"])
def test_ulysses_attention(run_ranks, scenario, ranks):
    assert run_ranks("context_attention.py", ranks, scenario, "ulysses") == ["equal\n"] * ranks


@RANKS
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_ring_attention(run_ranks, scenario, ranks):
    assert run_ranks("context_attention.py", ranks, scenario, "ring") == ["equal\n"] * ranks


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_heads_that_ulysses_cannot_divide(run_ranks, ranks):
    assert run_ranks("context_attention.py", ranks, "wrong_heads", "ulysses") == ["equal\n"] * ranks


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_zigzag(ranks):
    x = mx.arange(2 * ranks * 3)
    shards = zigzag(x, 0, ranks)
    assert mx.array_equal(in_order(shards, 0, ranks), x)
    for rank, shard in enumerate(mx.split(shards, ranks)):
        assert [part[0].item() for part in mx.split(shard, 2)] == chunk_starts(rank, ranks, shard.size)


def test_a_sequence_in_a_group_of_one():
    group = mlxdist.init()
    x = mx.arange(5)
    assert mx.array_equal(gather_sequence(shard_sequence(x, 0, group), 0, group), x)
