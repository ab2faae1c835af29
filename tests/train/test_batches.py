"""train.Batches: the rows of mlx-lm, each once an epoch, and the same rows after a restart, also on other ranks."""

import json
import warnings

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tuner.trainer import default_loss, iterate_batches

from mlxdist import train
from mlxdist.base.errors import InvalidArgument
from mlxdist.train.batches import _permutation


def samples(count, longest=70, offsets=False):
    lengths = np.random.PCG64(count).random_raw(count) % longest + 1
    return [([i + 1] * int(n), int(n) // 2 if offsets else 0) for i, n in enumerate(lengths)]


def numbers(batch):
    """Of the samples in a padded batch of `samples`."""
    return (np.array(batch[0])[:, 0] - 1).tolist()


def raw(batch):
    return [np.array(array).tolist() for array in batch]


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("max_seq_length", [2048, 33, 20])
@pytest.mark.filterwarnings("ignore:Batches. .*sample")
def test_rows_are_those_of_mlx_lm(offsets, max_seq_length, monkeypatch):
    # To warn on one rank alone it starts MPI, whose variables all processes would inherit that later tests start.
    monkeypatch.setattr("mlx_lm.tuner.trainer.rprint", print)
    dataset = sorted(samples(24, offsets=offsets), key=lambda sample: len(sample[0]))  # as mlx-lm orders them
    ours = train.Batches(dataset, 4, max_seq_length, shuffle=False, epochs=1)
    theirs = sorted(map(raw, iterate_batches(dataset, 4, max_seq_length)))
    found = list(ours)
    assert sorted(map(raw, found)) == theirs
    assert all(array.dtype == mx.int32 for batch in found for array in batch)


@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 2**63 - 1), st.booleans())
@settings(max_examples=40, deadline=None)
def test_every_row_comes_once_an_epoch(count, size, seed, shuffle):
    size = min(size, count)
    batches = train.Batches(samples(count, 3), size, seed=seed, shuffle=shuffle)
    found = []
    while len(found) < 3 * count:
        assert batches.position == len(found) and batches.epoch == len(found) // count
        found += numbers(next(batches))
    for epoch in range(3):
        assert sorted(found[epoch * count : (epoch + 1) * count]) == list(range(count))
    if not shuffle:
        assert found[:count] == list(range(count))


def test_epochs_have_different_orders_that_no_version_changes():
    assert _permutation(8, 0, 0).tolist() == [6, 3, 4, 0, 7, 2, 1, 5]
    assert _permutation(8, 0, 1).tolist() == [2, 0, 4, 1, 5, 3, 6, 7]
    batches = train.Batches(samples(8, 3), 8)
    assert [numbers(next(batches)) for _ in range(2)] == [_permutation(8, 0, epoch).tolist() for epoch in range(2)]


@given(st.integers(5, 40), st.integers(0, 9), st.integers(1, 5), st.booleans())
@settings(max_examples=40, deadline=None)
@pytest.mark.filterwarnings("ignore:Batches. .*sample")
def test_ten_steps_are_five_a_restart_and_five(count, seed, size, packed):
    options = {"packed": packed, "skip_steps": [2, 6, 7]}
    dataset = samples(count, 9) + [[7] * 60]
    one = train.Batches(dataset, size, 9, seed=seed, **options)
    for _ in range(5):
        next(one)
    state = json.loads(json.dumps(one.state))
    rest = [raw(next(one)) for _ in range(5)]
    other = train.Batches(dataset, size, 9, seed=seed + 1, **options)
    other.restore(state)
    assert [raw(next(other)) for _ in range(5)] == rest and other.state == one.state
    assert other.step == 10 + 3  # with those that were skipped


def test_skipped_steps_leave_the_others_as_they_were():
    dataset = samples(50, 3)
    every = [raw(batch) for batch, _ in zip(train.Batches(dataset, 6), range(20))]
    batches = train.Batches(dataset, 6, skip_steps=[0, 1, *range(9, 12), 11, 12, 13])
    found = [(batches.step, raw(batch)) for batch, _ in zip(batches, range(10))]
    kept = [step for step in range(20) if not (step < 2 or 9 <= step < 14)][:10]
    assert found == [(step + 1, every[step]) for step in kept]


def test_a_ramp_up_is_resumed():
    ramp = train.BatchRampUp(2, 8, 2, 30)
    one = train.Batches(samples(40, 3), ramp)
    sizes = [len(next(one)[0]) for _ in range(4)]
    other = train.Batches(samples(40, 3), ramp)
    other.restore(one.state)
    sizes += [len(next(other)[0]) for _ in range(8)]
    position, expected = 0, []
    for _ in range(12):
        expected.append(ramp(position))
        position += expected[-1]
    assert sizes == expected and sizes[-1] == 8


@given(st.lists(st.integers(0, 12), max_size=12), st.integers(2, 9))
@settings(max_examples=60, deadline=None)
def test_packed_rows_have_every_target_once(lengths, width):
    tokens = np.arange(1, sum(lengths) + 1)
    dataset = [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])] if lengths else []
    rows = max(0, len(tokens) - 1) // (width - 1)
    if not rows:
        with pytest.raises(InvalidArgument, match="larger than an epoch, which has 0; make batch_size smaller, or max"):
            train.Batches(dataset, 1, width, packed=True)
        return
    found = list(train.Batches(dataset, 1, width, packed=True, epochs=1))
    assert all(batch.shape == (1, width) and lengths.tolist() == [[0, width]] for batch, lengths in found)
    targets = sorted(token for batch, _ in found for token in batch[0, 1:].tolist())
    assert targets == tokens[1 : 1 + rows * (width - 1)].tolist()
    assert all((np.diff(np.array(batch)) == 1).all() for batch, _ in found)


