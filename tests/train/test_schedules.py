"""train.BatchRampUp and the rules of learning rates against their formulas."""

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx import optimizers

from mlxdist import train
from mlxdist.base.errors import InvalidArgument


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 40), st.integers(1, 10**7))
def test_ramp_up(start, increment, increments, samples):
    end = start + increment * increments
    ramp = train.BatchRampUp(start, end, increment, samples)
    assert ramp(0) == start and ramp(samples) == ramp(samples * 1000) == end
    found = [ramp(samples * i // 97) for i in range(97)]
    assert found == sorted(found) and set(found) <= set(ramp.sizes)


def test_the_sizes_take_equal_parts_of_a_ramp_up():
    ramp = train.BatchRampUp(4, 10, 2, 30)
    assert [ramp(position) for position in (0, 9, 10, 19, 20, 29, 30)] == [4, 4, 6, 6, 8, 8, 10]


@pytest.mark.parametrize(
    "arguments", [(4, 4, 1, 9), (8, 4, 2, 9), (4, 9, 2, 9), (0, 4, 2, 9), (4, 8, 2, 0), (4, 8, 2.0, 9)]
)
def test_no_ramp_up(arguments):
    with pytest.raises(InvalidArgument, match="^BatchRampUp: "):
        train.BatchRampUp(*arguments)


def test_scaling():
    assert train.linear_scaling(0.1, 1024, 256) == pytest.approx(0.4)
    assert train.sqrt_scaling(0.1, 1024, 256) == pytest.approx(0.2)
    for rule in (train.linear_scaling, train.sqrt_scaling):
        with pytest.raises(InvalidArgument, match="base_batch_size must be a positive integer"):
            rule(0.1, 1024, 0)


@pytest.mark.parametrize("schedule", [1.0, optimizers.cosine_decay(1.0, 10), lambda step: 1.0])
def test_warm_up(schedule):
    optimizer = optimizers.SGD(train.warm_up(schedule, 4, init=0.2))
    found = []
    for _ in range(7):
        optimizer.update({}, {})
        found.append(optimizer.learning_rate.item())  # that of this update
    then = [mx.array(schedule(mx.array(i))).item() if callable(schedule) else 1.0 for i in range(3)]
    assert found == pytest.approx([0.2, 0.4, 0.6, 0.8, *then])
