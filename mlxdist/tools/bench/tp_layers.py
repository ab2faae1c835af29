"""The ways to compute one decoder layer that `mlxdist bench tp` compares, all from the same weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.cache import KVCache

import mlxdist
from mlxdist.nn.split_block.split_block import Positions, SplitBlock, positions_of, reserve, segments, without_sums

__all__ = ["layer_bytes", "variants"]

CAPACITY = 256  # positions in a cache of mlx-lm before it grows
Call = Callable[[], mx.array | None]


def layer_bytes(layer: nn.Module) -> int:
    """The bytes of a layer's weights, which are read once per call."""
    return nn.utils.tree_reduce(lambda total, x: total + x.nbytes, layer.parameters(), 0)


@dataclass(frozen=True)
class Inputs:
    """``x``: (1, tokens, hidden). A cache begins with ``cached`` random positions."""

    x: mx.array
    keys: mx.array  # (1, KV heads of the full layer, CAPACITY, head_dim)
    values: mx.array
    cached: int

    @classmethod
    def random(cls, layer: nn.Module, tokens: int, cached: int) -> Inputs:
        hidden = layer.input_layernorm.weight.size
        heads = layer.self_attn.n_kv_heads
        shape = 1, heads, CAPACITY, layer.self_attn.k_proj.weight.shape[0] // heads
        dtype = layer.input_layernorm.weight.dtype
        keys = (mx.random.key(seed) for seed in (1, 2, 3))
        shapes = (1, tokens, hidden), shape, shape
        x, k, v = (mx.random.normal(s, key=key).astype(dtype) for s, key in zip(shapes, keys))
        mx.eval(x, k, v)
        return cls(x, k, v, cached)

    def part(self, rank: int, ranks: int) -> Inputs:
        """Returns the inputs with only the KV heads that this rank holds."""
        keys, values = (mx.contiguous(mx.split(x, ranks, 1)[rank]) for x in (self.keys, self.values))
        mx.eval(keys, values)
        return Inputs(self.x, keys, values, self.cached)

    @property
    def mask(self) -> str | None:
        return "causal" if self.x.shape[1] > 1 else None

    def new_cache(self) -> KVCache:
        """Returns a cache with its own copy of the keys and values, since MLX writes new ones into it."""
        cache = KVCache()
        if self.cached:
            cache.state = (mx.array(self.keys), mx.array(self.values), self.cached)
            mx.eval(cache.keys, cache.values)
        return cache


class Layer:
    """A decoder layer with a cache, called again and again at the same position."""

    def __init__(self, layer: Callable[..., mx.array], inputs: Inputs) -> None:
        self.layer, self.inputs = layer, inputs
        self.cache = inputs.new_cache()

    def __call__(self) -> mx.array:
        inputs = self.inputs
        if not inputs.cached:
            self.cache = KVCache()
        y = self.layer(inputs.x, inputs.mask, self.cache)
        mx.eval(y)
        self.cache.offset = inputs.cached
        return y


def compiled(layer: nn.Module, inputs: Inputs) -> Callable[..., mx.array]:
    """A layer of mlx-lm as one compiled function. Its position is a constant of the graph, so its time is better than
    in a model, where it would be traced again for every token."""

    def pure(x: mx.array, keys: mx.array | None, values: mx.array | None) -> tuple[Any, ...]:
        cache = KVCache()
        if keys is not None:
            cache.keys, cache.values, cache.offset = keys, values, inputs.cached
        y = layer(x, inputs.mask, cache)
        return y, cache.keys, cache.values

    function = mx.compile(pure)
    return lambda x, mask, cache: _updated(function, cache, x, cache.keys, cache.values)


def full_graph(block: SplitBlock) -> Callable[..., mx.array]:
    """A SplitBlock as one compiled function, its two all_sum inside."""

    def pure(x: mx.array, keys: mx.array | None, values: mx.array | None, *where: Any) -> tuple[Any, ...]:
        return segments(block, x, keys, values, Positions(*where))

    function = mx.compile(pure)

    def call(x: mx.array, mask: str | None, cache: KVCache) -> mx.array:
        where = positions_of(block, x, mask, cache)
        return _updated(function, cache, x, *reserve(block, cache, x), *where)

    return call


def _updated(function: Callable[..., Any], cache: KVCache, *arguments: Any) -> mx.array:
    """Returns the result, and puts the new keys and values into the cache, which drops the old ones before the call."""
    cache.keys = cache.values = None
    y, cache.keys, cache.values = function(*arguments)
    return y


