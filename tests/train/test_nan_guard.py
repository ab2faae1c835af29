"""mlxdist.debug.NanGuard: the first activation that is not finite, without changing a bit of the step."""

import gc
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny_models
from mlx.utils import tree_flatten

import mlxdist
from mlxdist.debug import NanGuard

TOKENS = mx.arange(24).reshape(2, 12)


def loss_of(model: nn.Module) -> mx.array:
    return nn.losses.cross_entropy(model(TOKENS[:, :-1]), TOKENS[:, 1:], reduction="mean")


def gradients_of(model: nn.Module) -> dict[str, mx.array]:
    loss, gradients = nn.value_and_grad(model, loss_of)(model)
    found = dict(tree_flatten(gradients)) | {"loss": loss}
    mx.eval(found)
    return found


def equal(one: dict[str, mx.array], other: dict[str, mx.array]) -> bool:
    return one.keys() == other.keys() and all(mx.array_equal(one[key], other[key]).item() for key in one)


def failure(guard: NanGuard) -> str:
    with pytest.raises(mlxdist.NonFinite) as caught:
        guard.check()
    return str(caught.value)


class Block(nn.Module):
    """Sums of residuals overflow between two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8, bias=False), nn.RMSNorm(8)

    def __call__(self, x: mx.array) -> mx.array:
        return self.norm(x + self.first(x))


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "deepseek_v3", "gpt2", "gemma2", "mamba2"])
def test_a_step_is_bitwise_the_same(name):
    model = tiny_models.build(name)
    kinds = [type(module) for module in model.modules()]
    expected = gradients_of(model)
    with NanGuard(model) as guard:
        assert equal(gradients_of(model), expected)
        guard.check()
    assert [type(module) for module in model.modules()] == kinds
    assert equal(gradients_of(model), expected)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_the_first_one_is_named(dtype, value):
    model = tiny_models.build("qwen3")
    model.set_dtype(dtype)
    with NanGuard(model) as guard:
        gradients_of(model)
        guard.check()
        weight = model.layers[2].self_attn.o_proj.weight
        weight[3, 4] = float(value)
        gradients_of(model)
        text = failure(guard)
    assert text.startswith("NanGuard: step 1: the output of model.layers.2.self_attn.o_proj is not finite\n")
    rows = text.splitlines()[2:]
    assert (
        str(dtype).removeprefix("mlx.core.") in rows[-1] and " output of model.layers.2.self_attn.o_proj " in rows[-1]
    )
    assert len({row.partition(" of ")[2] for row in rows[:-1]}) == 20
    assert not any("nan" in row or "inf" in row for row in rows[:-1])


def test_extremes_are_those_of_the_arrays():
    model = Block()
    x = mx.random.normal((4, 8))
    with NanGuard(model) as guard:
        model.norm.weight[0] = float("nan")
        mx.eval(model(x))
        rows = [row.split() for row in failure(guard).splitlines()[2:]]
    y = model.first(x)
    for row, array in zip(rows, (x, y, x + y), strict=False):
        assert [float(value) for value in row[:2]] == pytest.approx([array.min().item(), array.max().item()], rel=1e-3)
    assert [" ".join(row[5:8]) for row in rows] == [
        "input of Block", "output of first", "input of norm", "output of norm",
    ]  # fmt: skip


def test_a_sum_between_modules():
    """It is the norm's input that overflows, not the norm."""
    model = Block()
    model.first.weight = mx.eye(8)
    model.set_dtype(mx.float16)
    with NanGuard(model) as guard:
        mx.eval(model(mx.full((1, 8), 4e4, mx.float16)))
        assert "the input of norm is not finite" in failure(guard)
    with NanGuard(model) as guard:
        mx.eval(model(mx.full((1, 8), float("inf"), mx.float16)))
        assert "the input of Block is not finite" in failure(guard)


def test_only_every_kth_step_is_observed():
    model = Block()
    with NanGuard(model, every=3) as guard:
        for step in range(7):
            bad = step in (1, 2, 4)
            mx.eval(model(mx.full((1, 8), float("nan") if bad else 1.0)))
            guard.check()
        mx.eval(model(mx.ones((1, 8))))
        guard.check()
        guard.check()  # a step without a call, not observed
        mx.eval(model(mx.full((1, 8), float("nan"))))
        assert "step 9: the input of Block is not finite; steps are observed every 3" in failure(guard)


