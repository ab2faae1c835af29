"""`mlxdist bench fsdp`: a step of fully sharded training, by train.fully_shard and by MLX's nn.fully_shard."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import click
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.nn.layers.distributed import FullyShardedModule
from mlx.utils import tree_flatten

import mlxdist
from mlxdist.base import tables

from .benchmark import Benchmark
from .mlx_groups import mlx_group
from .operations import count_off
from .results import Comparison, Results, Target, by_case, case_name, peak_columns
from .runner import Runner
from .sizes import multiples_of
from .timing import Work
from .workload import OURS, BenchmarkWorkload, peak_memory

__all__ = ["MLX", "OURS", "RING", "ShardedTraining", "fsdp", "targets"]

MLX, RING = "mlx", "ring"
FASTER_THAN_MLX, FASTER_THAN_RING = 1.15, 1.5
TOLERANCE = 1e-4  # of the largest element: the same sums, in float32, through all layers
Arrays = dict[str, mx.array]


class ShardedTraining(BenchmarkWorkload):
    """Cases: operation "step", hidden, layers, vocabulary, tokens."""

    blocks = {"calls": 1}

    def __init__(self, world: mlxdist.Group, parameters: dict[str, Any]) -> None:
        super().__init__(world, parameters)
        self.ring = mlx_group("ring", world) if world.size() > 1 else None
        if self.ring is not None:
            _add_sum_scatter(self.ring)

    def __call__(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        tokens = mx.random.randint(0, case["vocabulary"], (2, 1, case["tokens"]), key=mx.random.key(self.world.rank()))
        expected = self._expected(case, tokens)
        nbytes = sum(array.nbytes for array in expected.values())
        shards: dict[str, Callable[[nn.Module], Any]] = {
            OURS: partial(mlxdist.train.fully_shard, group=self.world),
            MLX: partial(_shard_by_mlx, group=self.world.mlx),
        }
        if self.ring is not None:
            shards[RING] = partial(_shard_by_mlx, group=self.ring)
        works, peaks = {}, {}
        for name, shard in shards.items():
            training = Training(case, shard, tokens)
            works[name] = Work(training.step, wrong=training.count_wrong(expected, self.world), copies=1)
            peaks[name] = {"peak": peak_memory(self.world, training.gradients_of_batch), "parameter_bytes": nbytes}
        del expected
        return self.time(case, works, copied=nbytes, more=peaks)

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
        from mlxdist.nn.models.cuts import cuts

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
    from .models import make_model

    return make_model("qwen", case["hidden"], mx.float32, case["layers"], case["vocabulary"])


def _loss(model: nn.Module, tokens: mx.array) -> mx.array:
    inputs, targets = tokens
    return nn.losses.cross_entropy(model(inputs), targets, reduction="mean")


def _shard_by_mlx(model: nn.Module, group: mx.distributed.Group) -> None:
    """Shards the layers, as MLX's documentation does, and the rest: the embeddings, the last norm and the head."""
    shard = partial(nn.fully_shard, group=group)
    model.model.layers = [shard(layer) for layer in model.model.layers]
    model.model.embed_tokens, model.model.norm = shard(model.model.embed_tokens), shard(model.model.norm)
    model.lm_head = shard(model.lm_head)


def _add_sum_scatter(ring: mx.distributed.Group) -> None:
    """Gives the ring a sum_scatter, which nn.fully_shard calls; the ring's own raises "sum_scatter not supported"."""
    elsewhere = mx.distributed.sum_scatter

    def sum_scatter(x: mx.array, *, group: Any = None, stream: Any = None) -> mx.array:
        if group is not ring:
            return elsewhere(x, group=group, stream=stream)
        rows = x.shape[0] // ring.size()
        return mx.distributed.all_sum(x, group=ring, stream=stream)[ring.rank() * rows : (ring.rank() + 1) * rows]

    mx.distributed.sum_scatter = sum_scatter


def targets(results: Results) -> list[Target]:
    return [
        Target.slower(case_name(row[OURS]["case"]), row, OURS, [other], factor)
        for row in by_case(results)
        for other, factor in ((MLX, FASTER_THAN_MLX), (RING, FASTER_THAN_RING))
    ]


def _title(results: Results) -> str:
    nbytes = results["cases"][0]["parameter_bytes"]
    return f"a step on {results['setup']['ranks']} ranks, {tables.size(nbytes)} of parameters"


@Benchmark(
    ShardedTraining,
    show=Comparison(_title, OURS, (MLX, RING), peak_columns((OURS, MLX, RING))),
    targets=targets,
    repeats=9,
)
@click.option("--hidden", type=multiples_of(128), default="512", show_default=True, help="Sizes of the layers.")
@click.option("--layers", type=click.IntRange(1, 256), default=6, show_default=True, help="Of Qwen3.")
@click.option("--vocabulary", type=multiples_of(64), default="2048", show_default=True, help="Tokens that there are.")
@click.option("--tokens", type=click.IntRange(1, 65536), default=32, show_default=True, help="Of a rank's batch.")
def fsdp(runner: Runner, hidden: list[int], layers: int, vocabulary: list[int], tokens: int) -> Results:
    """Time a step of fully sharded training (ZeRO-3), in float32 on the CPU, with AdamW, and count its memory.

    train.fully_shard ("mlxdist"); MLX's nn.fully_shard on mlxdist ("mlx"), around each decoder layer, the embeddings
    and the head; and the same on MLX's ring ("ring"). The ring has no sum_scatter, so there it is an all_sum of which
    each rank keeps its part. The gradients of each are compared with those of one process. The peak of memory is what
    the gradients need beyond parameters and optimizer; they themselves are in it.

    The exit status is 1 if a result was wrong, a time is shorter than the memory allows, or a file is not written.
    """
    if any(size % runner.ranks for size in (*hidden, *vocabulary)):
        needed = f"--hidden and --vocabulary to be multiples of {runner.ranks}"
        raise click.UsageError(f"MLX's nn.fully_shard needs {needed}, the number of ranks")
    cases = [
        {"operation": "step", "hidden": size, "layers": layers, "vocabulary": words, "tokens": tokens}
        for size, words in product(hidden, vocabulary)
    ]
    return runner.run(cases)
