"""Which adapter each row of a batch has, as an entry of mlx-lm's prompt caches, and a model that reads it there.

So mlx-lm's batches, which join, split and keep prompt caches, carry it along. Adapters have numbers: 0 is none, 1 the
first that the server was given.
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
    """Has no keys and values, but the number of the adapter of each row; with mlx-lm's methods of batches."""

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
        """Nothing: prompts are padded on no axis that is here."""

    def finalize(self) -> None:
        """Nothing, as :meth:`prepare`."""

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
    :class:`AdapterCache`, which says with which adapters it is called."""

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
        """Of the model, as :func:`stage_of` finds it."""
        return stage_of(self.model)


def prompt_cache(model: nn.Module, adapter: int) -> list[Any]:
    """An empty one, of a request with that adapter; a model without adapters has none for it."""
    cache = make_prompt_cache(model)
    for each in _of_adapters(cache):
        each.adapters = [adapter]
    return cache


def adapter_of(cache: Sequence[Any]) -> int:
    """Of a prompt cache of one request."""
    return next((each.adapters[0] for each in _of_adapters(cache)), 0)


def _of_adapters(cache: Sequence[Any]) -> list[AdapterCache]:
    return [each for each in cache if isinstance(each, AdapterCache)]
