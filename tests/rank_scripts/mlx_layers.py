"""One rank of test_bridge.py: gradients, MLX's sharded layers and average_gradients, against one process."""

from functools import partial

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.nn.layers.distributed import shard_linear
from mlx.utils import tree_map

import mlxdist

group = mlxdist.init()
rank, size, world = group.rank(), group.size(), group.mlx
mx.random.seed(7)  # the same on all ranks: weights and inputs are those of one model
DIMS = 384  # divides by 2, 3 and 4 into whole quantization groups of 32


def close(a: mx.array, b: mx.array, what: str) -> None:
    assert a.shape == b.shape and mx.allclose(a, b, rtol=1e-4, atol=1e-4), f"{what}: {mx.abs(a - b).max()}"


def equal(a: mx.array, expected: object, what: str) -> None:
    assert np.array_equal(np.array(a), np.broadcast_to(np.array(expected), a.shape)), f"{what}: {a}"


def gradients() -> None:
    """MLX's own conventions for its operations, the true adjoint for broadcast."""
    x = mx.full((4,), float(rank + 1))
    weight = mx.arange(4.0) + rank
    equal(mx.grad(lambda x: (mx.distributed.all_sum(x, group=world) * weight).sum())(x), weight, "gradient of all_sum")
    all_weights = mx.arange(4.0 * size)
    equal(
        mx.grad(lambda x: (mx.distributed.all_gather(x, group=world) * all_weights).sum())(x),
        np.arange(4.0) + 4 * rank,
        "gradient of all_gather",
    )
    root = size - 1
    weights_of_all = sum(np.arange(4.0) + r for r in range(size))
    expected = weights_of_all if rank == root else 0
    equal(mx.grad(lambda x: (mlxdist.broadcast(x, root) * weight).sum())(x), expected, "gradient of broadcast")
    # Of the second order: the gradient of broadcast is linear in its cotangent, and its gradient is broadcast again.
    twice = mx.grad(lambda w: (mx.grad(lambda x: (mlxdist.broadcast(x, root) * w).sum())(x) * (rank + 1)).sum())
    equal(twice(weight), root + 1, "second gradient of broadcast")
    _, tangents = mx.jvp(lambda x: mlxdist.broadcast(x, root), [x], [weight])
    equal(tangents[0], np.arange(4.0) + root, "jvp of broadcast")
    if size > 1:
        try:
            mx.eval(mx.grad(lambda x: mlxdist.all_reduce(x, "prod").sum())(x))
            raise AssertionError("the product has a gradient")
        except ValueError as error:
            assert "prod" in str(error), error


def broadcast_adjoint() -> None:
    """<broadcast(x), y> summed over ranks equals <x, adjoint(y)> summed over ranks, for inputs that differ by rank."""
    mx.random.seed(100 + rank)
    x, y = mx.random.normal((5, 6)), mx.random.normal((5, 6))
    mx.random.seed(7)
    out, (adjoint,) = mx.vjp(lambda x: mlxdist.broadcast(x, 0), [x], [y])
    left = mlxdist.all_sum((out[0] * y).sum())
    right = mlxdist.all_sum((x * adjoint).sum())
    close(left, right, "adjoint of broadcast")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIMS, DIMS)
        self.down = nn.Linear(DIMS, DIMS)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down(nn.silu(self.up(x)))


def sharded_layers(quantized: bool) -> None:
    dense = Block()
    if quantized:
        nn.quantize(dense, group_size=32, bits=8)
    x = mx.random.normal((3, DIMS))
    mx.eval(dense.parameters(), x)
    sharded = Block()
    sharded.up = shard_linear(dense.up, "all-to-sharded", group=world)
    sharded.down = shard_linear(dense.down, "sharded-to-all", group=world)
    expected = dense(x)
    close(sharded(x), expected, f"sharded layers, quantized={quantized}")
    close(mx.compile(lambda x: sharded(x))(x), expected, f"compiled sharded layers, quantized={quantized}")
    loss, sharded_loss = (lambda x, m=m: (m(x) ** 2).mean() for m in (dense, sharded))
    close(mx.grad(sharded_loss)(x), mx.grad(loss)(x), f"gradient of the input, quantized={quantized}")
    if not quantized:
        weights = nn.value_and_grad(dense, lambda: loss(x))()[1]
        parts = nn.value_and_grad(sharded, lambda: sharded_loss(x))()[1]
        close(parts["up"]["weight"], mx.split(weights["up"]["weight"], size, axis=0)[rank], "gradient of up")
        close(parts["down"]["weight"], mx.split(weights["down"]["weight"], size, axis=1)[rank], "gradient of down")


def average_gradients() -> None:
    model = Block()
    gradients = nn.value_and_grad(model, lambda x: model(x).mean())(mx.random.normal((2, DIMS)))[1]
    mine = tree_map(lambda value: value * (rank + 1), gradients)
    average = tree_map(lambda value: value * (size + 1) / 2, gradients)
    for function, ranks in ((nn.average_gradients, world), (mlxdist.average_gradients, group)):
        tree_map(partial(close, what=function.__module__), function(mine, group=ranks), average)


gradients()
broadcast_adjoint()
sharded_layers(quantized=False)
sharded_layers(quantized=True)
average_gradients()
print("close")
