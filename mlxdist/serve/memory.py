"""The number of tokens of KV caches that every rank has memory for.

Ranks have unequal shares and memory, but admit the same requests: they agree on the smallest number of tokens.
"""

from collections.abc import Collection
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import ArraysCache, CacheList, RotatingKVCache, make_prompt_cache

from mlxdist.base.errors import InvalidArgument
from mlxdist.base.host_identity import host_identity
from mlxdist.nn.rank_checks import agree, texts
from mlxdist.runtime.device_memory import device_limit
from mlxdist.runtime.group.group import Group

__all__ = ["UNLIMITED", "cache_sizes", "reserved", "tokens_that_fit"]

UNLIMITED = 1 << 62
_SHARE = 0.9  # of the device's memory; what a step computes has the rest


def reserved(needs: Collection[int]) -> int:
    """The number of tokens in the KV caches of a batch whose requests reach ``needs`` tokens.

    The caches are one array, padded to the longest request.
    """
    return len(needs) * max(needs, default=0)


def tokens_that_fit(model: nn.Module, requests: int, chunk: int, group: Group) -> int:
    """The number of tokens of KV caches that fit on the rank with the least memory left by its weights. Collective.

    Args:
        requests: the maximum number of requests, each with state that does not grow with tokens: sliding windows,
            linear attention.
        chunk: tokens that a sliding window may have beyond its size.

    Raises:
        InvalidArgument: on every rank; some rank has no memory for KV caches.
    """
    per_token, fixed = cache_sizes(model, chunk)
    neighbors = texts(host_identity(), group).count(host_identity())
    # Ranks on one host share the memory of its device.
    left = int(_SHARE * device_limit() / neighbors - mx.get_active_memory() - fixed * requests)
    fit = 0 if left <= 0 else min(int(left / per_token), UNLIMITED) if per_token else UNLIMITED
    found = agree("serve", group, None, {}, [fit, left])
    rank = int(found[:, 0].argmin())
    tokens, left = map(int, found[rank])
    if tokens < 2:
        raise InvalidArgument(
            f"serve: rank {rank} has {left / 1e9:.2f} GB left for KV caches beside its weights; share the model over "
            "more ranks, lower --decode-concurrency or --prompt-cache-size, or give --max-total-tokens"
        )
    return tokens


def cache_sizes(model: nn.Module, chunk: int) -> tuple[float, float]:
    """Bytes of the KV caches of a request: per token, and independent of tokens. Collective like the model's call."""
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[0]]), cache=caches), [cache.state for cache in caches])
    sizes = [_sizes(cache, chunk) for cache in caches]
    return sum(size for size, _ in sizes), sum(size for _, size in sizes)


def _sizes(cache: Any, chunk: int) -> tuple[float, float]:
    if isinstance(cache, CacheList):
        sizes = [_sizes(part, chunk) for part in cache.caches]
        return sum(size for size, _ in sizes), sum(size for _, size in sizes)
    if not cache.nbytes:  # of a layer of another stage; the adapters of rows
        return 0, 0
    if isinstance(cache, ArraysCache):
        return 0, cache.nbytes
    each = cache.nbytes / cache.keys.shape[-2]
    return (0, each * (cache.max_size + chunk)) if isinstance(cache, RotatingKVCache) else (each, 0)
