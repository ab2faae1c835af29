"""Quantized KV caches of requests and of batches; mlx-lm's own cannot be in a batch."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache

from mlxdist.base.errors import InvalidArgument

__all__ = ["QuantizedKVCache", "are_quantized", "as_of_mlx_lm", "loaded_caches", "quantize_caches"]


class QuantizedKVCache(CacheList):
    """mlx-lm's class of this name, with its state, for one request or, once merged, for a batch.

    ``mx.quantize`` gives three arrays for keys and three for values, all with the same axis of tokens. Each pair of
    arrays, one of keys and one of values, is in an unquantized cache of mlx-lm, which joins, splits, pads and trims
    arrays of any dtype. Rejected: all three in one array, which attention would copy in each step to split it.

    Args:
        group_size: the number of elements along a head that share a scale and a bias.
        bits: the number of bits of an element.
    """

    def __init__(self, group_size: int = 64, bits: int = 8) -> None:
        super().__init__(KVCache(), KVCache(), KVCache())
        self.group_size, self.bits = group_size, bits  # mlx-lm's attention reads them

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Appends (requests, KV heads, tokens, head size). Returns the three arrays of all keys, and of all values."""
        parts = zip(*(mx.quantize(each, self.group_size, self.bits) for each in (keys, values)))
        for cache, part in zip(self.caches, parts):
            cache.update_and_fetch(*part)
            cache.offset = self.offset  # one array, where it is one: nothing else would evaluate the others
        return self.keys_and_values()

    def keys_and_values(self) -> Any:
        return tuple(zip(*(cache.keys_and_values() for cache in self.caches)))

    @property
    def offset(self) -> Any:
        """The number of tokens, or an array with that number for each row of a batch."""
        return self.caches[0].offset

    def make_mask(self, *arguments: Any, **keywords: Any) -> Any:
        return self.caches[0].make_mask(*arguments, **keywords)

    @classmethod
    def merge(cls, caches: Sequence["QuantizedKVCache"]) -> "QuantizedKVCache":
        return caches[0]._with(super().merge(caches))

    def extract(self, idx: int) -> "QuantizedKVCache":
        return self._with(super().extract(idx))

    def _with(self, found: CacheList) -> "QuantizedKVCache":
        made = QuantizedKVCache(self.group_size, self.bits)
        made.caches = found.caches
        return made

    @property
    def state(self) -> Any:
        keys, values = (None, None) if self.empty() else self.keys_and_values()
        return keys, values, self.offset, self.group_size, self.bits

    @state.setter
    def state(self, state: Any) -> None:
        """Sets the state of one request."""
        keys, values, offset, self.group_size, self.bits = state
        parts = [(None, None)] * 3 if keys is None else zip(keys, values)
        self.caches = tuple(KVCache.from_state((*part, offset)) for part in parts)


def quantize_caches(model: nn.Module, group_size: int, bits: int) -> None:
    """Makes mlx-lm's ``make_prompt_cache`` return quantized KV caches for ``model`` from now on.

    Caches of sliding windows and of linear attention are not quantized: they do not grow.

    Raises:
        InvalidArgument: the model has no KV caches that can be quantized.
    """
    own = getattr(model, "make_cache", None)
    if all(type(cache) is not KVCache for cache in make_prompt_cache(model)):
        raise InvalidArgument("serve: the model has no KV caches that --kv-bits could quantize")

    def make_cache() -> list[Any]:
        made = [KVCache() for _ in model.layers] if own is None else own()
        return [QuantizedKVCache(group_size, bits) if type(cache) is KVCache else cache for cache in made]

    model.make_cache = make_cache


def are_quantized(caches: Sequence[Any]) -> bool:
    """Whether some of the caches, those in lists, too, are quantized."""
    lists = [cache for cache in caches if isinstance(cache, CacheList)]
    return any(isinstance(cache, QuantizedKVCache) or are_quantized(cache.caches) for cache in lists)


def loaded_caches(caches: Sequence[Any]) -> list[Any]:
    """Caches from a file or another rank, in the form for a batch: quantized ones come as mlx-lm's own class."""
    return [
        QuantizedKVCache.from_state(cache.state) if isinstance(cache, mlx_lm_cache.QuantizedKVCache) else cache
        for cache in caches
    ]


def as_of_mlx_lm(caches: Sequence[Any]) -> list[Any]:
    """The reverse of :func:`loaded_caches`, for caches of one request."""
    return [
        mlx_lm_cache.QuantizedKVCache.from_state(cache.state) if isinstance(cache, QuantizedKVCache) else cache
        for cache in caches
    ]
