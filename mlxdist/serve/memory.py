"""The memory of every rank for the caches of requests and of the prefix tree.

Ranks have unequal shares and memory, but admit and keep the same: each knows what all of them have left.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, RotatingKVCache, make_prompt_cache

from mlxdist.base.errors import InvalidArgument
from mlxdist.base.host_identity import host_identity
from mlxdist.nn.rank_checks import agree, texts
from mlxdist.runtime.device_memory import device_limit
from mlxdist.runtime.group.group import Group

from .row_caches import flat

__all__ = ["UNLIMITED", "CacheMemory", "cache_memory", "cache_sizes", "memory_limit", "reserved", "sizes_of"]

UNLIMITED = 1 << 62
_SHARE = 0.9  # of the device's memory; what a step computes has the rest


@dataclass(frozen=True)
class CacheMemory:
    """The memory for the caches of requests and of the prefix tree, of every rank.

    Attributes:
        left: bytes of each rank, beside its weights.
        per_token, per_states: bytes of each rank for a token, and for the states after a token, which do not grow.
        limits: bytes that MLX is to use on each rank in all.
    """

    left: tuple[float, ...] = (float(UNLIMITED),)
    per_token: tuple[float, ...] = (1.0,)
    per_states: tuple[float, ...] = (0.0,)
    limits: tuple[float, ...] = (float(UNLIMITED),)

    def fits(self, tokens: int, states: int) -> bool:
        """Whether every rank has the memory for that many tokens, and for the states after that many of them."""
        each = zip(self.left, self.per_token, self.per_states)
        return all(tokens * of_token + states * of_states <= left for left, of_token, of_states in each)

    @property
    def tokens(self) -> int:
        """The number of tokens that fit, without states."""
        counts = [int(left / of_token) for left, of_token in zip(self.left, self.per_token) if of_token]
        return max(0, min(counts, default=UNLIMITED))

    def less(self, each: Sequence[float]) -> "CacheMemory":
        """The memory without that many bytes of each rank."""
        return replace(self, left=tuple(left - taken for left, taken in zip(self.left, each)))

    @property
    def costs(self) -> tuple[float, float]:
        """Bytes of a token and of its states where they are the most."""
        return max(self.per_token), max(self.per_states)


def reserved(needs: Collection[int]) -> int:
    """The number of tokens in the KV caches of a batch whose requests reach ``needs`` tokens.

    The caches are one array, padded to the longest request.
    """
    return len(needs) * max(needs, default=0)


def cache_memory(
    model: nn.Module,
    requests: int,
    chunk: int,
    group: Group,
    max_total_tokens: int | None = None,
    neighbors: int | None = None,
) -> CacheMemory:
    """The memory that the ranks have left for caches. Collective.

    Args:
        requests: the maximum number of requests that run, each with states: sliding windows, linear attention.
        chunk: tokens that a sliding window may have beyond its size.
        max_total_tokens: the number of tokens to use memory for, in place of what is left.
        neighbors: the number of ranks on this host; None for those of the group.

    Raises:
        InvalidArgument: on every rank; some rank has no memory for KV caches.
    """
    per_token, fixed = cache_sizes(model, chunk)
    limit = memory_limit(group, neighbors)
    left = limit - mx.get_active_memory() - fixed * requests
    if max_total_tokens is not None and per_token:
        left, limit = per_token * max_total_tokens, UNLIMITED
    found = agree("serve", group, None, {}, [int(left), *map(math.ceil, (per_token, fixed)), int(limit)])
    columns = (tuple(map(float, column)) for column in found.T.tolist())
    memory = CacheMemory(*columns)
    if memory.tokens < 2 or min(memory.left) < 0:
        rank = min(range(group.size()), key=lambda rank: memory.left[rank] / (memory.per_token[rank] or 1))
        raise InvalidArgument(
            f"serve: rank {rank} has {memory.left[rank] / 1e9:.2f} GB left for KV caches beside its weights; share the "
            "model over more ranks, lower --decode-concurrency, or give --max-total-tokens"
        )
    return memory


def memory_limit(group: Group, neighbors: int | None = None) -> float:
    """The bytes that this rank may use for weights and caches. Collective, unless ``neighbors`` is given: the number of
    ranks on this host."""
    if neighbors is None:
        neighbors = texts(host_identity(), group).count(host_identity())
    # Ranks on one host share the memory of its device.
    return _SHARE * device_limit() / neighbors


def cache_sizes(model: nn.Module, chunk: int) -> tuple[float, float]:
    """Bytes of the KV caches of a request: per token, and independent of tokens. Collective like the model's call."""
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[0]]), cache=caches), [cache.state for cache in caches])
    sizes = [sizes_of(cache, chunk) for cache in flat(caches)]
    return sum(size for size, _ in sizes), sum(size for _, size in sizes)


def sizes_of(cache: Any, chunk: int) -> tuple[float, float]:
    """Bytes of a cache that has tokens: per token, and independent of tokens. It is not evaluated."""
    if not cache.nbytes:  # of a layer of another stage
        return 0, 0
    if isinstance(cache, ArraysCache):
        return 0, cache.nbytes
    if not hasattr(cache, "keys"):  # a kind of one model file: of one token here
        return cache.nbytes, 0
    each = cache.nbytes / cache.keys.shape[-2]
    if isinstance(cache, RotatingKVCache | ChunkedKVCache):
        window = cache.max_size if isinstance(cache, RotatingKVCache) else cache.chunk_size
        return 0, each * (window + chunk)
    return each, 0
