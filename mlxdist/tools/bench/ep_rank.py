"""What each rank of `mlxdist bench ep` runs: one layer of experts, in all the ways, in turn, in the same processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.distributed import shard_inplace
from mlx.utils import tree_map
from mlx_lm.models.qwen3_moe import Qwen3MoeSparseMoeBlock

import mlxdist
from mlxdist.nn.experts.policy import MODES, Policy, calibrate
from mlxdist.nn.experts.switch import ExpertParallelSwitchGLU

from .ep import AUTO, COMPILED, INSIDE, ONE_PROCESS, RING, SHAPES, Shape
from .job import serve
from .limits_rank import copy_work
from .mlx_groups import mlx_group
from .timing import Work, interleave, quantiles, slowest

# A result may differ from the reference by rounding alone: float32, sums of a few hundred terms in another order.
TOLERANCE = 1e-4
# A copy reads and writes; caches and prefetching make a read at most so many times as fast as that.
FASTEST_READ = 4


def measure(world: mlxdist.Group, parameters: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Parameters: shapes (names), scale (or None), tokens (list), sharded, rounds."""
    ring = mlx_group("ring", world)
    policy = Policy(calibrate(world))
    for name in parameters["shapes"]:
        layer = Layer(SHAPES[name].scaled(parameters["scale"]), world, ring, policy, parameters["sharded"])
        for tokens in parameters["tokens"]:
            yield {"shape": name} | layer.case(tokens, parameters["rounds"])


