"""Puts the adapter of each row of a batch into mlx-lm's prompt caches, from which a model reads it.

mlx-lm's batches join, split and keep prompt caches, and thereby the adapters of their rows. Adapters have numbers: 0 is
none, 1 is the first in the server's options.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import _BaseCache, make_prompt_cache

from mlxdist.nn.adapters_of_rows import adapters_of_rows
from mlxdist.nn.pipeline_parallel.stage import Stage, stage_of

__all__ = ["AdaptedModel", "AdapterCache", "adapter_of", "prompt_cache"]


class AdapterCache(_BaseCache):
    """A cache of the adapter number of each row, without keys and values; with the methods for mlx-lm's batches."""

    def __init__(self, adapters: Sequence[int]) -> None:
        self.adapters = list(adapters)

    @classmethod
    def merge(cls, caches: Sequence["AdapterCache"]) -> "AdapterCache":
        return cls([adapter for cache in caches for adapter in cache.adapters])

    def extend(self, other: "AdapterCache") -> None:
        self.adapters += other.adapters

    def filter(self, batch_indices: Sequence[int]) -> None:
        self.adapters = [self.adapters[row] for row in batch_indices]

    def extract(self, idx: int) -> "AdapterCache":
        return AdapterCache([self.adapters[idx]])

    def prepare(self, **keywords: Any) -> None:
        """Does nothing: this cache has no axis of tokens that prompts would be padded on."""

    def finalize(self) -> None:
        """Does nothing; see :meth:`prepare`."""

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        return n

    def empty(self) -> bool:
        return False

    @property
    def nbytes(self) -> int:
        return 0


class AdaptedModel(nn.Module):
    """A model of ``load_sharded(adapter_path=[...])`` for mlx-lm's generators: its prompt caches end with an
    :class:`AdapterCache`, which has the number of the adapter for each row of a call."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        *own, adapters = cache
        with adapters_of_rows(adapters.adapters):
            return self.model(tokens, cache=own)

    def make_cache(self) -> list[Any]:
        return [*make_prompt_cache(self.model), AdapterCache([0])]

    @property
    def stage(self) -> Stage | None:
        """The stage of the model; see :func:`stage_of`."""
        return stage_of(self.model)


def prompt_cache(model: nn.Module, adapter: int) -> list[Any]:
    """An empty prompt cache for a request with that adapter. A model without adapters gets no entry for it."""
    cache = make_prompt_cache(model)
    for each in _of_adapters(cache):
        each.adapters = [adapter]
    return cache


def adapter_of(cache: Sequence[Any]) -> int:
    """The number of the adapter in the prompt cache of one request; 0 for none."""
    return next((each.adapters[0] for each in _of_adapters(cache)), 0)


def _of_adapters(cache: Sequence[Any]) -> list[AdapterCache]:
    return [each for each in cache if isinstance(each, AdapterCache)]
