"""How a dimension is sharded over the ranks: sizes, and what every rank takes. Joining is in
test_tensor_parallel.py."""

from fractions import Fraction
from math import gcd

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxdist import InvalidArgument
from mlxdist.nn.layout.partition import segment_lengths, shard_slice, slices, split_sizes, take

WEIGHTS = st.lists(st.one_of(st.integers(1, 100), st.floats(0.01, 100)), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("total", "ranks", "weights", "multiple", "segments", "sizes"),
    [
        (12, 4, None, 1, 1, [3, 3, 3, 3]),
        (12, 1, None, 4, 3, [12]),
        (12, 2, [2, 1], 1, 1, [8, 4]),
        (10, 2, [2, 1], 1, 1, [7, 3]),
        (10, 3, [1, 1, 1], 1, 1, [4, 3, 3]),
        (256, 2, [2, 1], 64, 1, [192, 64]),
        (4, 3, [1000, 1, 1], 1, 1, [2, 1, 1]),
        (12, 2, [2, 1], 1, (2, 1, 1), [8, 4]),  # 6 heads of queries, 3 of keys and values: 2 and 1 of the latter
        (24, 2, [2, 1], 2, 2, [16, 8]),
        (8, 2, [3, 1], 1, 2, [6, 2]),
    ],
)
def test_sizes(total, ranks, weights, multiple, segments, sizes):
    assert split_sizes("x", total, ranks, weights, multiple, segments) == sizes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((10, 4), "10 cannot be split into 4 equal shards"),
        ((12, 2, None, 8), "12 cannot be split into whole multiples of 8"),
        ((24, 2, None, 8), "24 in multiples of 8 cannot be split into 2 equal shards"),
        ((3, 4), "3 is too little for 4 ranks"),
        ((3, 4, [1, 1, 1, 1]), "3 is too little for 4 ranks"),
        ((128, 3, [1, 1, 1], 64), "128 in multiples of 64 is too little for 3 ranks, each of which needs at least 64"),
        ((12, 2, [1]), "rank_shares must be 2 numbers, one per rank, not [1]"),
        ((12, 2, [1, 0]), "rank_shares must be positive numbers"),
        ((12, 2, [1, -1.0]), "rank_shares must be positive numbers"),
        ((12, 2, [1, float("nan")]), "rank_shares must be positive numbers"),
        ((12, 2, [1, float("inf")]), "rank_shares must be positive numbers"),
        ((12, 2, [1, "1"]), "rank_shares must be positive numbers"),
        ((0, 2), "total must be a positive integer"),
        ((12, 0), "ranks must be a positive integer"),
        ((12, 2, None, -1), "multiple must be a positive integer"),
        ((12, 2, None, 1, 0), "segments must be a positive integer"),
        ((12, 2, None, 1, (4, 0)), "segments must be a positive integer"),
        ((12, 2, None, 1, ()), "segments must be a positive integer"),
        ((12, 2, None, 1, (1.5, 1.5)), "segments must be a positive integer"),
        ((12, 2, None, 1, 5), "12 cannot be split into segments in the proportion [1, 1, 1, 1, 1]"),
        ((12, 2, None, 1, (8, 3, 1)), "12 in multiples of 12 (segments [8, 3, 1]) is too little for 2 ranks"),
        ((12, 2, None, 4, (2, 1)), "12 in multiples of 12 (segments [8, 4], each in multiples of 4) is too little"),
        ((36, 2, None, 4, (2, 1)), "36 in multiples of 12 (segments [24, 12], each in multiples of 4) cannot be split"),
        ((12, 2, None, 8, (2, 1)), "the segment of 4 among [8, 4] cannot be split into whole multiples of 8"),
    ],
)
def test_what_cannot_be_sharded_is_rejected(arguments, words):
    with pytest.raises(InvalidArgument) as error:
        split_sizes("down_proj", *arguments)
    assert str(error.value).startswith("down_proj: ")
    assert words in str(error.value)


