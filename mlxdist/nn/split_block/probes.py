"""Calls a model with a few tokens at positions far behind the start: where its configuration names a boundary.

Rotary embeddings, scales of attention and masks may change once a sequence is longer than a number of the
configuration. A prompt of that length would take too long for a check at load. A `Probe` is a cache that stands at any
position and holds the tokens of one call alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

__all__ = ["Probe", "boundaries", "logits_at", "places"]

# Parts of the names of fields that hold a number of positions; not the length of a learned table, which ends there.
_NAMES = ("position_embeddings", "window", "chunk_size", "seq_len", "context_len", "floor_scale")
TOKENS = 4


class Probe:
    """Stands in for a cache of mlx-lm that has ``update_and_fetch``: at ``offset``, with nothing in it."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.offset += keys.shape[2]
        self.keys, self.values = keys, values
        return keys, values

    def keys_and_values(self) -> tuple[mx.array | None, mx.array | None]:
        return self.keys, self.values

    def make_mask(self, length: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if length == 1:
            return None
        rows, columns = mx.arange(length)[:, None], mx.arange(length)[None]
        if window_size is not None:
            return (rows >= columns) & (rows < columns + window_size)
        return rows >= columns if return_array else "causal"

    def empty(self) -> bool:
        return self.keys is None

    def size(self) -> int:
        return self.offset


def boundaries(config: Any) -> list[int]:
    """The numbers of positions that a configuration (or a module with one) names, in ascending order."""
    found: set[int] = set()
    _collect(config, found)
    return sorted(found)


def places(numbers: Iterable[int]) -> list[int]:
    """Offsets of a few tokens: before, across and behind each number."""
    return sorted({max(place, 0) for number in numbers for place in (number - TOKENS // 2, 2 * number + 1)})


def logits_at(model: nn.Module, numbers: Iterable[int]) -> list[mx.array]:
    """The logits of a few tokens at the start, without a cache, and at each of the `places`, with a `Probe`."""
    from mlx_lm.models.cache import make_prompt_cache

    tokens = mx.arange(TOKENS)[None]
    results = [model(tokens)]
    for place in places(numbers):
        results.append(model(tokens, cache=[_at(cache, place) for cache in make_prompt_cache(model)]))
    mx.eval(results)
    return results


def _at(cache: Any, place: int) -> Any:
    if hasattr(cache, "start_position"):  # a chunked one can begin anywhere
        cache.offset = cache.start_position = place
        return cache
    if hasattr(cache, "caches"):
        return type(cache)(*(_at(one, place) for one in cache.caches))
    return Probe(place) if hasattr(cache, "update_and_fetch") else cache


def _collect(value: Any, found: set[int]) -> None:
    if isinstance(value, nn.Module):  # numbers are no items of a module, which is a dict too
        items = [*value.items(), *vars(value).items()]
    elif isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = [("", one) for one in value]
    elif hasattr(value, "__dict__") and not isinstance(value, (type, mx.array)):
        items = list(vars(value).items())
    else:
        return
    for name, one in items:
        if type(one) in (int, float) and one >= 1 and any(part in str(name) for part in _NAMES):
            found.add(int(one))
        elif not callable(one):
            _collect(one, found)
