"""The plain references of tests/support are what one process computes of the whole batch, or the whole sequence."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
import reference_1f1b
from mlx.utils import tree_flatten, tree_unflatten
from reference_ring_attention import ring_attention
from reference_zero import Zero


def make():
    mx.random.seed(2)
    return nn.Sequential(*(nn.Linear(7, 7) for _ in range(4)))


def loss_of(model, x, weights):
    """The mean over tokens that count differently."""
    return (model(x).square().mean(-1) * weights).sum() / weights.sum()


def close(found, expected):
    found, expected = (dict(tree_flatten(tree)) for tree in (found, expected))
    assert found.keys() == expected.keys()
    assert all(mx.allclose(found[path], array, rtol=1e-5, atol=1e-6).item() for path, array in expected.items())


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 3, 6])
def test_1f1b(ranks, micro_batches):
    model, x = make(), mx.random.normal((6, 7))
    weights = mx.array([1, 2, 3, 0, 1, 4])
    value, expected = nn.value_and_grad(model, loss_of)(model, x, weights)

    def stage_of(rank):
        def stage(parameters, y, micro_batch):
            y = micro_batch[0] if y is None else y
            for layer in range(4 // ranks):
                y = y @ parameters[f"{layer}.weight"].T + parameters[f"{layer}.bias"]
            return y if rank < ranks - 1 else ((y.square().mean(-1) * micro_batch[1]).sum(), micro_batch[1].sum())

        return stage

    layers = [model.layers[rank * 4 // ranks : (rank + 1) * 4 // ranks] for rank in range(ranks)]
    parameters = [dict(tree_flatten([layer.parameters() for layer in own])) for own in layers]
    parts = list(zip(mx.split(x, micro_batches), mx.split(weights, micro_batches)))
    (loss, tokens), gradients = reference_1f1b.train_step([stage_of(rank) for rank in range(ranks)], parameters, parts)
    assert tokens.item() == 11 and mx.allclose(loss, value, rtol=1e-5).item()
    of_layers = [own for of_stage in gradients for own in tree_unflatten(list(of_stage.items()))]
    close(of_layers, expected["layers"])


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_zero(ranks):
    """With shards that divide evenly and that do not."""
    model, sharded = make(), make()
    alone = optim.AdamW(1e-2)
    zero, ones = Zero(sharded, ranks, lambda: optim.AdamW(1e-2)), mx.ones(ranks)
    for _ in range(3):
        x = mx.random.normal((ranks, 7))
        value, gradients = nn.value_and_grad(model, loss_of)(model, x, ones)
        alone.update(model, gradients)
        loss, shards = zero.gradients(loss_of, [(row[None], mx.ones(1)) for row in x])
        zero.update(shards)
        assert mx.allclose(loss, value, rtol=1e-5).item()
        assert max(shard.size for shard in shards) == -(-4 * 56 // ranks)
    close(sharded.parameters(), model.parameters())


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_ring_attention(ranks, with_sinks):
    """MLX's attention over the whole sequence and its gradients, also where the first blocks are hidden from a row."""
    mx.random.seed(4)
    q, k, v = (50 * mx.random.normal((2, heads, 8, 4)) for heads in (6, 3, 3))
    distance = mx.arange(8)[:, None] - mx.arange(8)
    masks = [None, distance >= 0, (distance >= 0) & (distance < 2), mx.where(distance >= 0, -0.5 * distance, -mx.inf)]
    for mask in masks:
        arrays = [q, k, v] + ([mx.random.normal((6,))] if with_sinks else [])

        def whole(q, k, v, sinks=None, mask=mask):
            return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.01, mask=mask, sinks=sinks)

        def in_blocks(q, k, v, sinks=None, mask=mask):
            blocks = (mx.split(x, ranks, axis=2) for x in (q, k, v))
            return mx.concatenate(ring_attention(*blocks, scale=0.01, mask=mask, sinks=sinks), axis=2)

        cotangent = mx.random.normal(q.shape)
        for found, expected in zip(*(mx.vjp(call, arrays, [cotangent]) for call in (in_blocks, whole))):
            for one, other in zip(found, expected):
                assert mx.allclose(one, other, rtol=1e-4, atol=1e-4).item()