def per_op(layer: nn.Module) -> Callable[..., mx.array]:
    """A sharded layer of mlx-lm with one evaluation for every operation."""
    attention, mlp = layer.self_attn, layer.mlp

    def evaluated(x: mx.array) -> mx.array:
        mx.eval(x)
        return x

    def heads(x: mx.array, count: int, norm: str) -> mx.array:
        x = x.reshape(*x.shape[:2], count, -1)
        if norm in attention:
            x = evaluated(attention[norm](x))
        return x.transpose(0, 2, 1, 3)

    def call(x: mx.array, mask: str | None, cache: KVCache) -> mx.array:
        y = evaluated(layer.input_layernorm(x))
        q, k, v = (evaluated(attention[name](y)) for name in ("q_proj", "k_proj", "v_proj"))
        q, k = heads(q, attention.n_heads, "q_norm"), heads(k, attention.n_kv_heads, "k_norm")
        v = v.reshape(*v.shape[:2], attention.n_kv_heads, -1).transpose(0, 2, 1, 3)
        q = evaluated(attention.rope(q, offset=cache.offset))
        k = evaluated(attention.rope(k, offset=cache.offset))
        k, v = cache.update_and_fetch(k, v)
        mx.eval(k, v)
        y = evaluated(mx.fast.scaled_dot_product_attention(q, k, v, scale=attention.scale, mask=mask))
        y = evaluated(attention.o_proj(y.transpose(0, 2, 1, 3).flatten(2)))
        x = evaluated(x + y)
        y = evaluated(layer.post_attention_layernorm(x))
        gate, up = evaluated(mlp.gate_proj(y)), evaluated(mlp.up_proj(y))
        y = evaluated(swiglu(gate, up))
        y = evaluated(mlp.down_proj(y))
        return evaluated(x + y)

    return call


def regrouped(module: nn.Module, group: mx.distributed.Group | None) -> nn.Module:
    """A copy that shares the arrays; sharded linears in it work in ``group``."""
    made = copy.copy(module)
    for name, value in module.items():
        if isinstance(value, nn.Module):
            made[name] = regrouped(value, group)
    if "group" in vars(made):
        made.group = group
    return made


def variants(
    model: nn.Module, tokens: int, cached: int, world: mlxdist.Group, groups: dict[str, mx.distributed.Group]
) -> tuple[dict[str, Call], mx.array, int]:
    """Returns the calls by name, the result that they must give, and the bytes of this rank's weights.

    A call whose name begins with "tp1" does nothing except on rank 0. If the name ends in "compute", the call leaves
    its sums out, so it gives another result.
    """
    dense = model.model.layers[0]
    inputs = Inputs.random(dense, tokens, cached)
    mine = inputs.part(world.rank(), world.size())
    reference = Layer(dense, inputs)
    expected = reference()
    alone = world.split(world.rank())
    assert alone is not None  # each rank has a color
    layers: dict[str, tuple[Callable[..., mx.array], Inputs]] = {}
    block = SplitBlock.from_layer(dense, group=world, submit=True)
    lazy = copy.copy(block)
    lazy.submit = False
    layers["split"], layers["lazy"], layers["graph"] = (block, mine), (lazy, mine), (full_graph(lazy), mine)
    layers["split compute"] = without_sums(block), mine
    layers["lazy compute"] = without_sums(lazy), mine
    sharded = regrouped(model, None)
    sharded.model.layers = [regrouped(dense, None)]
    sharded.shard(world.mlx)
    theirs = sharded.model.layers[0]
    mx.eval(theirs.parameters())
    layers["mlx"], layers["per-op"] = (theirs, mine), (per_op(theirs), mine)
    for name, group in groups.items():
        layer = regrouped(theirs, group)
        layers[name] = layer, mine
        layers[f"{name} compiled"] = compiled(layer, mine), mine
    layers["mlx compute"] = regrouped(theirs, alone.mlx), mine
    calls: dict[str, Call] = {name: Layer(*layer) for name, layer in layers.items()}
    first = world.rank() == 0
    calls["tp1"] = reference if first else _nothing
    calls["tp1 split"] = Layer(SplitBlock.from_layer(dense, group=alone), inputs) if first else _nothing
    return calls, expected, layer_bytes(lazy)


def _nothing() -> None:
    return None
