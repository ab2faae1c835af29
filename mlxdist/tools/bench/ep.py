"""`mlxdist bench ep`: a layer of experts, expert-parallel in each mode, in one process, and by mlx-lm's sharding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.nn.layers.distributed import shard_inplace
from mlx.utils import tree_map

import mlxdist
from mlxdist.base.output_file import OUTPUT_FILE

from .bandwidth import READ_ONLY
from .benchmark import Benchmark
from .mlx_groups import mlx_group
from .operations import count_off
from .results import Comparison, Results, Target, by_case, case_name
from .runner import Runner, require_package
from .sizes import multiples_of, names_of
from .timing import Work, asleep
from .workload import BenchmarkWorkload, evaluated

__all__ = ["SHAPES", "Experts", "ep", "make_block", "route", "shard_as_mlx_lm", "targets"]

ONE_PROCESS, RING, AUTO, COMPILED, INSIDE = "one process", "mlx-lm on ring", "auto", "compiled", "sharded inside"
LABELS = {
    RING: "mlx-lm, sharded, on MLX's ring",
    AUTO: "chosen by the policy",
    COMPILED: "replicated, in mx.compile",
    INSIDE: "every expert sharded inside",
}
STYLES: dict[str, dict[str, Any]] = {
    ONE_PROCESS: {"linestyle": "--", "color": "grey"},
    AUTO: {"linewidth": 3, "alpha": 0.4},
}
FASTER_THAN_ONE_PROCESS = 1.4  # to reach with 128 tokens
TARGET_TOKENS = 128
MAX_RANKS = 8  # mixtral has as many experts
# A result may differ from the reference by rounding alone: float32, sums of a few hundred terms in another order.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Shape:
    """The sizes of a layer of experts, named as mlx-lm's arguments for a model."""

    hidden_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    scale: int  # divides widths by default: a call of 512 tokens then takes less than a second
    norm_topk_prob: bool = True

    @property
    def described(self) -> str:
        sizes = f"{self.hidden_size}x{self.moe_intermediate_size}"
        return f"{sizes}, top {self.num_experts_per_tok} of {self.num_experts}"

    def scaled(self, scale: int | None) -> Shape:
        """Returns the shape with its widths divided by ``scale``, or by its own default; at least 32."""
        by = scale or self.scale
        return replace(
            self,
            hidden_size=max(32, self.hidden_size // by),
            moe_intermediate_size=max(32, self.moe_intermediate_size // by),
        )


SHAPES = {
    "mixtral": Shape(4096, 14336, 8, 2, scale=16),  # Mixtral 8x7B
    "qwen3.5-moe": Shape(2048, 512, 256, 8, scale=8),  # Qwen3.5-35B-A3B, without its shared expert
}


class Experts(BenchmarkWorkload):
    """Cases: operation (a name of `SHAPES`), tokens. Parameters: scale (or None), sharded."""

    def __init__(self, world: mlxdist.Group, parameters: dict[str, Any]) -> None:
        from mlxdist.nn.expert_parallel.policy import Policy, calibrate

        super().__init__(world, parameters)
        self.ring, self.policy = mlx_group("ring", world), Policy(calibrate(group=world))
        self.layer: Layer | None = None

    def __call__(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        shape = SHAPES[case["operation"]].scaled(self.parameters["scale"])
        if self.layer is None or self.layer.shape != shape:
            self.layer = Layer(shape, self.world, self.ring, self.policy, self.parameters["sharded"])
        works, copied = self.layer.works(case["tokens"])
        # Known only after a call, as the policy chooses then.
        described = {"described": shape.described, "mode": self.layer.parallel[AUTO].last_mode}
        return self.time(case, works, copied=copied, means=True, more=dict.fromkeys(works, described))


class Layer:
    """mlx-lm's block of experts, unsharded, sharded by mlx-lm and expert-parallel, with the same weights."""

    def __init__(
        self, shape: Shape, world: mlxdist.Group, ring: mx.distributed.Group, policy: Any, sharded: bool
    ) -> None:
        from mlxdist.nn.expert_parallel.policy import MODES
        from mlxdist.nn.expert_parallel.switch_glu import ExpertParallelSwitchGLU

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

    def works(self, tokens: int) -> tuple[dict[str, Work], int]:
        """Returns a work for each variant, and the bytes that the variant with the most weights must read."""
        x = mx.random.normal((tokens, self.shape.hidden_size), key=mx.random.key(tokens))
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
            works[name] = Work(evaluated(call), wrong=wrong, copies=read[name] / copied / READ_ONLY)
        if self.world.rank():
            works[ONE_PROCESS] = replace(works[ONE_PROCESS], elsewhere=asleep)
        return works, copied

    def _own_part(self, tokens: int) -> slice:
        first, end = (tokens * rank // self.world.size() for rank in (self.world.rank(), self.world.rank() + 1))
        return slice(first, end)

    def _routed(self, x: mx.array, experts: Any) -> mx.array:
        """Computes mlx-lm's block with our experts."""
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


def route(block: Any, x: mx.array) -> tuple[mx.array, mx.array]:
    """The experts of each token, and their weights."""
    gates = mx.softmax(block.gate(x), axis=-1, precise=True)
    indices = mx.argpartition(gates, kth=-block.top_k, axis=-1)[..., -block.top_k :]
    scores = mx.take_along_axis(gates, indices, axis=-1)
    return indices, scores / mx.sum(scores, axis=-1, keepdims=True)


def make_block(shape: Any, dtype: str = "float32") -> nn.Module:
    """Returns mlx-lm's block. ``shape``: a `Shape`, which has the fields of mlx-lm's ModelArgs that the block reads."""
    from mlx_lm.models.qwen3_moe import Qwen3MoeSparseMoeBlock

    block = Qwen3MoeSparseMoeBlock(shape)
    block.apply(lambda weight: weight.astype(getattr(mx, dtype)))
    mx.eval(block.parameters())
    return block


def shard_as_mlx_lm(full: nn.Module, shape: Shape, group: mx.distributed.Group) -> nn.Module:
    """Returns a block with the same weights, sharded as shard() of mlx-lm's qwen3_moe shards it.

    Raises:
        ValueError: mlx-lm cannot shard the block for this number of ranks.
    """
    block = make_block(shape)
    block.update(tree_map(mx.array, full.parameters()))
    block.sharding_group = group
    shard_inplace(block.switch_mlp.gate_proj, "all-to-sharded", group=group)
    shard_inplace(block.switch_mlp.down_proj, "sharded-to-all", group=group)
    shard_inplace(block.switch_mlp.up_proj, "all-to-sharded", group=group)
    mx.eval(block.parameters())
    return block


def targets(results: Results) -> list[Target]:
    found = []
    for row in by_case(results):
        case = row[AUTO]["case"]
        where = case_name(case)
        wanted = {f"{where}: mlx-lm's sharding": (RING, 1.0)}
        if case["tokens"] == TARGET_TOKENS:
            wanted[f"{where}: one process"] = ONE_PROCESS, FASTER_THAN_ONE_PROCESS
        found += [Target.slower(name, row, AUTO, [other], bound) for name, (other, bound) in wanted.items()]
    return found


def _title(results: Results) -> str:
    where = "each rank its part of the tokens" if results["setup"]["sharded"] else "all ranks all tokens"
    return f"{results['setup']['ranks']} ranks, {where}"


def _draw(results: Results, path: Path) -> None:
    from .plots import draw_tokens  # only now: matplotlib takes a second to load

    draw_tokens(results, LABELS, STYLES, path)


@Benchmark(
    Experts,
    show=Comparison(_title, AUTO, (RING, ONE_PROCESS), {"auto is": lambda row: row[AUTO]["mode"]}),
    targets=targets,
    draw=_draw,
    repeats=9,
    max_ranks=MAX_RANKS,
)
@click.option("--shape", "shapes", type=names_of(tuple(SHAPES)), default="all", help="Layers [default: all].")
@click.option("--scale", type=click.IntRange(1, 256), help="Divide widths by this [default: 16, qwen3.5-moe 8].")
@click.option(
    "--tokens", type=multiples_of(1), default="1,2,4,8,16,32,64,128,256,512", show_default=True, help="In a call."
)
@click.option("--sharded", is_flag=True, help="Each rank has its part of the tokens, instead of all ranks all of them.")
@click.option("--plot", "picture", type=OUTPUT_FILE, help="Draw times over tokens into this PNG.")
def ep(runner: Runner, shapes: list[str], scale: int | None, tokens: list[int], sharded: bool) -> Results:
    """Time a layer of experts, in float32 on the CPU, on this machine or several hosts, and check its results.

    Router, experts and exchange, in alternating blocks: each mode of ExpertParallelSwitchGLU; the one that a
    calibrated policy chooses ("auto"); all of it in mx.compile, where nothing waits for the host ("compiled"); the
    same layer with every expert sharded by its tp_group ("sharded inside"; both not with --sharded); mlx-lm's own
    sharding, which shards likewise, on MLX's ring; and the full layer in one process while the others sleep. A BLAS
    has one thread in each process.

    The exit status is 1 if a result was wrong, a time is shorter than the memory allows, or a file is not written.
    """
    require_package("mlx_lm", "lm")
    cases = [{"operation": shape, "tokens": count} for shape in shapes for count in tokens]
    return runner.run(cases, scale=scale, sharded=sharded)
