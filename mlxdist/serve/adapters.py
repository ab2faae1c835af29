"""Puts the adapter of each row of a batch into mlx-lm's prompt caches, from which a model reads it.

Adapters have numbers: 0 is none, 1 is the first in the server's options.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlxdist.nn.adapters_of_rows import adapters_of_rows

from .row_caches import ModelWrapper, RowCache

__all__ = ["AdaptedModel", "AdapterCache"]


class AdapterCache(RowCache):
    """The number of the adapter of each row."""

    none = 0


class AdaptedModel(ModelWrapper):
    """A model of ``load_sharded(adapter_path=[...])`` for mlx-lm's generators: its prompt caches end with an
    :class:`AdapterCache`, which has the number of the adapter for each row of a call."""

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        *own, adapters = cache
        with adapters_of_rows(adapters.rows):
            return self.model(tokens, cache=own)

    def make_cache(self) -> list[Any]:
        return [*make_prompt_cache(self.model), AdapterCache()]
