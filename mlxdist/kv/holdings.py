"""Which part of a prompt cache a rank's model has: the layers of its stage, and the KV heads of its shard.

A call of the model with one token finds it, and computes nothing: MLX is lazy. The caches then have the shapes that
this rank's have, and the module that takes a cache is the one whose parameters say how the cache is cut.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ..base.errors import InvalidArgument
from ..nn.interception import with_methods
from ..nn.layout.cut import Cut
from ..nn.layout.modules import children, join_path
from ..nn.models.cuts import cuts
from ..nn.models.plan import patterns
from ..nn.models.plan.block import attribute, first
from ..nn.pipeline_parallel.layers import is_cache, leaves
from .states import CACHES, described, parts_of, split, widths_of

__all__ = ["Held", "holdings"]


@dataclass(frozen=True)
class Held:
    """A rank's part of one cache. The cache may be one of several in a ``CacheList``.

    Attributes:
        listed: whether it is in a ``CacheList``.
        by_heads: whether it has keys and values; otherwise it has states, and is held as one head is.
        heads: the number of each of its KV heads in the full model, in the order of the cache; one may come more than
            once. None where another stage has the layer.
        total: how many the full model has.
        widths: the last dimension of each array: zero where another stage has the layer.
    """

    listed: bool
    by_heads: bool
    heads: tuple[int, ...]
    total: int
    widths: tuple[int | None, ...]


def holdings(model: Any) -> list[list[Held]]:
    """This rank's part of each layer's cache, in the order of ``make_prompt_cache(model)``. Calls no collective.

    Raises:
        InvalidArgument: how a layer's cache is cut is not known, or how the model is sharded.
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"kv: model must be an mlx.nn.Module, not {type(model).__name__}")
    parameters, cache = cuts(model), make_prompt_cache(model)
    takers, paths = _takers(model, cache), {id(module): path for path, module in model.named_modules()}
    held: list[list[Held]] = []
    for number, layer in enumerate(cache):
        held.append([])
        for part in parts_of(layer):
            module = takers.get(id(part)) or takers.get(id(layer)) or model
            path = paths[id(module)]
            inside = {name: cut for name, cut in parameters.items() if not path or name.startswith(f"{path}.")}
            try:
                held[-1].append(_held(part, part is not layer, module, path, inside))
            except InvalidArgument as error:
                raise InvalidArgument(
                    f"kv: layer {number}, whose cache is {type(layer).__name__}, cannot be sent: {error}"
                ) from None
    return held


def _takers(model: Any, cache: list[Any]) -> dict[int, nn.Module]:
    """The innermost module that takes each cache, by the ``id`` of the cache; the first if several modules take it."""
    takers: dict[int, nn.Module] = {}

    def call(kind: Any, self: nn.Module, *args: Any, **keywords: Any) -> Any:
        result = kind.__call__(self, *args, **keywords)
        for _, x in leaves([args, keywords]):
            if is_cache(x):
                takers.setdefault(id(x), self)
        return result

    modules = {id(module): module for module in model.modules() if callable(module) and any(children(module))}
    with with_methods(modules.values(), __call__=call):
        model(mx.zeros((1, 1), mx.int32), cache=cache)
    return takers


def _held(part: Any, listed: bool, module: nn.Module, path: str, inside: dict[str, Cut]) -> Held:
    """A rank's part of one cache that ``module`` takes, from the cuts of the parameters ``inside`` that module."""
    name = type(part).__name__
    if CACHES.get(name) is not type(part):
        raise InvalidArgument(f"mlx_lm.models.cache has no {name}")
    contents, _ = split(name, part.state)
    by_heads, widths = len(contents) == 2, tuple(widths_of(name, described(part.state)))
    if widths and all(width == 0 for width in widths):
        return Held(listed, by_heads, (), 0, widths)
    keys = contents[0] if by_heads else None
    count = 1 if keys is None else keys.shape[1]
    is_unused = all(width is None for width in widths)
    is_latent = by_heads and any(latent in module for latent in patterns.LATENT_HEADS)  # which all heads share
    if is_unused or is_latent or all(_has_all(cut) for cut in inside.values()):
        return Held(listed, by_heads, tuple(range(count)), count, widths)
    if keys is None or (found := _cut_heads(module, path, inside, keys)) is None:
        raise InvalidArgument(f"{path} is sharded, and which part of its cache a rank has is not known")
    return Held(listed, by_heads, *found, widths)


def _has_all(cut: Cut) -> bool:
    """Whether this rank has all of a parameter, also of one that is cut for others."""
    return all(ranges == ((0, length),) for ranges, length in zip(cut.ranges, cut.shape, strict=True))


def _cut_heads(
    module: nn.Module, path: str, inside: dict[str, Cut], keys: mx.array
) -> tuple[tuple[int, ...], int] | None:
    """The numbers of the KV heads of ``keys``, (batch, heads, tokens, width), and how many the full model has, from
    the outputs of the projection that makes them; ``None``: the outputs do not determine them."""
    name = first(module, (*patterns.KEYS, "kv_b_proj", *patterns.FUSED, *patterns.FUSED_BY_KV_HEAD))
    prefix = join_path(path, name or "-")
    # An adapter has it one deeper.
    weights = [cut for one, cut in inside.items() if one.startswith(f"{prefix}.") and one.endswith("weight")]
    if len(weights) != 1:
        return None
    count, width = keys.shape[1], keys.shape[3]
    (cut,) = weights
    outputs = np.concatenate([np.arange(*one) for one in cut.ranges[0]])  # those of the full layer that are here
    sources = {kind.__module__.rpartition(".")[2] for kind in type(module).__mro__}  # its own class is a sharded one
    by_kv_head = name in patterns.FUSED_BY_KV_HEAD or not sources.isdisjoint(patterns.QUERY_KEY_VALUE_BY_KV_HEAD)
    if name in patterns.FUSED and not by_kv_head:
        return _heads_in_fused(outputs, cut.shape[0], count, width)
    unit = outputs.size // count
    fits = unit == width or by_kv_head and unit % width == 0
    if name == "kv_b_proj":  # of each head a key without its rotary part, and a value
        fits = count == attribute(module, patterns.QUERY_HEADS)
    if not fits or outputs.size % count or cut.shape[0] % unit:
        return None
    return _numbers(outputs, unit), cut.shape[0] // unit


def _heads_in_fused(outputs: np.ndarray, total: int, count: int, width: int) -> tuple[tuple[int, ...], int] | None:
    """The result of :func:`_cut_heads` for a layer of all queries, then all keys, then all values, of one width."""
    length = count * width
    queries = outputs.size - 2 * length
    if queries <= 0 or outputs.size % width or total % width:
        return None
    keys, values = outputs[queries : queries + length], outputs[queries + length :]
    # Between a key output and the value output of the same head lie the keys of all heads of the full model.
    kv_heads = int(values[0] - keys[0]) // width
    before = total // width - 2 * kv_heads
    return tuple(number - before for number in _numbers(keys, width)), kv_heads


def _numbers(outputs: np.ndarray, unit: int) -> tuple[int, ...]:
    return tuple(int(number) for number in outputs[::unit] // unit)
