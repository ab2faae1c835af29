"""mlxdist.train.MixedPrecision: training in 16 bits that keeps what 16 bits lose, on one rank and on several."""

import math

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

import mlxdist
from mlxdist.train import Checkpoints, MixedPrecision
from mlxdist.train.rounding import round_stochastically

LONG = pytest.mark.long
TARGET = mx.array([[0.3, -0.7, 0.2, 1.1]])


def distance(model: nn.Module) -> mx.array:
    return (model.weight - TARGET.astype(model.weight.dtype)).square().sum()


def model_of(value: float = 1.0) -> nn.Module:
    model = nn.Linear(4, 4, bias=False)
    model.weight = mx.full((4, 4), value)
    return model


def trained(optimizer, steps: int, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """Towards a target, from ones."""
    model = model_of()
    if isinstance(optimizer, MixedPrecision):
        optimizer.init(model)
    else:
        model.set_dtype(dtype)
    for _ in range(steps):
        _, gradients = nn.value_and_grad(model, lambda m: (m.weight - TARGET.astype(m.weight.dtype)).square().sum())(
            model
        )
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
    return model


def error(model: nn.Module, reference: nn.Module) -> float:
    return mx.abs(model.weight.astype(mx.float32) - reference.weight).max().item()


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("masters", [True, "kahan", "stochastic"])
def test_small_updates_count(masters, dtype):
    """300 steps whose updates are below half a unit in the last place: 16 bits alone stand still."""
    rate = 2e-5 if dtype == mx.float16 else 1e-4
    reference = trained(optim.SGD(rate), 300)
    plain = error(trained(optim.SGD(rate), 300, dtype), reference)
    mixed = error(trained(MixedPrecision(optim.SGD(rate), dtype, masters), 300), reference)
    assert mixed < plain / 3, (mixed, plain)


@pytest.mark.parametrize("state_dtype", [None, mx.float32, mx.bfloat16])
@pytest.mark.parametrize("masters", [True, "kahan"])
def test_equal_to_float32(masters, state_dtype):
    reference = trained(optim.AdamW(1e-2), 50)
    mixed = trained(MixedPrecision(optim.AdamW(1e-2), mx.bfloat16, masters, state_dtype=state_dtype), 50)
    assert mixed.weight.dtype == mx.bfloat16
    assert error(mixed, reference) < 0.02


def test_state_has_the_dtype_asked_for():
    for state_dtype in (mx.float32, mx.bfloat16, mx.float16):
        optimizer = MixedPrecision(optim.AdamW(1e-2), state_dtype=state_dtype)
        trained(optimizer, 2)
        moments = [array for _, array in tree_flatten(optimizer.state["optimizer"]) if array.ndim]
        assert moments
        assert all(array.dtype == state_dtype for array in moments)


def test_frozen_and_quantized_parameters():
    """A quantized layer keeps its packed weights, and computes in the dtype: its scales have it."""
    model = nn.Sequential(nn.Linear(64, 64), nn.QuantizedLinear(64, 64), nn.Linear(64, 4))
    model.layers[1].freeze()
    model.layers[0].freeze()
    packed = mx.array(model.layers[1].weight)
    optimizer = MixedPrecision(optim.Adam(1e-3))
    optimizer.init(model)
    assert mx.array_equal(model.layers[1].weight, packed)
    assert model(mx.ones((2, 64), mx.bfloat16)).dtype == mx.bfloat16
    assert model.layers[0].weight.dtype == mx.bfloat16
    assert [path for path, _ in tree_flatten(optimizer.state["masters"])] == ["layers.2.weight", "layers.2.bias"]


@pytest.mark.parametrize("masters", [True, "kahan", "stochastic"])
@pytest.mark.parametrize("trained", [(0,), (1,), (0, 2)])
def test_float16_with_layers_that_have_nothing_to_train(trained, masters, tmp_path):
    """Also of a state that a checkpoint has kept, which has leaves alone. Numbers are those of a model in float32."""
    x = mx.random.normal((8, 16), key=mx.random.key(0))

    def run(optimizer, restore_after: int = 5) -> nn.Module:
        mx.random.seed(3)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)))
        model.freeze()
        for number in trained:
            model.layers[number].unfreeze()
        scaled = getattr(optimizer, "scale", lambda loss: loss)
        optimizer.init(model if isinstance(optimizer, MixedPrecision) else model.trainable_parameters())
        with Checkpoints(tmp_path, trainable_only=True) as checkpoints:
            for step in range(6):
                if step == restore_after:
                    checkpoints.save(step, {"model": model, "optimizer": optimizer})
                    checkpoints.wait()
                    checkpoints.load({"model": model, "optimizer": optimizer})
                _, gradients = nn.value_and_grad(model, lambda m: scaled((m(x) ** 2).astype(mx.float32).mean()))(model)
                optimizer.update(model, gradients)
        return model

    expected = dict(tree_flatten(run(optim.SGD(1e-1, momentum=0.5), restore_after=9).parameters()))
    found = run(MixedPrecision(optim.SGD(1e-1, momentum=0.5), mx.float16, masters, "dynamic"))
    for path, array in tree_flatten(found.parameters()):
        assert mx.allclose(array, expected[path], 0, 2e-3), path


