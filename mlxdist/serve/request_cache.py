"""Models whose requests mlx-lm cannot compute in batches, in the form of its batches: of one request each.

Some of mlx-lm's models make masks or positions that a batch's caches do not fit, and some have caches that cannot be
joined. Their caches stay mlx-lm's own, for one sequence; here they have the methods of a batch that never has two rows.
"""

import copy
from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import CacheList, make_prompt_cache

from mlxdist.base.errors import InvalidArgument

from .row_caches import ModelWrapper, of_layers, of_rows

__all__ = ["OneRequestModel", "RequestCache", "cannot_be_batched"]

# Files of mlx-lm with a KVCache in each layer that fail in a batch: a mask with an axis less than the scores, positions
# from an offset that is an array, a mask of blocks for one sequence.
_FILES = ("gemma2", "gpt_bigcode", "phi3small")


def cannot_be_batched(model: Any, file: str) -> bool:
    """Whether the model, of the file ``file`` of mlx-lm, fails in mlx-lm's batches."""
    return file in _FILES or not all(hasattr(cache, "merge") for cache in make_prompt_cache(model))


class RequestCache(CacheList):
    """The caches of all layers for one request, as the cache of a batch of one."""

    @classmethod
    def merge(cls, caches: Sequence[Self]) -> Self:
        if len(caches) != 1:
            raise InvalidArgument(f"serve: requests of this model are computed one at a time, not {len(caches)}")
        return caches[0]

    def extend(self, other: Self) -> None:
        raise InvalidArgument("serve: requests of this model are computed one at a time, and one runs")

    def filter(self, batch_indices: Sequence[int]) -> None:
        """Does nothing: mlx-lm drops a batch without rows."""

    def extract(self, idx: int) -> "RequestCache":
        return RequestCache(*copy.deepcopy(self.caches))  # the batch goes on to write into its arrays

    def prepare(self, **keywords: Any) -> None:
        """Does nothing: a single prompt has no padding."""

    def finalize(self) -> None:
        """Does nothing; see :meth:`prepare`."""


class OneRequestModel(ModelWrapper):
    """A model for mlx-lm's generators, whose prompt caches begin with a :class:`RequestCache`; values of the row are
    behind it."""

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        request, *rows = cache
        logits: mx.array = self.model(tokens, cache=[*request.caches, *rows])
        return logits

    def make_cache(self) -> list[Any]:
        caches = make_prompt_cache(self.model)
        return [RequestCache(*of_layers(caches)), *of_rows(caches)]