class Layer:
    """mlx-lm's block of experts, whole, sharded by mlx-lm and expert-parallel, with the same weights."""

    def __init__(
        self, shape: Shape, world: mlxdist.Group, ring: mx.distributed.Group, policy: Policy, sharded: bool
    ) -> None:
        mx.random.seed(0)
        self.shape, self.world, self.sharded = shape, world, sharded
        self.whole = self._block()
        parameters = tree_map(mx.array, self.whole.parameters())
        self.on_ring = self._block()
        self.on_ring.update(parameters)
        shard_as_mlx_lm(self.on_ring, ring)
        how = {"tokens": "sharded" if sharded else "replicated", "policy": policy}
        self.parallel = {
            mode: ExpertParallelSwitchGLU.from_switch(self.whole.switch_mlp, world, mode=mode, **how)
            for mode in (*MODES, AUTO)
        }
        if not sharded:
            self.parallel[COMPILED] = ExpertParallelSwitchGLU.from_switch(
                self.whole.switch_mlp, world, mode="replicated", host_sync=False
            )
            self.parallel[INSIDE] = ExpertParallelSwitchGLU.from_switch(
                self.whole.switch_mlp, world.split(world.rank()), tp_group=world, host_sync=False
            )
        mx.eval(self.on_ring.parameters(), [layer.parameters() for layer in self.parallel.values()])

    def _block(self) -> Qwen3MoeSparseMoeBlock:
        block = Qwen3MoeSparseMoeBlock(self.shape)
        mx.eval(block.parameters())
        return block

    def case(self, tokens: int, rounds: int) -> dict[str, Any]:
        """All ways in turn: times, what is wrong with the results, and what cannot be."""
        world, rank = self.world, self.world.rank()
        x = mx.random.normal((tokens, self.shape.hidden_size), key=mx.random.key(tokens))
        mine = self._own_part(tokens) if self.sharded else slice(0, tokens)
        part = x[mine]
        expected = self.whole(x)
        mx.eval(x, part, expected)
        ways: dict[str, tuple[Callable[[], mx.array], mx.array]] = {
            # On rank 0 alone, while the others sleep.
            ONE_PROCESS: (lambda: self.whole(x), expected),
            RING: (lambda: self.on_ring(x), expected),
        }
        for mode, experts in self.parallel.items():
            routed = partial(self._routed, experts=experts)
            ways[mode] = (partial(mx.compile(routed) if mode == COMPILED else routed, part), expected[mine])
        wrong = {name: self._wrong(call(), wanted) for name, (call, wanted) in ways.items()}
        works = {name: Work(lambda call=call: mx.eval(call())) for name, (call, _) in ways.items()}
        if rank > 0:
            works[ONE_PROCESS] = Work(lambda: None)
        read = self._bytes_read(x)
        works["memcpy"] = copy_work(max(read.values()))
        taken = interleave(works, rounds, world)
        spread = {name: quantiles(slowest(blocks.mean(axis=1), world)) for name, blocks in taken.items()}
        memcpy = spread.pop("memcpy")
        return {
            "tokens": tokens,
            "hidden": self.shape.hidden_size,
            "intermediate": self.shape.moe_intermediate_size,
            "experts": self.shape.num_experts,
            "top_k": self.shape.num_experts_per_tok,
            "sharded": self.sharded,
            "chosen": self.parallel[AUTO].last_mode,
            "microseconds": spread,
            "memcpy": memcpy,
            "wrong": wrong,
            "refused": self._refused(spread, read, memcpy["min"] / max(read.values())),
        }

    def _own_part(self, tokens: int) -> slice:
        first, behind = (tokens * rank // self.world.size() for rank in (self.world.rank(), self.world.rank() + 1))
        return slice(first, behind)

    def _routed(self, x: mx.array, experts: ExpertParallelSwitchGLU) -> mx.array:
        """What mlx-lm's block does, with our experts."""
        indices, scores = route(self.whole, x)
        return experts(x, indices, scores)

    def _wrong(self, y: mx.array, expected: mx.array) -> int:
        """Elements of all ranks together."""
        scale = max(1.0, mx.abs(expected).max().item()) if expected.size else 1.0
        mine = (~(mx.abs(y - expected) <= TOLERANCE * scale)).sum()  # NaN is wrong, too
        return int(mlxdist.all_sum(mine, group=self.world).item())

    def _bytes_read(self, x: mx.array) -> dict[str, int]:
        """Bytes of weights that the busiest rank reads at least, each once."""
        chosen = np.unique(np.array(route(self.whole, x)[0]))
        shape, ranks = self.shape, self.world.size()
        each = 3 * shape.hidden_size * shape.moe_intermediate_size * 4
        owners = self.parallel[AUTO].placement.owners[chosen]
        parallel = dict.fromkeys(self.parallel, int(np.bincount(owners, minlength=ranks).max()) * each)
        inside = [RING, INSIDE] if INSIDE in self.parallel else [RING]
        return {ONE_PROCESS: len(chosen) * each} | parallel | dict.fromkeys(inside, len(chosen) * each // ranks)

    def _refused(self, spread: dict[str, Any], read: dict[str, int], per_byte: float) -> list[str]:
        """The ways whose median cannot be true."""
        return [
            f"{name}: {spread[name]['median']:.1f} us for {nbytes} bytes of weights, which take at least "
            f"{nbytes * per_byte / FASTEST_READ:.1f} us to read; the clock or the work is wrong, so this is no result"
            for name, nbytes in read.items()
            if spread[name]["median"] < nbytes * per_byte / FASTEST_READ
        ]


def route(block: Qwen3MoeSparseMoeBlock, x: mx.array) -> tuple[mx.array, mx.array]:
    """The experts of each token, and their weights."""
    gates = mx.softmax(block.gate(x), axis=-1, precise=True)
    indices = mx.argpartition(gates, kth=-block.top_k, axis=-1)[..., -block.top_k :]
    scores = mx.take_along_axis(gates, indices, axis=-1)
    return indices, scores / mx.sum(scores, axis=-1, keepdims=True)


def shard_as_mlx_lm(block: Qwen3MoeSparseMoeBlock, group: mx.distributed.Group) -> None:
    """What shard() of mlx-lm's qwen3_moe does to its block."""
    block.sharding_group = group
    shard_inplace(block.switch_mlp.gate_proj, "all-to-sharded", group=group)
    shard_inplace(block.switch_mlp.down_proj, "sharded-to-all", group=group)
    shard_inplace(block.switch_mlp.up_proj, "all-to-sharded", group=group)


if __name__ == "__main__":
    serve(measure, limits=True)
