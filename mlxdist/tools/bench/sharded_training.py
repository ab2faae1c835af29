"""What the ranks of `mlxdist bench fsdp` measure: steps of fully sharded training, in the same processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.nn.layers.distributed import FullyShardedModule
from mlx.utils import tree_flatten

import mlxdist
from mlxdist import train
from mlxdist.nn.models.cuts import cuts

from .mlx_groups import mlx_group
from .operations import count_off
from .rank import peak_memory, time_case
from .timing import Work, interleave
from .tp_layers import make_model

__all__ = ["ShardedTraining"]

TOLERANCE = 1e-4  # of the largest element: the same sums, in float32, through all layers
Arrays = dict[str, mx.array]


class ShardedTraining:
    """Cases: operation "step", hidden, layers, vocabulary, tokens. Parameters: repeats."""

    def __init__(self, world: mlxdist.Group, parameters: dict[str, Any]) -> None:
        self.world = world
        self.take = partial(interleave, repeats=parameters["repeats"], warm_up=2, calls=1)
        self.ring = mlx_group("ring", world) if world.size() > 1 else None
        if self.ring is not None:
            _add_sum_scatter(self.ring)

    def __call__(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        tokens = mx.random.randint(0, case["vocabulary"], (2, 1, case["tokens"]), key=mx.random.key(self.world.rank()))
        expected = self._expected(case, tokens)
        nbytes = sum(array.nbytes for array in expected.values())
        shards: dict[str, Callable[[nn.Module], Any]] = {
            "mlxdist": partial(train.fully_shard, group=self.world),
            "mlx": partial(_shard_by_mlx, group=self.world.mlx),
        }
        if self.ring is not None:
            shards["ring"] = partial(_shard_by_mlx, group=self.ring)
        works, peaks = {}, {}
        for name, shard in shards.items():
            training = Training(case, shard, tokens)
            wrong = training.count_wrong(expected, self.world)
            works[name] = Work(training.step, wrong=partial(int, wrong), copies=1)
            peaks[name] = {"peak": peak_memory(self.world, training.gradients_of_batch), "parameter_bytes": nbytes}
        del expected
        results = time_case(self.world, case, works, self.take, copied=nbytes)
        return [result | peaks[result["variant"]] for result in results]

    def _expected(self, case: dict[str, Any], tokens: mx.array) -> Arrays:
        """The mean of all ranks' gradients, in full."""
        model = _model(case)
        _, gradients = nn.value_and_grad(model, _loss)(model, tokens)
        found: Any = tree_flatten(mlxdist.average_gradients(gradients, group=self.world))
        return dict(found)


class Training:
    def __init__(self, case: dict[str, Any], shard: Callable[[nn.Module], Any], tokens: mx.array) -> None:
        self.model, self.tokens = _model(case), tokens
        shard(self.model)
        self.value_and_grad = nn.value_and_grad(self.model, _loss)
        self.optimizer = optim.AdamW(1e-5)
        self.optimizer.init(self.model.trainable_parameters())
        mx.eval(self.model.parameters(), self.optimizer.state)

    def gradients_of_batch(self) -> Any:
        return self.value_and_grad(self.model, self.tokens)[1]

    def step(self) -> None:
        self.optimizer.update(self.model, self.gradients_of_batch())
        mx.eval(self.model.parameters(), self.optimizer.state)

    def count_wrong(self, expected: Arrays, world: mlxdist.Group) -> int:
        found: Any = tree_flatten(self.gradients_of_batch())
        # MLX's module around a layer has rows of each parameter.
        by_rows = any(isinstance(module, FullyShardedModule) for _, module in self.model.named_modules())
        own, wrong = {} if by_rows else cuts(self.model), 0
        for path, array in found:
            full = expected[path.replace(".module.", ".")]
            part = mx.split(full, world.size())[world.rank()] if by_rows else own[path].take(full)
            wrong += count_off(part, TOLERANCE, array)
        return wrong


def _model(case: dict[str, Any]) -> nn.Module:
    return make_model("qwen", case["hidden"], mx.float32, case["layers"], case["vocabulary"])


def _loss(model: nn.Module, tokens: mx.array) -> mx.array:
    inputs, targets = tokens
    return nn.losses.cross_entropy(model(inputs), targets, reduction="mean")


def _shard_by_mlx(model: nn.Module, group: mx.distributed.Group) -> None:
    """Its documentation wraps layers; what is left are the embeddings, the last norm and the head."""
    shard = partial(nn.fully_shard, group=group)
    model.model.layers = [shard(layer) for layer in model.model.layers]
    model.model.embed_tokens, model.model.norm = shard(model.model.embed_tokens), shard(model.model.norm)
    model.lm_head = shard(model.lm_head)


def _add_sum_scatter(ring: mx.distributed.Group) -> None:
    """nn.fully_shard calls it, and "[ring] sum_scatter not supported" is all that the ring says."""
    elsewhere = mx.distributed.sum_scatter

    def sum_scatter(x: mx.array, *, group: Any = None, stream: Any = None) -> mx.array:
        if group is not ring:
            return elsewhere(x, group=group, stream=stream)
        rows = x.shape[0] // ring.size()
        return mx.distributed.all_sum(x, group=ring, stream=stream)[ring.rank() * rows : (ring.rank() + 1) * rows]

    mx.distributed.sum_scatter = sum_scatter
