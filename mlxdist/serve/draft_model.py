"""Drafts of a smaller model with the same tokenizer."""

from functools import partial
from typing import Any, Self

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from mlxdist.base.errors import InvalidArgument

from .draft import DraftingModel, DraftSource, Rows
from .rollback import Rollback, arrays_of
from .row_caches import flat
from .sliding_windows import put_in_order
from .vocabulary import VocabParallelModel

__all__ = ["DraftedModel"]


class DraftedModel(DraftingModel):
    """A model and its draft model.

    Args:
        sharded: what is in ``model`` where its logits are sharded over the vocabulary.
    """

    def __init__(self, model: nn.Module, draft_model: nn.Module, sharded: VocabParallelModel | None = None) -> None:
        self.model, self.draft_model, self.sharded = model, draft_model, sharded
        self._layers = len(make_prompt_cache(draft_model))

    def make_cache(self) -> list[Any]:
        return [*make_prompt_cache(self.draft_model), *make_prompt_cache(self.model)]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """The logits of the model.

        Raises:
            InvalidArgument: the draft model returns logits for another number of tokens.
        """
        drafts = self._draft_logits(tokens, cache)
        logits = self.target(self.after_draft(tokens, cache), cache)
        vocabulary = logits.shape[-1] if self.sharded is None else self.sharded.vocabulary
        if drafts.shape[-1] != vocabulary:
            vocabularies = f"{drafts.shape[-1]} tokens, and the model for {vocabulary}"
            raise InvalidArgument(f"serve: the draft model has logits for {vocabularies}")
        return logits

    def source(self) -> DraftSource:
        return _OfDraftModel(self)

    def with_model(self, model: Any) -> Self:
        return type(self)(model, self.draft_model, self.sharded)

    def target(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """The logits of the model, without a call of the draft model."""
        return self.model(tokens, cache=self.target_caches(cache))

    def draft(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """The logits of the draft model, in the form of the model's, without a call of the model."""
        logits = self._draft_logits(tokens, cache)
        return logits if self.sharded is None else self.sharded.rows(logits)

    def draft_caches(self, cache: list[Any]) -> list[Any]:
        """The entries of the draft model."""
        return cache[: self._layers]

    def target_caches(self, cache: list[Any]) -> list[Any]:
        """The entries of the model."""
        return cache[self._layers :]

    def _draft_logits(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        own = self.draft_caches(cache)
        if tokens.shape[1] > 1:
            put_in_order(own)
        logits: mx.array = self.draft_model(tokens, cache=own)
        return logits

    def after_draft(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """``tokens`` with a dependency on the draft model's cache, so that all ranks compute that first.

        Without it, MLX orders the collectives of both models by their graphs, which differ between unequal shards.
        """
        return mx.depends(tokens, [array for layer in flat(self.draft_caches(cache)) for array in arrays_of(layer)])


class _OfDraftModel(DraftSource):
    model: DraftedModel

    def begin(self, rows: Rows) -> None:
        model, cache = self.model, rows.cache
        self._rollbacks = [
            (Rollback(model.draft_caches(cache), by_single_tokens=True), partial(model.draft, cache=cache)),
            (Rollback(model.target_caches(cache), by_single_tokens=False), partial(model.target, cache=cache)),
        ]

    def propose(self, rows: Rows) -> mx.array:
        inputs = rows.next_tokens[:, None]
        for _ in range(rows.most):
            logits = self.model.draft(inputs[:, -1:], rows.cache)
            tokens = rows.sample(logits[:, -1], inputs[:, 1:])
            inputs = mx.concatenate([inputs, tokens[:, None]], axis=1)
        self.model.draft(inputs[:, -1:], rows.cache)  # so that both models have the same tokens in their caches
        inputs = self.model.after_draft(inputs, rows.cache)
        mx.async_eval(inputs)
        return inputs

    def compute(self, inputs: mx.array, rows: Rows) -> mx.array:
        return self.model.target(inputs, rows.cache)