def test_evaluated_with_the_step():
    """What check() reads is there already, and holds no activation."""
    model = tiny_models.build("qwen3")
    with NanGuard(model) as guard:
        gradients_of(model)
        gc.collect()
        before = mx.get_active_memory()
        guard.check()
        gc.collect()
        assert before - mx.get_active_memory() < 2**20


def test_checkpointed_layers():
    model = tiny_models.build("qwen3")
    expected = gradients_of(model)
    for layer in model.layers:
        layer.__class__ = type("Checkpointed", (type(layer),), {"__call__": checkpointed(type(layer))})
    with NanGuard(model) as guard:
        found = gradients_of(model)
        assert all(mx.allclose(found[key], expected[key], atol=1e-6) for key in expected)
        guard.check()
        model.layers[3].mlp.down_proj.weight[0, 0] = float("nan")
        gradients_of(model)
        assert "output of model.layers.3.mlp.down_proj is not finite" in failure(guard)


def checkpointed(kind: type) -> object:
    """As mlx-lm's trainer does it."""

    def call(layer: nn.Module, *arguments: object) -> mx.array:
        def inner(parameters: dict, *arguments: object) -> mx.array:
            layer.update(parameters)
            return kind.__call__(layer, *arguments)

        return mx.checkpoint(inner)(layer.trainable_parameters(), *arguments)

    return call


def test_inside_compile_nothing_is_observed():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with NanGuard(model) as guard:
        mx.eval(mx.compile(lambda x: model(x))(mx.ones((2, 4))))
        with pytest.raises(mlxdist.InvalidArgument, match="no module of the model was called .* inside mx.compile"):
            guard.check()
        compiled = mx.compile(partial(model.layers[0]))
        mx.eval(model.layers[1](compiled(mx.full((2, 4), float("nan")))))
        assert "the input of layers.1 is not finite" in failure(guard)


def test_odd_outputs():
    """Trees, integers, nothing, and arrays without elements."""

    class Odd(nn.Module):
        def __call__(self, x: mx.array, scale: float = 1.0) -> dict:
            return {"a": [x * scale, mx.zeros((0, 3))], "b": (mx.array(1), None, "text"), "c": 1 / (x - 1)}

    model = Odd()
    with NanGuard(model) as guard:
        result = model(mx.array([2.0, 3.0]), scale=2.0)
        assert result["a"][0].tolist() == [4, 6] and result["b"][1:] == (None, "text")
        guard.check()
        mx.eval(model(x=mx.array([1.0]))["a"])
        assert "output of Odd is not finite" in failure(guard)


def test_bad_arguments():
    model = Block()
    with pytest.raises(mlxdist.InvalidArgument, match="model is of class dict, not an nn.Module"):
        NanGuard({})
    for every in (0, -1, 1.5, True, "2"):
        with pytest.raises(mlxdist.InvalidArgument, match="every is"):
            NanGuard(model, every=every)
    with NanGuard(model) as guard:
        with pytest.raises(mlxdist.InvalidArgument, match="another one observes this model"):
            NanGuard(nn.Sequential(model))
    assert type(model) is Block and type(model.norm) is nn.RMSNorm
    guard.close()
    with NanGuard(model):
        pass


def test_the_model_is_restored_after_an_error():
    model = Block()
    with pytest.raises(ValueError):
        with NanGuard(model):
            raise ValueError
    assert type(model) is Block and type(model.first) is nn.Linear


@pytest.mark.long
@pytest.mark.parametrize(
    "check, ranks",
    [("first_on_any_rank", 3), ("disagree", 2)]
    + [
        pytest.param(*case, marks=pytest.mark.long)
        for case in (("first_on_any_rank", 1), ("first_on_any_rank", 4), ("sharded", 2))
    ],
)
def test_ranks(run_scenarios, check, ranks):
    run_scenarios("nan_guard.py", ranks, check)
