"""Caches of mlx-lm as trees of arrays and numbers, and these as values of JSON.

The state of a cache begins with its contents, the arrays that depend on the layer: two trees, of the keys and of the
values, each of shape (batch, KV heads, tokens, width); of an ``ArraysCache`` one list of arrays, (batch, ..., width).
"""

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import cache as caches_of_mlx_lm
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache

from ..base.errors import InvalidArgument
from ..nn.layout.modules import dtype_name

__all__ = [
    "CACHES",
    "DTYPES",
    "arrays_in",
    "checked_layers",
    "described",
    "is_array",
    "parts_of",
    "split",
    "state_of",
    "widths_of",
]

DTYPES = {dtype_name(dtype): dtype for dtype in vars(mx).values() if isinstance(dtype, mx.Dtype)}
CACHES = {
    name: found
    for name, found in vars(caches_of_mlx_lm).items()
    if isinstance(found, type) and issubclass(found, caches_of_mlx_lm._BaseCache)
}


def state_of(cache: Any, number: int) -> Any:
    """The state of the cache of layer ``number``, with the tokens that are in it, not the room for more.

    Raises:
        InvalidArgument: the class is not mlx-lm's.
    """
    name = type(cache).__name__
    if CACHES.get(name) is not type(cache):
        raise InvalidArgument(
            f"the cache of layer {number} is {name}: mlx_lm.models.cache has none, or another class has that name"
        )
    # mlx-lm grows these buffers in steps: what is behind the offset is no token.
    if isinstance(cache, KVCache | QuantizedKVCache):
        return tree_map(lambda x: x[..., : cache.offset, :] if isinstance(x, mx.array) else x, cache.state)
    return cache.state


def parts_of(cache: Any) -> tuple[Any, ...]:
    """The caches in the one of a layer: those of a ``CacheList``, or it alone."""
    return tuple(cache.caches) if isinstance(cache, CacheList) else (cache,)


def split(name: str, state: Any) -> tuple[list[Any], list[Any]]:
    """The contents in the state of a cache of class ``name``, and the rest of the state."""
    count = 1 if name == ArraysCache.__name__ else 2
    return list(state[:count]), list(state[count:])


def widths_of(name: str, state: Any) -> list[int | None]:
    """The last dimension of each array of the contents, before it was quantized; ``None``: there is no array yet.

    They are zero in the cache of a layer that another stage has. ``state`` is described.
    """
    contents, rest = split(name, state)
    if name == QuantizedKVCache.__name__:
        return [None if packed is None else packed[0]["shape"][-1] * 32 // rest[-1] for packed in contents]
    arrays = contents[0] if name == ArraysCache.__name__ else contents
    return [None if x is None else x["shape"][-1] for x in arrays]


def arrays_in(tree: Any) -> list[mx.array]:
    """The arrays of a tree, in its order."""
    leaves: Any = tree_flatten(tree)
    return [x for _, x in leaves if isinstance(x, mx.array)]


def described(state: Any) -> Any:
    """A state for JSON: a dictionary stands for an array.

    Raises:
        InvalidArgument: there is something else in it than arrays and numbers.
    """
    return tree_map(_described, state, is_leaf=is_array)


def checked_layers(layers: Any) -> list[list[Any]]:
    """[class name, described state] of each layer, from JSON. Raises ValueError, KeyError or TypeError where they are
    none, or of caches that this mlx-lm does not make of such states."""
    for name, state in layers:
        CACHES[name].from_state(tree_map(_empty, state, is_leaf=is_array))
    return layers


def _empty(leaf: Any) -> Any:
    """An array of zeros in place of one that is not received yet; other leaves as they are."""
    return mx.zeros(leaf["shape"], DTYPES[leaf["dtype"]]) if is_array(leaf) else leaf


def is_array(leaf: Any) -> bool:
    """Whether a leaf of a described state stands for an array."""
    return isinstance(leaf, dict)


def _described(leaf: Any) -> Any:
    if isinstance(leaf, mx.array):
        return {"shape": leaf.shape, "dtype": dtype_name(leaf)}
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return leaf
    raise InvalidArgument(f"a cache whose state has a {type(leaf).__name__} in it cannot be sent")
