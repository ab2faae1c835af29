"""What the ranks of `mlxdist bench ep` measure: one layer of experts in all the ways, in the same processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.nn.layers.distributed import shard_inplace
from mlx.utils import tree_map
from mlx_lm.models.qwen3_moe import Qwen3MoeSparseMoeBlock

import mlxdist
from mlxdist.nn.expert_parallel.policy import MODES, Policy, calibrate
from mlxdist.nn.expert_parallel.switch_glu import ExpertParallelSwitchGLU

from .bandwidth import READ_ONLY
from .mlx_groups import mlx_group
from .operations import count_off
from .rank import time_case
from .shapes import AUTO, COMPILED, INSIDE, ONE_PROCESS, RING, SHAPES, Shape
from .timing import Work, asleep, interleave

# A result may differ from the reference by rounding alone: float32, sums of a few hundred terms in another order.
TOLERANCE = 1e-4


class Experts:
    """Cases: operation (a name of `SHAPES`), tokens. Parameters: scale (or None), sharded, repeats."""

    def __init__(self, world: mlxdist.Group, parameters: dict[str, Any]) -> None:
        self.world, self.parameters = world, parameters
        self.ring, self.policy = mlx_group("ring", world), Policy(calibrate(group=world))
        self.layer: Layer | None = None

    def __call__(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        shape = SHAPES[case["operation"]].scaled(self.parameters["scale"])
        if self.layer is None or self.layer.shape != shape:
            self.layer = Layer(shape, self.world, self.ring, self.policy, self.parameters["sharded"])
        return self.layer.results(case, self.parameters["repeats"])


class Layer:
    """mlx-lm's block of experts, unsharded, sharded by mlx-lm and expert-parallel, with the same weights."""

    def __init__(
        self, shape: Shape, world: mlxdist.Group, ring: mx.distributed.Group, policy: Policy, sharded: bool
    ) -> None:
        mx.random.seed(0)
        self.shape, self.world, self.sharded = shape, world, sharded
        self.full = make_block(shape)
        self.on_ring = shard_as_mlx_lm(self.full, shape, ring)
        how: dict[str, Any] = {"tokens": "sharded" if sharded else "replicated", "policy": policy}
        ways: dict[str, dict[str, Any]] = {mode: {"group": world, "mode": mode} | how for mode in (*MODES, AUTO)}
        if not sharded:
            ways[COMPILED] = {"group": world, "mode": "replicated", "host_sync": False}
            ways[INSIDE] = {"group": world.split(world.rank()), "tp_group": world, "host_sync": False}
        self.parallel = {
            name: ExpertParallelSwitchGLU.from_switch(self.full.switch_mlp, **way) for name, way in ways.items()
        }
        mx.eval([layer.parameters() for layer in self.parallel.values()])

    def results(self, case: dict[str, Any], repeats: int) -> list[dict[str, Any]]:
        shape, tokens = self.shape, case["tokens"]
        x = mx.random.normal((tokens, shape.hidden_size), key=mx.random.key(tokens))
        mine = self._own_part(tokens) if self.sharded else slice(0, tokens)
        part = x[mine]
        expected = self.full(x)
        mx.eval(x, part, expected)
        ways: dict[str, tuple[Callable[[], mx.array], mx.array]] = {
            # On rank 0 alone, while the others sleep.
            ONE_PROCESS: (lambda: self.full(x), expected),
            RING: (lambda: self.on_ring(x), expected),
        }
        for mode, experts in self.parallel.items():
            routed = partial(self._routed, experts=experts)
            ways[mode] = (partial(mx.compile(routed) if mode == COMPILED else routed, part), expected[mine])
        read = self._bytes_read(x)
        copied = max(read.values())
        works = {}
        for name, (call, wanted) in ways.items():
            result = call()
            mx.eval(result)  # by all ranks, also by one that has no token
            wrong = count_off(wanted, TOLERANCE, result) if wanted.size else 0
            timed = Work(partial(_evaluate, call), wrong=partial(int, wrong), copies=read[name] / copied / READ_ONLY)
            works[name] = replace(timed, elsewhere=asleep) if name == ONE_PROCESS and self.world.rank() else timed
        take = partial(interleave, repeats=repeats)
        results = time_case(self.world, case, works, take, copied=copied, means=True)
        auto = self.parallel[AUTO].last_mode
        return [result | {"described": shape.described, "mode": auto} for result in results]

    def _own_part(self, tokens: int) -> slice:
        first, end = (tokens * rank // self.world.size() for rank in (self.world.rank(), self.world.rank() + 1))
        return slice(first, end)

    def _routed(self, x: mx.array, experts: ExpertParallelSwitchGLU) -> mx.array:
        """What mlx-lm's block does, with our experts."""
        indices, scores = route(self.full, x)
        return experts(x, indices, scores)

    def _bytes_read(self, x: mx.array) -> dict[str, int]:
        """Bytes of weights that the busiest rank reads at least, each once."""
        selected = np.unique(np.array(route(self.full, x)[0]))
        shape, ranks = self.shape, self.world.size()
        each = 3 * shape.hidden_size * shape.moe_intermediate_size * 4
        owners = self.parallel[AUTO].placement.owners[selected]
        parallel = dict.fromkeys(self.parallel, int(np.bincount(owners, minlength=ranks).max()) * each)
        inside = [RING, INSIDE] if INSIDE in self.parallel else [RING]
        return {ONE_PROCESS: len(selected) * each} | parallel | dict.fromkeys(inside, len(selected) * each // ranks)


def route(block: Qwen3MoeSparseMoeBlock, x: mx.array) -> tuple[mx.array, mx.array]:
    """The experts of each token, and their weights."""
    gates = mx.softmax(block.gate(x), axis=-1, precise=True)
    indices = mx.argpartition(gates, kth=-block.top_k, axis=-1)[..., -block.top_k :]
    scores = mx.take_along_axis(gates, indices, axis=-1)
    return indices, scores / mx.sum(scores, axis=-1, keepdims=True)


def _evaluate(call: Callable[[], mx.array]) -> None:
    mx.eval(call())


def make_block(shape: Any, dtype: str = "float32") -> Qwen3MoeSparseMoeBlock:
    """``shape``: a `Shape`, which has those fields of mlx-lm's ModelArgs that the block reads."""
    block = Qwen3MoeSparseMoeBlock(shape)
    block.apply(lambda weight: weight.astype(getattr(mx, dtype)))
    mx.eval(block.parameters())
    return block


def shard_as_mlx_lm(full: nn.Module, shape: Shape, group: mx.distributed.Group) -> nn.Module:
    """A block with the same weights, to which is done what shard() of mlx-lm's qwen3_moe does.

    Raises:
        ValueError: mlx-lm cannot shard it for this number of ranks.
    """
    block: nn.Module = make_block(shape)
    block.update(tree_map(mx.array, full.parameters()))
    block.sharding_group = group
    shard_inplace(block.switch_mlp.gate_proj, "all-to-sharded", group=group)
    shard_inplace(block.switch_mlp.down_proj, "sharded-to-all", group=group)
    shard_inplace(block.switch_mlp.up_proj, "all-to-sharded", group=group)
    mx.eval(block.parameters())
    return block
