"""The time of a decode step by one form of a layer and by another."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import mlx.core as mx

__all__ = ["decode_seconds"]

LAYERS = 4  # in one graph, as in a model: a single one would mostly be the time of handing it over
CACHED = 32  # tokens
WARM_UP, ROUNDS = 2, 5  # a first step compiles


def decode_seconds(layers: Sequence[Callable[..., mx.array]], rows: int, width: int, dtype: mx.Dtype) -> list[float]:
    """Times decoder layers that compute the same, in turn. Collective, if the layers are.

    Args:
        layers: called as mlx-lm's, ``layer(x, mask, cache)``.
        rows: of a batch; each step decodes a token of every row.
        width, dtype: of the hidden states.

    Returns:
        The median time of a step of each layer, in seconds.
    """
    x = mx.random.normal((rows, CACHED, width), key=mx.random.key(0)).astype(dtype)
    caches: list[list[Any]] = [[_cache(rows) for _ in range(LAYERS)] for _ in layers]
    for layer, own in zip(layers, caches):
        mx.eval([layer(x, "causal", cache) for cache in own])
    x = mx.contiguous(x[:, :1])
    times: list[list[float]] = [[] for _ in layers]
    for _ in range(WARM_UP + ROUNDS):
        for layer, own, found in zip(layers, caches, times):
            start = time.perf_counter()
            y = x
            for cache in own:
                y = layer(y, cache.make_mask(1, return_array=False, window_size=None), cache)
            mx.eval(y)
            found.append((time.perf_counter() - start) / LAYERS)
    return [median(found[WARM_UP:]) for found in times]


def _cache(rows: int) -> Any:
    """An empty cache as mlx-lm's generators have it for one request, and for a batch."""
    from mlx_lm.models.cache import BatchKVCache, KVCache

    return KVCache() if rows == 1 else BatchKVCache([0] * rows)
