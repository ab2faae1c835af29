"""One rank of test_seeds.py. Argument: the scenario."""

import json
import random

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from scenarios import group, run_scenario, size

import mlxdist
from mlxdist import train
from mlxdist.train.seeds import mix


def dropout(seeds: train.Seeds, step: int) -> str:
    seeds.set_step(step)
    kept = nn.Dropout(0.5)(mx.ones(64))
    drawn = [np.array(kept).tolist(), np.random.rand(3).tolist(), random.random()]
    return json.dumps(drawn)


def same_on(text: str) -> list[int]:
    """A hash of each rank's text."""
    return mlxdist.all_gather(np.array([mix(text) >> 33], np.int32)).tolist()


def seeds() -> None:
    picked = train.Seeds()
    assert 0 <= picked.seed < 2**31 and len(set(same_on(str(picked.seed)))) == 1
    layer = nn.Linear(5, 7)
    assert len(set(same_on(str(layer.weight.tolist())))) == 1
    mx.random.seed(11)
    plain = nn.Linear(5, 7).weight.tolist()
    given = train.Seeds(11)
    assert nn.Linear(5, 7).weight.tolist() == plain  # as in a program of one process
    ten = [dropout(given, step) for step in range(10)]
    assert len(set(ten)) == 10
    assert len(set(same_on("".join(ten)))) == size  # other data on each rank
    mx.random.uniform(shape=(1000,))  # what a validation draws between two steps
    resumed = train.Seeds()
    resumed.restore(json.loads(json.dumps(given.state)))
    assert [dropout(resumed, step) for step in range(5, 10)] == ten[5:]


def model_under_tp() -> None:
    """Shards are those of the model of one process: their variance is that of the full fan-in."""
    train.Seeds(6, mesh=mlxdist.mesh(tp=size))
    full = nn.Linear(12 * size, 8 * size)
    mx.random.seed(6)
    assert mx.array_equal(full.weight, nn.Linear(12 * size, 8 * size).weight)
    for sharding, axis in (("all-to-sharded", 0), ("sharded-to-all", 1)):
        shard = nn.layers.distributed.shard_linear(full, sharding, group=group.mlx)
        joined = mlxdist.all_gather(mx.contiguous(shard.weight.swapaxes(0, axis))).swapaxes(0, axis)
        assert mx.array_equal(joined, full.weight), sharding


def seeds_on_meshes() -> None:
    """Equal along tp and ep; on a mesh of dp and fsdp those of as many ranks of dp."""
    everyone = same_on(dropout(train.Seeds(4), 2))
    for sizes, others in (({"tp": size}, 1), ({"ep": size}, 1), ({"cp": size}, size), ({"pp": size}, size)):
        assert len(set(same_on(dropout(train.Seeds(4, mesh=mlxdist.mesh(**sizes)), 2)))) == others, sizes
    for sizes in ({"dp": size}, {"fsdp": size}, {"dp": 2, "fsdp": -1}):
        assert sorted(same_on(dropout(train.Seeds(4, mesh=mlxdist.mesh(**sizes)), 2))) == sorted(everyone), sizes


run_scenario(globals())
