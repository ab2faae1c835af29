"""One rank of test_mlx_fully_shard.py: `check` is the name of a function below, and `whose` whose fully_shard it is of.

What MLX asserts of its nn.fully_shard holds for MLX's on mlxdist's group, and for train.fully_shard.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.nn.utils import clip_grad_norm_sharded
from mlx.utils import tree_flatten

import mlxdist
from mlxdist import train
from mlxdist.nn.models.cuts import cuts

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from reference_zero import Zero

group = mlxdist.init()
rank, size = group.rank(), group.size()
DIMS = 12  # a multiple of all numbers of ranks


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2 * DIMS, DIMS)
        self.layers = [nn.Linear(DIMS, DIMS) for _ in range(3)]
        self.norm = nn.RMSNorm(DIMS)

    def __call__(self, tokens: mx.array) -> mx.array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + nn.gelu(layer(x))
        return self.embed.as_linear(self.norm(x))


def sharded(model: MLP, shard: Callable[..., nn.Module], **options: Any) -> MLP:
    """Module by module, as MLX's has to be."""
    shard = partial(shard, **options)
    model.layers = [shard(layer) for layer in model.layers]
    model.embed, model.norm = shard(model.embed), shard(model.norm)
    return model


def pair() -> tuple[MLP, MLP]:
    models = []
    for _ in range(2):
        mx.random.seed(5)
        models.append(MLP())
        mx.eval(models[-1].parameters())
    return models[0], models[1]


def loss_of(model: MLP, tokens: mx.array) -> mx.array:
    return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction="mean")


def batch(seed: int) -> tuple[mx.array, mx.array]:
    """Of all ranks, and of this one."""
    whole = mx.random.randint(0, 2 * DIMS, (2 * size, 7), key=mx.random.key(seed))
    return whole, whole[2 * rank : 2 * rank + 2]


def share(model: nn.Module, path: str, array: mx.array) -> mx.array:
    """What this rank holds of an array: a part of its layer's flat vector, or of the rows with MLX's."""
    return mx.split(array, size)[rank] if ".module." in path else cuts(model)[path].take(array)


def forward(shard: Callable[..., nn.Module]) -> None:
    """The result is that of the full module; a rank holds a share of it before and after."""
    reference, model = pair()
    sharded(model, shard)
    held = [array.size for _, array in tree_flatten(model.parameters())]
    full = [array.size for _, array in tree_flatten(reference.parameters())]
    assert sum(held) == sum(full) // size
    tokens, _ = batch(1)
    for _ in range(2):
        assert mx.allclose(model(tokens), reference(tokens), rtol=1e-5, atol=1e-5).item()
    assert held == [array.size for _, array in tree_flatten(model.parameters())]


def training(shard: Callable[..., nn.Module]) -> None:
    """AdamW and clip_grad_norm_sharded do as the plain ZeRO, whose shards are one process's."""
    reference, model = pair()
    sharded(model, shard)
    make = partial(optim.AdamW, 1e-2, eps=1e-4)
    ours, zero, step = make(), Zero(reference, size, make), nn.value_and_grad(model, loss_of)
    for seed in range(5):
        tokens, own = batch(seed)
        loss, gradients = step(model, own)
        expected, shards = zero.gradients(loss_of, [[part] for part in mx.split(tokens, size)])
        assert mx.allclose(mlxdist.all_sum(loss) / size, expected, rtol=1e-5).item()
        gradients, norm = clip_grad_norm_sharded(gradients, 0.1, group=group.mlx)
        shards, wanted = optim.clip_grad_norm(shards, 0.1)
        assert mx.allclose(norm, wanted, rtol=1e-5).item()
        ours.update(model, gradients)
        zero.update(shards)
        mx.eval(model.parameters(), ours.state)
    tokens, _ = batch(9)
    assert mx.allclose(model(tokens), reference(tokens), rtol=1e-4, atol=1e-4).item()


def compute_dtype(shard: Callable[..., nn.Module]) -> None:
    """Computes in the dtype; parameters and gradients keep theirs."""
    reference, model = pair()
    sharded(model, shard, compute_dtype=mx.bfloat16)
    tokens, own = batch(2)
    assert model(tokens).dtype == mx.bfloat16
    assert mx.allclose(model(tokens), reference(tokens), rtol=0.1, atol=0.1).item()
    _, gradients = nn.value_and_grad(model, loss_of)(model, own)
    for tree in (gradients, model.parameters()):
        assert {array.dtype for _, array in tree_flatten(tree)} == {mx.float32}


def frozen(shard: Callable[..., nn.Module]) -> None:
    """Only what is trained has a gradient."""
    reference, model = pair()
    for one in (reference, model):
        one.freeze()
        one.layers[1].unfreeze()
    sharded(model, shard)
    tokens, own = batch(3)
    _, gradients = nn.value_and_grad(model, loss_of)(model, own)
    _, whole = nn.value_and_grad(reference, loss_of)(reference, tokens)
    found, expected = (dict(tree_flatten(tree)) for tree in (gradients, whole))
    assert {path.replace(".module.", ".") for path in found} == set(expected) and len(expected) == 2
    for path, array in found.items():
        want = share(model, path, expected[path.replace(".module.", ".")])
        assert mx.allclose(array.flatten(), want.flatten(), rtol=1e-5, atol=1e-6).item(), path


check, whose = sys.argv[1:]
globals()[check]({"mlx": partial(nn.fully_shard, group=group.mlx), "mlxdist": train.fully_shard}[whose])
print(check, "done")
