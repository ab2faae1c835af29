"""One rank of test_clip_grad_norm.py. Arguments: the model, and how it is sharded, as axes of a mesh. Prints "equal".

The gradients are numbers that every rank knows in full; each takes its part of them, as `cuts` says.
"""

import sys
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map, tree_unflatten

import mlxdist
from mlxdist.nn.models.cuts import cuts
from mlxdist.nn.models.plan import plan_shards, shard_model
from mlxdist.train import clip_grad_norm, fully_shard

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import tiny_models


def main(name: str, *axes: str) -> None:
    sizes = {axis: int(size) for axis, size in (part.split("=") for part in axes)}
    ep = sizes.pop("ep", 1)
    mesh = mlxdist.mesh(**sizes) if ep == 1 else None
    mx.random.seed(5)
    model = tiny_models.build(name)
    full = tree_map(lambda array: mx.random.normal(array.shape), model.trainable_parameters())
    expected = {limit: optim.clip_grad_norm(full, limit) for limit in (0.5, 1e9)}
    if ep > 1:
        shard_model(model, plan_shards(model, ep=ep))
    elif mesh.size("tp") > 1:
        shard_model(model, plan_shards(model, tp=mesh.size("tp")), group=mesh["tp"])
    if mesh is not None and mesh.size("fsdp") > 1:
        fully_shard(model, mesh=mesh)
    known = cuts(model)
    own = tree_unflatten([(path, known[path].take(array)) for path, array in tree_flatten(full)])
    groups = {group for cut in known.values() for group in cut.groups}
    before = [group.stats()["collectives"] for group in groups]
    for limit, (clipped, norm) in expected.items():
        found, found_norm = clip_grad_norm(own, limit, model=model, mesh=mesh)
        mx.eval(found, found_norm)
        assert abs(found_norm - norm) <= 1e-5 * norm, (found_norm, norm)
        wanted = dict(tree_flatten(clipped))
        for path, array in tree_flatten(found):
            assert mx.allclose(array, known[path].take(wanted[path]), 1e-5, 1e-8), path
    sent = [group.stats()["collectives"] - count for group, count in zip(groups, before)]
    assert sent == [len(expected)] * len(groups), sent  # one for each group and call
    print("equal")


main(*sys.argv[1:])