def test_a_rank_reads_its_own_rows_alone():
    class Counted(list):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    read: list[int] = []
    batches = train.Batches(Counted(samples(30)), 4)
    assert read == [0]  # which tells the kind of the dataset
    read.clear()
    batches.restore(batches.state | {"position": 4 * 1000, "step": 1000})
    assert not read
    next(batches)
    assert len(read) == 4


@pytest.mark.parametrize(
    "item", [[1, 2], np.array([1, 2]), mx.array([1, 2]), (1, 2, 3), ([1, 2], 1), (mx.array([1]), 0), []]
)
def test_samples_of_any_kind(item):
    batch, lengths = next(train.Batches([item, [5]], 2, shuffle=False))
    tokens, offset = item if isinstance(item, tuple) and len(item) == 2 else (item, 0)
    assert batch[0, : len(tokens)].tolist() == list(map(int, tokens))
    assert lengths.tolist() == [[offset, len(tokens)], [0, 1]]


@pytest.mark.parametrize("item", [{"text": "a"}, "text", 7, [[1], [2]], [[1], [2, 3]], [0.5], (1, 2), ([1], [2])])
def test_samples_that_are_not_tokens(item):
    with pytest.raises(InvalidArgument, match=f"sample 0 of the dataset is a {type(item).__name__} and not token ids"):
        train.Batches([item], 1)


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"batch_size": 0}, "batch_size must be a positive integer"),
        ({"batch_size": "8"}, "batch_size must be a positive integer"),
        (
            {"batch_size": 9},
            "a batch of 9 rows is larger than an epoch, which has 8; make batch_size smaller, or pack the samples",
        ),
        ({"micro_batches": 3}, "a batch of 8 rows does not divide into 1 ranks x 3 micro-batches; take 6 or 9 rows"),
        ({"micro_batches": 9}, "take 9 rows"),
        ({"micro_batches": 0}, "micro_batches must be a positive integer"),
        ({"max_seq_length": 1}, "take at least 2"),
        ({"epochs": 0}, "epochs must be a positive integer"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"seed": None}, "seed is None"),
        ({"skip_steps": [(3, 3)]}, "a step of skip_steps is \\(3, 3\\), not an integer from 0"),
        ({"skip_steps": [-1]}, "a step of skip_steps is -1"),
        ({"skip_steps": "5:7"}, "skip_steps is '5:7', not a list of steps"),
        ({"skip_steps": 5}, "skip_steps is 5, not a list of steps"),
        ({"rank_shares": [1, 2]}, "rank_shares"),
        ({"packed": True, "dataset": samples(8, offsets=True)}, "tokens that are no target, which packed rows do not"),
    ],
)
def test_bad_arguments(options, problem):
    with pytest.raises(InvalidArgument, match=problem):
        train.Batches(**{"dataset": samples(8), "batch_size": 8} | options)


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"rows": 9}, "the state has rows=9, and these batches 8"),
        ({"shuffle": False}, "the state has shuffle=False"),
        ({"row_length": 20}, "the state has row_length=20, and these batches None"),
        ({"position": -4}, "position is -4"),
        ({"step": 1.5}, "step is 1.5"),
        ({"seed": "x"}, "seed is 'x'"),
    ],
)
def test_bad_states(change, problem):
    batches = train.Batches(samples(8), 4)
    before = batches.state
    with pytest.raises(InvalidArgument, match=problem):
        batches.restore(before | change)
    with pytest.raises(InvalidArgument, match="the state has no position"):
        batches.restore({name: value for name, value in before.items() if name != "position"})
    assert batches.state == before


def test_packed_rows_of_another_length_are_others():
    state = train.Batches(samples(20), 1, 10, packed=True).state
    train.Batches(samples(20), 2, 10, packed=True).restore(state)
    other = train.Batches([[1] * (9 * state["rows"] * 2 + 1)], 1, 19, packed=True)
    with pytest.raises(InvalidArgument, match="the state has row_length=10, and these batches 19"):
        other.restore(state)
    with pytest.raises(InvalidArgument, match="the state has row_length=10, and these batches None"):
        train.Batches([[1]] * state["rows"], 1).restore(state)


def test_truncation_warns():
    with pytest.warns(UserWarning, match="a sample of 40 tokens is truncated to max_seq_length=20"):
        next(train.Batches([[1] * 40], 1, 20))


def test_a_prompt_that_leaves_no_target_warns():
    dataset = [([1] * 40, 19), ([1] * 40, 20)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batch = next(train.Batches(dataset, 2, 20, shuffle=False))
    assert [str(one.message).split(";")[0] for one in caught if "no target" in str(one.message)] == [
        "Batches: sample 1 has no target: its first is token 20, and max_seq_length is 20"
    ]
    targets = [
        default_loss(lambda x: mx.zeros((*x.shape, 3)), *(part[row : row + 1] for part in batch))[1] for row in (0, 1)
    ]
    assert [int(count) for count in targets] == [1, 0]