def test_a_loss_scale_keeps_what_underflows():
    """Gradients of 1e-9 are 0 in float16."""
    found = {}
    for scale in (None, 2.0**15, "dynamic"):
        model = model_of()
        optimizer = MixedPrecision(optim.SGD(1e6), mx.float16, loss_scale=scale)
        optimizer.init(model)
        small = lambda m, o=optimizer: o.scale(m.weight.sum().astype(mx.float32) * 1e-9)
        _, gradients = nn.value_and_grad(model, small)(model)
        optimizer.update(model, gradients)
        found[scale] = 1 - model.weight[0, 0].item()
    assert found[None] == 0
    assert found[2.0**15] == pytest.approx(1e-3, rel=0.05)
    assert found["dynamic"] == pytest.approx(1e-3, rel=0.05)


def test_an_overflow_is_skipped_and_lowers_the_scale():
    model = model_of()
    optimizer = MixedPrecision(optim.Adam(1e-2), mx.float16, loss_scale="dynamic")
    optimizer.init(model)
    scale = optimizer.loss_scale.item()
    for value, skipped in [(1.0, 0), (float("inf"), 1), (float("nan"), 2), (1.0, 2)]:
        before = mx.array(model.weight)
        optimizer.update(model, {"weight": mx.full((4, 4), value, mx.float16)})
        assert mx.array_equal(before, model.weight) == (not np.isfinite(value))
        assert optimizer.state["skipped"].item() == skipped
        assert optimizer.loss_scale.item() == scale / 2**skipped
    assert optimizer.state["optimizer"]["step"].item() == 2


@pytest.mark.parametrize("masters", [True, "kahan", "stochastic"])
def test_resumed_bitwise(masters):
    make = lambda: MixedPrecision(optim.AdamW(1e-2), mx.bfloat16, masters, state_dtype=mx.bfloat16)
    straight = trained(make(), 10)
    first = make()
    model = trained(first, 5)
    second = make()
    second.state = first.state
    for _ in range(5):
        _, gradients = nn.value_and_grad(model, lambda m: (m.weight - TARGET.astype(m.weight.dtype)).square().sum())(
            model
        )
        second.update(model, gradients)
    assert mx.array_equal(model.weight, straight.weight)


@settings(max_examples=40)
@given(
    value=st.floats(-60000, 60000, width=32), dtype=st.sampled_from([mx.bfloat16, mx.float16]), seed=st.integers(0, 99)
)
def test_stochastic_rounding_is_unbiased(value, dtype, seed):
    x = mx.full((4096,), value)
    rounded = np.array(round_stochastically(x, dtype, mx.random.key(seed)).astype(mx.float32), np.float64)
    exact = x[0].item()
    smallest, digits = (-126, 7) if dtype == mx.bfloat16 else (-14, 10)
    unit = 2.0 ** (max(math.frexp(exact)[1] - 1, smallest) - digits)  # in the last place
    assert np.abs(rounded - exact).max() <= unit
    assert abs(rounded.mean() - exact) <= unit / np.sqrt(4096) * 3  # six standard errors, the largest of which is 1/2


def test_numbers_that_a_dtype_has_stay():
    for dtype in (mx.bfloat16, mx.float16):
        for value in (0.0, -0.0, 1.0, -2.5, 6.103515625e-05, 5.960464477539063e-08, float("inf"), float("-inf")):
            if dtype == mx.bfloat16 and 0 < value < 1e-4:
                continue
            found = round_stochastically(mx.full((64,), value), dtype, mx.random.key(1))
            assert (found == value).all(), (dtype, value)
        assert mx.isnan(round_stochastically(mx.array([float("nan")]), dtype, mx.random.key(1))).all()


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=LONG), pytest.param(4, marks=LONG)])
@pytest.mark.parametrize("scenario", ["overflow", "sharded", "replicas"])
def test_ranks(run_scenarios, scenario, ranks):
    run_scenarios("mixed_precision.py", ranks, scenario)


def test_bad_input():
    for arguments, text in [
        (("adam",), "must be one of mlx.optimizers"),
        ((MixedPrecision(optim.SGD(1)),), "must be one of mlx.optimizers"),
        ((optim.SGD(1), mx.float32), "dtype must be"),
        ((optim.SGD(1), "bfloat16"), "dtype must be"),
        ((optim.SGD(1), mx.bfloat16, "masters"), "masters must be"),
        ((optim.SGD(1), mx.bfloat16, True, -1.0), "loss_scale must be"),
        ((optim.SGD(1), mx.bfloat16, True, None, mx.int32), "state_dtype must be"),
        ((optim.SGD(1), mx.bfloat16, True, None, "float32"), "state_dtype must be"),
    ]:
        with pytest.raises(mlxdist.InvalidArgument, match=text):
            MixedPrecision(*arguments)
