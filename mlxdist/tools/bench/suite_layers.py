"""Layers of `mlxdist bench suite`: of experts and tensor parallelism, by mlxdist, and by mlx-lm on MLX's backends."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

import mlxdist

from .ep import SHAPES, make_block, route, shard_as_mlx_lm
from .operations import TOLERANCE, Inputs, count_off, to_mlx
from .suite_ways import Absent, Way, exactly
from .workload import OURS

__all__ = ["EXPERTS", "Layer", "ep_pipeline", "ep_transport", "tp_layer"]

NO_ALL_TO_ALL = "mx.distributed has no all_to_all"
EXPERTS = {"ep_transport": SHAPES["qwen3.5-moe"], "ep_pipeline": SHAPES["mixtral"].scaled(None)}
# A decoder layer whose heads can be divided among this many ranks, see tp_layers.py.
HIDDEN = {2: 1024, 4: 512}
QUICK_HIDDEN = {2: 256, 4: 512}
CACHED = 128


@dataclass(frozen=True)
class Layer:
    """A case by all backends that have it.

    Attributes:
        read: the least bytes of weights or rows that the busiest rank must read.
    """

    ways: dict[str, Way]
    absent: dict[str, str]
    described: str
    read: int


def ep_transport(tokens: int, hidden: int, world: mlxdist.Group, groups: dict[str, mx.distributed.Group]) -> Layer:
    """Rows to the owners of their experts and back, weighted and added up, with nothing computed in between."""
    from mlxdist.nn.expert_parallel import Placement, combine, dispatch

    experts, top_k = EXPERTS["ep_transport"].num_experts, EXPERTS["ep_transport"].num_experts_per_tok
    data = Inputs("float16", tokens * hidden, world.size())
    mine = data[world.rank()].reshape(tokens, hidden)
    x, placement = to_mlx(mine, "float16"), Placement(experts, world.size())
    selected = np.argsort(np.random.default_rng(world.rank()).random((tokens, experts)), axis=1)[:, :top_k]
    indices = mx.array(selected.astype(np.int32))
    scores = mx.full((tokens, top_k), 1 / top_k)  # a power of 2: the sums are exact
    mx.eval(x, indices, scores)

    def start() -> list[mx.array]:
        received, _, handle = dispatch(x, indices, placement, group=world)
        return [combine(received, handle, scores)]

    away = [int((placement.owners[selected] == rank).any(axis=1).sum()) for rank in range(world.size())]
    away[world.rank()] = 0
    read = int(mlxdist.all_max(np.array([2 * sum(away) * hidden * 2], np.int64), group=world)[0])
    described = f"tokens of each rank, top {top_k} of {experts}"
    ways = {OURS: Way(start, partial(exactly, mine))} if OURS in groups else {}
    return Layer(ways, dict.fromkeys(groups.keys() - {OURS}, NO_ALL_TO_ALL), described, read)


def ep_pipeline(
    tokens: int, hidden: int, world: mlxdist.Group, groups: dict[str, mx.distributed.Group], dtype: str
) -> Layer:
    """Router, dispatch, experts, combine: ``tokens`` of each rank; on MLX's backends mlx-lm's sharding, on all tokens.

    Raises:
        Absent: there is no mlx-lm.
    """
    _require_mlx_lm()
    from mlxdist.nn.expert_parallel import ExpertParallelSwitchGLU

    shape, ranks, rank = replace(EXPERTS["ep_pipeline"], hidden_size=hidden), world.size(), world.rank()
    mx.random.seed(0)
    full = make_block(shape, dtype)
    x = mx.random.normal((tokens * ranks, shape.hidden_size), key=mx.random.key(tokens)).astype(getattr(mx, dtype))
    expected = full(x)
    mine = slice(tokens * rank, tokens * (rank + 1))
    part = x[mine]
    mx.eval(x, part, expected)
    ways, absent = {}, {}
    for name, group in groups.items():
        if name == OURS:
            experts = ExpertParallelSwitchGLU.from_switch(
                full.switch_mlp, group=world, mode="dispatch", tokens="sharded"
            )
            mx.eval(experts.parameters())
            start = partial(_listed, lambda: experts(part, *route(full, part)))
            ways[name] = Way(start, partial(count_off, expected[mine], TOLERANCE[dtype]))
            continue
        try:
            block = shard_as_mlx_lm(full, shape, group)
        except ValueError as error:
            absent[name] = f"mlx-lm cannot shard it: {error}"
            continue
        ways[name] = Way(partial(_listed, partial(block, x)), partial(count_off, expected, TOLERANCE[dtype]))
    each = 3 * shape.hidden_size * shape.moe_intermediate_size * x.itemsize
    read = len(np.unique(np.array(route(full, x)[0]))) * each // ranks
    return Layer(ways, absent, f"tokens of each rank, {shape.described}", read)


def tp_layer(
    phase: str, tokens: int, world: mlxdist.Group, groups: dict[str, mx.distributed.Group], dtype: str, quick: bool
) -> Layer:
    """A decoder layer: SplitBlock by mlxdist, mlx-lm's sharded layer on MLX's backends.

    Raises:
        Absent: there is no mlx-lm, or no size for this many ranks.
    """
    _require_mlx_lm()
    from .models import make_model
    from .tp_layers import variants

    hidden = (QUICK_HIDDEN if quick else HIDDEN).get(world.size())
    if hidden is None:
        raise Absent(f"its heads cannot be divided among {world.size()} ranks, only among 2 or 4")
    cached = CACHED if phase == "decode" else 0
    model = make_model("mixtral", hidden, getattr(mx, dtype))
    calls, expected, weights = variants(model, tokens, cached, world, {n: g for n, g in groups.items() if n != OURS})
    names = {name: "lazy" if name == OURS else name for name in groups}
    check = partial(count_off, expected, TOLERANCE[dtype])
    ways = {name: Way(partial(_listed, calls[known]), check) for name, known in names.items()}
    length = f"{cached} in the cache" if cached else f"{tokens} tokens"
    return Layer(ways, {}, f"Mixtral's layer, hidden {hidden}, {length}", weights)


def _require_mlx_lm() -> None:
    if importlib.util.find_spec("mlx_lm") is None:
        raise Absent("this needs mlx-lm: pip install 'mlxdist[lm]'")


def _listed(call: Any) -> list[mx.array]:
    return [call()]
