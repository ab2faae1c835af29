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
from mlx_lm.models.cache import CacheList, KVCache

from .row_caches import RowCache

__all__ = [
    "Block",
    "States",
    "can_be_cut",
    "copied_states",
    "cut",
    "fill",
    "halves",
    "last_tokens",
    "packed",
    "unpacked",
]

# Keys and values, (1, KV heads, tokens, head size), of each KVCache; None where another stage has the layer.
Block: TypeAlias = tuple[tuple[mx.array, mx.array] | None, ...]
States: TypeAlias = tuple[Any, ...]


def can_be_cut(caches: Iterable[Any]) -> bool:
    """Whether the caches have no states."""
    return all(type(each) is KVCache for each in _parts(caches))


def cut(caches: Sequence[Any], places: Sequence[slice]) -> list[Block]:
    """Copies of the keys and values of the tokens at ``places``. Takes them out of ``caches``.

    A layer at a time is copied, so that its memory is free before the next. A slice would keep the memory of all that
    it is a slice of.
    """
    layers: list[list[Any]] = []
    for cache in _parts(caches):
        if type(cache) is not KVCache:
            continue
        if cache.keys is None:
            layers.append([None] * len(places))
            continue
        copies = [(_copied(cache.keys, place), _copied(cache.values, place)) for place in places]
        cache.keys = cache.values = None
        mx.async_eval(copies)
        layers.append(copies)
    return [tuple(layer[number] for layer in layers) for number in range(len(places))]


def halves(block: Block, tokens: int) -> tuple[Block, Block]:
    """The first ``tokens`` of a block, and the others: copies."""

    def part(which: slice) -> Block:
        return tuple(each and (_copied(each[0], which), _copied(each[1], which)) for each in block)

    parts = part(slice(tokens)), part(slice(tokens, None))
    mx.async_eval(parts)
    return parts


def copied_states(caches: Sequence[Any]) -> States:
    """Copies of the states in ``caches``, with memory of their own."""
    found = []
    for cache in _parts(caches):
        if type(cache) is not KVCache:
            kept = copy.deepcopy(cache)
            kept.state = tree_map(lambda x: mx.contiguous(x) if isinstance(x, mx.array) else x, kept.state)
            mx.async_eval(kept.state)
            found.append(kept)
    return tuple(found)


def fill(caches: list[Any], blocks: Sequence[Block], tokens: int, states: States) -> None:
    """Puts the first ``tokens`` of consecutive blocks, and the states after them, into new ``caches`` of the model."""
    for index, cache in enumerate(part for part in _parts(caches) if type(part) is KVCache):
        layer = [block[index] for block in blocks]
        if layer and layer[0] is not None:
            cache.keys, cache.values = (mx.concatenate(each, axis=-2)[..., :tokens, :] for each in zip(*layer))
            cache.offset = tokens
    kept = iter(states)
    if states:
        _replace_states(caches, kept)


def last_tokens(block: Block, tokens: int) -> Block:
    """The last ``tokens`` of a block, which may have no more: then the block."""
    place = slice(-tokens, None)
    return tuple(
        pair if pair is None or pair[0].shape[-2] == tokens else (_copied(pair[0], place), _copied(pair[1], place))
        for pair in block
    )


def packed(block: Block, states: States) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """A block, and the states after it, as named arrays and scalars for a file."""
    named: list[tuple[str, Any]] = []
    for index, pair in enumerate(block):
        if pair is not None:
            named += [(f"keys.{index}", pair[0]), (f"values.{index}", pair[1])]
    for index, cache in enumerate(states):
        state: Any = tree_flatten(cache.state)
        named += [(f"states.{index}.{name}", value) for name, value in state]
    arrays = {name: value for name, value in named if isinstance(value, mx.array)}
    return arrays, {name: value for name, value in named if not isinstance(value, mx.array)}


def unpacked(arrays: Mapping[str, mx.array], scalars: Mapping[str, Any], caches: Sequence[Any]) -> tuple[Block, States]:
    """The reverse of :func:`packed`. ``caches``: new ones of the model, whose states are filled.

    Raises:
        KeyError, ValueError, TypeError: arrays are missing.
    """
    parts = list(_parts(caches))
    indices = range(sum(type(part) is KVCache for part in parts))
    block = tuple(
        (arrays[f"keys.{index}"], arrays[f"values.{index}"]) if f"keys.{index}" in arrays else None for index in indices
    )
    found = [part for part in parts if type(part) is not KVCache]
    values = {**arrays, **scalars}
    states = []
    for index, part in enumerate(found):
        start = f"states.{index}."
        if named := [(name.removeprefix(start), value) for name, value in values.items() if name.startswith(start)]:
            part.state = tree_unflatten(named)
            states.append(part)
    return block, tuple(states)


def _copied(array: mx.array, tokens: slice) -> mx.array:
    return mx.contiguous(array[..., tokens, :])


def _replace_states(caches: Any, kept: Iterator[Any]) -> None:
    for index, cache in enumerate(caches):
        if isinstance(cache, CacheList):
            inner = list(cache.caches)
            _replace_states(inner, kept)
            cache.caches = tuple(inner)
        elif _is_state(cache):
            caches[index] = copy.deepcopy(next(kept))


def _parts(caches: Iterable[Any]) -> Iterator[Any]:
    """The caches of all layers, those in lists, too; without the values of rows, which are no function of tokens."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from _parts(cache.caches)
        elif not isinstance(cache, RowCache):
            yield cache


def _is_state(cache: Any) -> bool:
    return type(cache) is not KVCache and not isinstance(cache, RowCache)