@settings(deadline=None, max_examples=200)
@given(WEIGHTS, st.integers(0, 200), st.integers(1, 70), st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_sizes_are_whole_multiples_in_proportion_to_the_weights(weights, spare, multiple, segments):
    ranks, unit = len(weights), multiple * sum(segments)
    units = ranks + spare
    sizes = split_sizes("x", units * unit, ranks, weights, multiple, segments)
    assert sum(sizes) == units * unit
    assert len(sizes) == ranks
    lengths = segment_lengths("x", units * unit, segments)
    for rank in range(ranks):
        for place, length in zip(slices(sizes, rank, segments), lengths):
            assert place.stop - place.start >= multiple
            assert (place.stop - place.start) % multiple == 0
            assert (place.stop - place.start) * sum(sizes) == length * sizes[rank]
    # No share is further from its weight than rounding makes it, where no rank had to be given its first one.
    step = sum(sizes) // gcd(*(length // multiple for length in lengths))
    exact = [sum(sizes) * Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    if all(share >= step for share in exact):
        assert all(abs(size - share) < step for size, share in zip(sizes, exact))
    assert split_sizes("x", sum(sizes), ranks, sizes, multiple, segments) == sizes


@settings(deadline=None, max_examples=200)
@given(WEIGHTS, st.integers(0, 8), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(-3, 2), st.data())
def test_the_shards_of_all_ranks_make_the_full_array(weights, spare, segments, axis, data):
    """All ranks' shards, put together segment by segment, and the shards of one segment are in rank order."""
    ranks = len(weights)
    total = (ranks + spare) * sum(segments)
    sizes = split_sizes("x", total, ranks, weights, segments=segments)
    shape = data.draw(st.tuples(*[st.integers(0, 3)] * 3).map(list))
    shape[axis] = total
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    parts = [np.array(take(mx.array(x), axis, sizes, rank, segments)) for rank in range(ranks)]
    assert [taken.shape[axis] for taken in parts] == sizes
    cuts = [np.cumsum([p.stop - p.start for p in slices(sizes, rank, segments)])[:-1] for rank in range(ranks)]
    pieces = [np.split(taken, cut, axis) for taken, cut in zip(parts, cuts)]
    whole = np.concatenate([pieces[rank][s] for s in range(len(segments)) for rank in range(ranks)], axis)
    assert np.array_equal(whole, x)


def test_numbers_of_numpy():
    sizes = split_sizes("x", np.int32(2**31 - 2), np.int64(2), np.array([2, 1], np.int8), np.int16(2))
    assert sizes == [1431655764, 715827882] and all(type(size) is int for size in sizes)
    assert split_sizes("x", 12, 2, [np.float32(0.5), np.float16(1)]) == [4, 8]


def test_take_and_part():
    x = mx.arange(12)
    assert shard_slice([8, 4], 1) == slice(8, 12)
    assert take(x, 0, [8, 4], 1).tolist() == [8, 9, 10, 11]
    assert take(x, -1, [9, 3], 1, segments=(2, 1)).tolist() == [6, 7, 11]
    assert take(x, 0, [6, 6], 0, segments=2).tolist() == [0, 1, 2, 6, 7, 8]
    assert slices([6, 6], 1, (4, 2)) == [slice(4, 8), slice(10, 12)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((1, [8, 4], 0), "axis is 1"),
        ((0, [8, 5], 0), "must be 13 long"),
        ((0, [8, 4], 2), "there are sizes for 2 ranks"),
        ((0, [8, 4], -1), "there are sizes for 2 ranks"),
        ((0, [7, 5], 0, 2), "the segment of 6 cannot be sharded in the proportion [7, 5]"),
    ],
)
def test_what_cannot_be_taken_is_rejected(arguments, words):
    with pytest.raises(InvalidArgument) as error:
        take(mx.arange(12), *arguments)
    assert words in str(error.value)
