"""The layers of `mlxdist bench suite`: expert and tensor parallelism, by mlxdist and as mlx-lm does it on MLX."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

import mlxdist
from mlxdist.nn.experts import ExpertParallelSwitchGLU, Placement, combine, dispatch

from .ep import SHAPES
from .operations import Inputs, to_mlx
from .suite_operations import OURS, Absent, Way, exactly

__all__ = ["Layer", "ep_pipeline", "ep_transport", "tp_layer"]

# Of the largest element; the order of additions differs.
TOLERANCE = {"float32": 1e-4, "float16": 2e-2}
NO_ALL_TO_ALL = "mx.distributed has no all_to_all"
TRANSPORT, PIPELINE = SHAPES["qwen3.5-moe"], SHAPES["mixtral"].scaled(None)
# A decoder layer whose heads can be divided among so many ranks, see tp_layers.py.
HIDDEN = {2: 1024, 4: 512}
QUICK_HIDDEN = {2: 256, 4: 512}
CACHED = 128


@dataclass(frozen=True)
class Layer:
    """A case by all backends that have it.

    Attributes:
        bytes: what the size of the case is taken to be.
        read: of weights or rows, what the busiest rank must have read at least.
    """

    ways: dict[str, Way]
    absent: dict[str, str]
    described: str
    bytes: int
    read: int


def ep_transport(tokens: int, world: mlxdist.Group, groups: dict[str, mx.distributed.Group]) -> Layer:
    """Rows to the owners of their experts and back, weighted and added up, with nothing computed in between."""
    hidden, experts, top_k = TRANSPORT.hidden_size, TRANSPORT.num_experts, TRANSPORT.num_experts_per_tok
    data = Inputs("float16", tokens * hidden, world.size())
    mine = data[world.rank()].reshape(tokens, hidden)
    x, placement = to_mlx(mine, "float16"), Placement(experts, world.size())
    chosen = np.argsort(np.random.default_rng(world.rank()).random((tokens, experts)), axis=1)[:, :top_k]
    indices = mx.array(chosen.astype(np.int32))
    scores = mx.full((tokens, top_k), 1 / top_k)  # a power of 2: the sums are exact
    mx.eval(x, indices, scores)

    def start() -> list[mx.array]:
        received, _, handle = dispatch(x, indices, placement, world)
        return [combine(received, handle, scores)]

    away = [int((placement.owners[chosen] == rank).any(axis=1).sum()) for rank in range(world.size())]
    away[world.rank()] = 0
    read = int(mlxdist.all_max(np.array([2 * sum(away) * hidden * 2], np.int64), group=world)[0])
    described = f"{tokens} tokens of {hidden} each, top {top_k} of {experts}"
    ways = {OURS: Way(start, partial(exactly, mine))} if OURS in groups else {}
    return Layer(ways, dict.fromkeys(groups.keys() - {OURS}, NO_ALL_TO_ALL), described, mine.nbytes, read)


def ep_pipeline(tokens: int, world: mlxdist.Group, groups: dict[str, mx.distributed.Group], dtype: str) -> Layer:
    """Router, dispatch, experts, combine: ``tokens`` of each rank; on MLX's backends mlx-lm's sharding, on all tokens.

    Raises:
        Absent: there is no mlx-lm.
    """
    _require_mlx_lm()
    from mlx.utils import tree_map
    from mlx_lm.models.qwen3_moe import Qwen3MoeSparseMoeBlock

    from .ep_rank import route, shard_as_mlx_lm

    shape, ranks, rank = PIPELINE, world.size(), world.rank()
    mx.random.seed(0)
    whole = Qwen3MoeSparseMoeBlock(shape)
    whole.apply(lambda weight: weight.astype(getattr(mx, dtype)))
    x = mx.random.normal((tokens * ranks, shape.hidden_size), key=mx.random.key(tokens)).astype(getattr(mx, dtype))
    expected = whole(x)
    mine = slice(tokens * rank, tokens * (rank + 1))
    part = x[mine]
    mx.eval(whole.parameters(), x, part, expected)
    ways, absent = {}, {}
    for name, group in groups.items():
        if name == OURS:
            experts = ExpertParallelSwitchGLU.from_switch(whole.switch_mlp, world, mode="dispatch", tokens="sharded")
            mx.eval(experts.parameters())
            start = partial(_listed, lambda: experts(part, *route(whole, part)))
            ways[name] = Way(start, partial(_about, expected[mine], TOLERANCE[dtype]))
            continue
        try:
            block = Qwen3MoeSparseMoeBlock(shape)
            block.update(tree_map(mx.array, whole.parameters()))
            shard_as_mlx_lm(block, group)
        except ValueError as error:
            absent[name] = f"mlx-lm cannot shard it: {error}"
            continue
        mx.eval(block.parameters())
        ways[name] = Way(partial(_listed, partial(block, x)), partial(_about, expected, TOLERANCE[dtype]))
    each = 3 * shape.hidden_size * shape.moe_intermediate_size * x.itemsize
    read = len(np.unique(np.array(route(whole, x)[0]))) * each // ranks
    described = f"{tokens} tokens of each rank, {shape.hidden_size}x{shape.moe_intermediate_size}, top "
    described += f"{shape.num_experts_per_tok} of {shape.num_experts}"
    return Layer(ways, absent, described, part.nbytes, read)


def tp_layer(
    phase: str, tokens: int, world: mlxdist.Group, groups: dict[str, mx.distributed.Group], dtype: str, quick: bool
) -> Layer:
    """A decoder layer: SplitBlock by mlxdist, mlx-lm's sharded layer on MLX's backends.

    Raises:
        Absent: there is no mlx-lm, or no size for so many ranks.
    """
    _require_mlx_lm()
    from .tp_layers import make_model, variants

    hidden = (QUICK_HIDDEN if quick else HIDDEN).get(world.size())
    if hidden is None:
        raise Absent(f"its heads cannot be divided among {world.size()} ranks, only among 2 or 4")
    cached = CACHED if phase == "decode" else 0
    model = make_model("mixtral", hidden, getattr(mx, dtype))
    calls, expected, weights = variants(model, tokens, cached, world, {n: g for n, g in groups.items() if n != OURS})
    names = {name: "lazy" if name == OURS else name for name in groups}
    check = partial(_about, expected, TOLERANCE[dtype])
    ways = {name: Way(partial(_listed, calls[known]), check) for name, known in names.items()}
    length = f"{cached} in the cache" if cached else f"{tokens} tokens"
    return Layer(ways, {}, f"Mixtral's layer, hidden {hidden}, {length}", weights, weights)


def _require_mlx_lm() -> None:
    if importlib.util.find_spec("mlx_lm") is None:
        raise Absent("this needs mlx-lm: pip install 'mlxdist[lm]'")


def _listed(call: Any) -> list[mx.array]:
    return [call()]


def _about(expected: mx.array, tolerance: float, result: mx.array) -> int:
    if result.shape != expected.shape:
        return max(1, expected.size)
    found, wanted = result.astype(mx.float32), expected.astype(mx.float32)
    scale = max(1.0, mx.abs(wanted).max().item()) if wanted.size else 1.0
    return int((~(mx.abs(found - wanted) <= tolerance * scale)).sum().item())  # NaN is wrong, too
