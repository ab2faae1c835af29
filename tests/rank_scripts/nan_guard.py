"""One rank of test_nan_guard.py: `check` is the name of a function below."""

import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from scenarios import group, rank, run_scenario, size

import mlxdist
import mlxdist.nn
from mlxdist.debug import NanGuard

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import tiny_models

LAST = size - 1


def step(model: nn.Module) -> None:
    mx.eval(model(mx.arange(10)[None]))


def first_on_any_rank() -> None:
    """The last rank has the earlier one of two; all raise the same text, which names it."""
    model = tiny_models.build("qwen3")
    with NanGuard(model, every=2) as guard:
        before = group.stats()["collectives"]
        for number in range(4):
            step(model)
            guard.check()
            assert group.stats()["collectives"] - before == (number // 2 + 1 if size > 1 else 0)
        layer = model.layers[1 if rank == LAST else 2]
        if rank in (0, LAST):
            layer.mlp.up_proj.weight = layer.mlp.up_proj.weight * float("nan")
        step(model)
        with pytest.raises(mlxdist.NonFinite) as caught:
            guard.check()
        text = str(caught.value)
        assert text.startswith("NanGuard: step 4: the output of model.layers.1.mlp.up_proj is not finite")
        assert caught.value.rank == LAST
        codes = mlxdist.all_gather(mx.array([sum(text.encode()), len(text)])[None])
        assert mx.array_equal(codes, mx.broadcast_to(codes[:1], codes.shape))
        step(model)
        guard.check()  # of a step that is not observed
    assert float(mlxdist.all_sum(mx.array(1.0))) == size  # the group goes on


def sharded() -> None:
    """A tensor-parallel block: infinite on one rank alone, before the sum spreads it."""
    model = tiny_models.build("qwen3")
    mlxdist.nn.shard_model(model, mlxdist.nn.plan_shards(model, tp=size), group=group)
    expected = model(mx.arange(10)[None])
    mx.eval(expected)
    with NanGuard(model) as guard:
        got = model(mx.arange(10)[None])
        mx.eval(got)
        assert mx.array_equal(got, expected)
        guard.check()
        projection = model.layers[0].mlp.up_proj
        if rank == LAST:
            projection.weight = projection.weight * float("inf")
        step(model)
        with pytest.raises(mlxdist.NonFinite, match=r"output of model\.layers\.0\.mlp\.up_proj is not") as caught:
            guard.check()
        assert caught.value.rank == LAST


def disagree() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(mlxdist.Mismatch, match="the ranks disagree about the arguments"):
        NanGuard(model, every=1 + rank)
    with pytest.raises(mlxdist.InvalidArgument, match="every is 0, not a number of steps"):
        NanGuard(model, every=0 if rank == LAST else 1)
    assert type(model) is nn.Linear
    with NanGuard(model) as guard:
        if rank != LAST:
            mx.eval(model(mx.ones((2, 3))))
        with pytest.raises(mlxdist.InvalidArgument, match="no module of the model was called") as caught:
            guard.check()
        assert caught.value.rank == LAST


run_scenario(globals())
