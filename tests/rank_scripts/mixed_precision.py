"""One rank of test_mixed_precision.py. Argument: the scenario."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten, tree_map
from scenarios import group, rank, run_scenario, size

import mlxdist
from mlxdist.nn.models.cuts import cuts
from mlxdist.train import MixedPrecision, fully_shard, value_and_grad

WIDTH = 12


def make(masters: object = True, **options: object) -> tuple[nn.Module, MixedPrecision]:
    mx.random.seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 5, bias=False))
    return model, MixedPrecision(optim.SGD(0.1, momentum=0.9), mx.bfloat16, masters, **options)


def loss(model: nn.Module, x: mx.array) -> mx.array:
    return model(x.astype(mx.bfloat16)).astype(mx.float32).square().mean()


def overflow() -> None:
    """A gradient that is not finite on one rank: no rank makes the step, and all lower the scale, which is one."""
    with pytest.raises(mlxdist.Mismatch, match="disagree about the loss_scale: 1.0 on rank 0, 2.0 on rank 1"):
        make(loss_scale=2.0 if rank == 1 else 1.0)
    for bad in range(size):
        model, optimizer = make(loss_scale="dynamic")
        optimizer.init(model)
        before, scale = dict(tree_flatten(model.parameters())), optimizer.loss_scale.item()
        gradients = model.trainable_parameters()
        if rank == bad:
            gradients["layers"][2]["weight"] = mx.full((5, WIDTH), float("inf"), mx.bfloat16)
        optimizer.update(model, gradients)
        assert optimizer.loss_scale.item() == scale / 2
        assert all(mx.array_equal(before[path], array) for path, array in tree_flatten(model.parameters()))
        optimizer.update(model, tree_map(lambda array: mx.full(array.shape, scale, array.dtype), gradients))
        assert optimizer.loss_scale.item() == scale / 2
        assert not mx.array_equal(before["layers.2.weight"], model.layers[2].weight)


def replicas() -> None:
    """Bitwise equal on all ranks, also what is rounded at random."""
    for masters in (True, "kahan", "stochastic"):
        model, optimizer = make(masters, state_dtype=mx.bfloat16)
        optimizer.init(model)
        step = value_and_grad(model, loss)
        for _ in range(5):
            _, gradients = step(model, mx.random.normal((4, WIDTH), key=mx.random.key(rank)))
            optimizer.update(model, gradients)
        for path, array in tree_flatten(model.parameters()):
            bits = array.view(mx.uint16).astype(mx.int32)
            assert mx.array_equal(mlxdist.all_max(bits), mlxdist.all_min(bits)), path


def sharded() -> None:
    """Shards are trained as the full parameters are."""
    x = mx.random.normal((4, WIDTH), key=mx.random.key(7))
    found = []
    for shards in (False, True):
        model, optimizer = make()
        if shards:
            fully_shard(model, group=group)
        optimizer.init(model)
        step = value_and_grad(model, loss, group=group)
        for _ in range(5):
            _, gradients = step(model, x)
            optimizer.update(model, gradients)
        found.append((dict(tree_flatten(optimizer.state["masters"])), cuts(model)))
    (full, _), (own, known) = found
    for path, array in own.items():
        expected = known[path].take(full[path])
        assert mx.allclose(array, expected, 1e-2, 1e-3), path


run_scenario(globals())
