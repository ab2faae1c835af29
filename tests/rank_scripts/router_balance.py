"""One rank of test_router_balance.py. Arguments: the model, the axes of the mesh. Prints "equal" at the end."""

import sys
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

import mlxdist
from mlxdist.nn import pipeline_parallel
from mlxdist.nn.models.cuts import cuts
from mlxdist.train import fully_shard, value_and_grad
from mlxdist.train.router_balance import RouterBalance
from mlxdist.train.training_loop import masked_loss

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import tiny_models

COEFFICIENT, TOP_K, ROWS = 0.5, 2, 8
name, *sizes = sys.argv[1:]
mesh = mlxdist.mesh(**{axis: int(size) for axis, size in (one.split("=") for one in sizes)})
mx.random.seed(1)
batch = mx.random.randint(0, 90, (ROWS, 10))
lengths = mx.array([[row % 3, 4 + row % 6] for row in range(ROWS)])


def reference(model, batch, lengths):
    """Written out, row by row, of the routers' results."""
    found.clear()
    losses = nn.losses.cross_entropy(model(batch[:, :-1]), batch[:, 1:])
    total, targets = 0.0, 0
    for row, (first, length) in enumerate(lengths.tolist()):
        own = max(length - 1 - max(first - 1, 0), 0)
        balance = 0.0
        for scores in found:
            p = mx.softmax(scores[row, : length - 1], axis=-1)
            chosen = mx.argsort(-p, axis=-1)[:, :TOP_K]
            often = mx.stack([(chosen == expert).sum() for expert in range(p.shape[-1])])
            balance = balance + p.shape[-1] * (often / (length - 1) * p.mean(0)).sum()
        start = max(first - 1, 0)
        total = total + losses[row, start : length - 1].sum() + COEFFICIENT * own * balance / len(found)
        targets += own
    return total / targets


class Noting:
    def __call__(self, x):
        found.append(super().__call__(x))
        return found[-1]


full, model, found = tiny_models.build(name), tiny_models.build(name), []
for module in full.modules():
    if "switch_mlp" in module:
        module.gate.__class__ = type("Linear", (Noting, type(module.gate)), {})
expected_loss, expected = nn.value_and_grad(full, reference)(full, batch, lengths)
expected = dict(tree_flatten(expected))
if mesh.size("pp") > 1:
    pipeline_parallel(model, group=mesh["pp"])
if mesh.size("fsdp") > 1:
    fully_shard(model, mesh=mesh, stage=1 if mesh.size("pp") > 1 else 3)
routers, where, data = RouterBalance(model), cuts(model), mesh["dp", "fsdp"]
own = slice(data.rank() * ROWS // data.size(), (data.rank() + 1) * ROWS // data.size())
loss = partial(masked_loss, cp=mesh["cp"], routers=routers, coefficient=COEFFICIENT)
for micro_batches in (1, 2):
    (value, tokens), gradients = value_and_grad(model, loss, mesh=mesh, micro_batches=micro_batches)(
        model, batch[own], lengths[own]
    )
    sums = mlxdist.all_sum(mx.stack([value * tokens, tokens.astype(mx.float32)]), group=data)
    np.testing.assert_allclose((sums[0] / sums[1]).item(), expected_loss.item(), rtol=1e-5)
    for path, gradient in tree_flatten(gradients):
        wanted = np.array(where[path].take(expected[path]))
        np.testing.assert_allclose(np.array(gradient), wanted, rtol=2e-4, atol=2e-5, err_msg=path)
if mesh.size("fsdp") == 1:  # or some ranks may have no shard of a router
    plain = value_and_grad(model, partial(masked_loss, cp=mesh["cp"]), mesh=mesh)(model, batch[own], lengths[own])[1]
    plain, gradients = dict(tree_flatten(plain)), dict(tree_flatten(gradients))
    routed = [path for path in plain if path.endswith("mlp.gate.weight")]
    assert all(mx.abs(plain[path] - gradients[path]).max() > 1e-3 for path in routed), routed
print("equal")
