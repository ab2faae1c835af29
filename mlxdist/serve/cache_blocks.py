"""mlx-lm's prompt caches in parts: keys and values that can be cut at any token, and states that cannot.

A model's caches are those of its layers. The keys and values of a `KVCache` are cut into blocks of tokens, also where
a `CacheList` holds it. Others are states, which are copied whole and hold for one number of tokens: recurrent states,
sliding windows, and what mlx-lm may add.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models.cache import KVCache

from .row_caches import flat

__all__ = ["Block", "States", "can_be_cut", "copied_states", "cut", "fill", "packed", "part_of", "unpacked"]

_STATES = "states."

# Keys and values, (1, KV heads, tokens, head size), of each KVCache; None where another stage has the layer.
Block: TypeAlias = tuple[tuple[mx.array, mx.array] | None, ...]
States: TypeAlias = tuple[Any, ...]  # mlx-lm's `state` of each other cache


def can_be_cut(caches: Iterable[Any]) -> bool:
    """Whether the caches have no states."""
    return next(_with_states(caches), None) is None


def cut(caches: Sequence[Any], places: Sequence[slice]) -> list[Block]:
    """Copies of the keys and values of the tokens at ``places``. Takes them out of ``caches``.

    A layer at a time is copied, so that its memory is free before the next. A slice would keep the memory of all that
    it is a slice of.
    """
    layers: list[list[Any]] = []
    for cache in _with_keys(caches):
        if cache.keys is None:
            layers.append([None] * len(places))
            continue
        copies = [(_copied(cache.keys, place), _copied(cache.values, place)) for place in places]
        cache.keys = cache.values = None
        mx.async_eval(copies)
        layers.append(copies)
    return [tuple(layer[number] for layer in layers) for number in range(len(places))]


def part_of(block: Block, tokens: slice) -> Block:
    """A copy of some of the tokens of a block."""
    copied = tuple(pair and (_copied(pair[0], tokens), _copied(pair[1], tokens)) for pair in block)
    mx.async_eval(copied)
    return copied


def copied_states(caches: Sequence[Any]) -> States:
    """Copies of the states in ``caches``, with memory of their own."""
    copies = [tree_map(_copied_array, _state(cache)) for cache in _with_states(caches)]
    mx.async_eval(copies)
    return tuple(copies)


def fill(caches: Sequence[Any], blocks: Sequence[Block], tokens: int, states: States) -> None:
    """Puts the first ``tokens`` of consecutive blocks, and the states after them, into new ``caches`` of the model."""
    for index, cache in enumerate(_with_keys(caches)):
        layer = [block[index] for block in blocks]
        if layer and layer[0] is not None:
            cache.keys, cache.values = (mx.concatenate(each, axis=-2)[..., :tokens, :] for each in zip(*layer))
            cache.offset = tokens
    for cache, state in zip(_with_states(caches), states):
        state = copy.deepcopy(state)  # mlx-lm assigns to elements of its arrays
        if _has_settable_state(cache):
            cache.state = state
        else:
            vars(cache).update(state)


def packed(block: Block, states: States) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """A block, and the states after it, as named arrays and scalars for a file."""
    named: list[tuple[str, Any]] = []
    for index, pair in enumerate(block):
        if pair is not None:
            named += [(f"keys.{index}", pair[0]), (f"values.{index}", pair[1])]
    of_states: Any = tree_flatten(list(states))
    named += [(f"{_STATES}{name}", value) for name, value in of_states]
    arrays = {name: value for name, value in named if isinstance(value, mx.array)}
    return arrays, {name: value for name, value in named if name not in arrays} | {"layers": len(block)}


def unpacked(arrays: Mapping[str, mx.array], scalars: Mapping[str, Any]) -> tuple[Block, States]:
    """The reverse of :func:`packed`."""
    block = tuple(
        (arrays[f"keys.{index}"], arrays[f"values.{index}"]) if f"keys.{index}" in arrays else None
        for index in range(scalars["layers"])
    )
    values = {**arrays, **scalars}
    named = [(name.removeprefix(_STATES), value) for name, value in values.items() if name.startswith(_STATES)]
    return block, tuple(tree_unflatten(named)) if named else ()


def _state(cache: Any) -> Any:
    """The state that `fill` puts into another cache: mlx-lm's, or all attributes where that can only be read."""
    return cache.state if _has_settable_state(cache) else vars(cache)


def _has_settable_state(cache: Any) -> bool:
    return getattr(type(cache), "state").fset is not None  # a property


def _copied(array: mx.array, tokens: slice) -> mx.array:
    return mx.contiguous(array[..., tokens, :])


def _copied_array(value: Any) -> Any:
    return mx.contiguous(value) if isinstance(value, mx.array) else value


def _with_keys(caches: Iterable[Any]) -> Iterator[Any]:
    return (cache for cache in flat(caches) if type(cache) is KVCache)


def _with_states(caches: Iterable[Any]) -> Iterator[Any]:
    return (cache for cache in flat(caches) if type(cache) is not KVCache)
