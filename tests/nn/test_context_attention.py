"""Ulysses and ring attention: as MLX's attention over the full sequence in one process, forward and backward."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlxdist
from mlxdist.nn import gather_sequence, shard_sequence
from mlxdist.nn.context_parallel.sequence import chunk_starts, in_order, zigzag
from mlxdist.nn.context_parallel.tiles import causal_tile, pieces, tiles

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


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_what_a_ring_sends(run_ranks, ranks):
    assert run_ranks("context_attention.py", ranks, "ring_messages", "ring") == ["equal\n"] * ranks


@pytest.mark.long
def test_what_a_ring_holds(run_ranks):
    assert run_ranks("context_attention.py", 2, "memory", "ring") == ["equal\n"] * 2


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_ranks_have_equal_work(ranks):
    """The scores that a rank computes, also those of a tile that are then masked: in all, and at each step."""
    of_rank = [pieces(chunk_starts(rank, ranks, 4096), 4096) for rank in range(ranks)]
    steps = [[computed(of_rank[rank], of_rank[rank - step]) for rank in range(ranks)] for step in range(ranks)]
    for work in [*steps, [sum(of_step) for of_step in zip(*steps)]]:
        assert max(work) <= 1.05 * sum(work) / ranks
    assert sum(map(sum, steps)) <= 1.07 * (4096 * ranks) ** 2 / 2


def computed(queries, keys):
    return sum(
        (queries[i].stop - queries[i].start) * (keys[j].stop - keys[j].start)
        for i, j, _ in tiles(queries, keys, True, None)
    )


@given(st.integers(1, 5), st.integers(1, 700), st.one_of(st.none(), st.integers(1, 2000)))
@settings(deadline=None, max_examples=40)
def test_tiles_hold_every_score_once(ranks, chunk, window_size):
    """What the tiles of all ranks compute, each with its mask, is the causal mask of the sequence."""
    of_rank = [pieces(chunk_starts(rank, ranks, 2 * chunk), 2 * chunk) for rank in range(ranks)]
    length = 2 * chunk * ranks
    counted = np.zeros((length, length), np.int8)
    for queries, keys in itertools.product(of_rank, of_rank):
        for i, j, partly in tiles(queries, keys, True, window_size):
            query, key = queries[i], keys[j]
            where = np.s_[query.position : query.last + 1, key.position : key.last + 1]
            counted[where] += np.array(causal_tile(query, key, window_size)) if partly else np.int8(1)
    distance = np.arange(length)[:, None] - np.arange(length)
    assert np.array_equal(counted, (distance >= 0) & (distance < (window_size or length)))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_heads_that_ulysses_cannot_divide(run_ranks, ranks):
    assert run_ranks("context_attention.py", ranks, "wrong_heads", "ulysses") == ["equal\n"] * ranks


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_shards_of_unequal_length(run_ranks, method):
    assert run_ranks("context_attention.py", 2, "unequal_shards", method) == ["equal\n"] * 2


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
    assert mx.array_equal(gather_sequence(shard_sequence(x, 0, group=group), 0, group=group), x)
