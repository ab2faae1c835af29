"""Drafts of a head that reads the model's last hidden states: multi-token prediction (MTP).

The head's KV cache has an entry for each token of the model's: of that token and the hidden state before it. So it is
one more layer to batches, the prefix cache and the checks of drafts. The hidden state of a request's last token is kept
beside the caches. The prefix cache has none: behind what it has, one entry of the head is made of a hidden state of
zeros, as the entry of a prompt's first token is. That changes drafts at most.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlxdist.nn.interception import intercept
from mlxdist.nn.models.mtp_head import MtpHead

from .draft import DraftingModel, DraftSource, Rows
from .rollback import arrays_of
from .row_caches import PaddedRowCache

__all__ = ["Backbone", "MtpModel"]


class Backbone:
    """The part of a model of mlx-lm between tokens and last hidden states, whatever wraps the model: others may read
    these, and have the output layer compute with theirs.

    Args:
        module: the part, which is changed in place.

    Attributes:
        hidden: the hidden states of the last call, of shape (rows, tokens, size).
    """

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._reader: Any = None
        self._given: mx.array | None = None
        self.hidden: mx.array | None = None
        intercept(module, __call__=self._call)

    def embed(self, tokens: mx.array) -> mx.array:
        """The embeddings of tokens."""
        embeddings: mx.array = self._module.embed_tokens(tokens)
        return embeddings

    @contextmanager
    def read_by(self, reader: Any) -> Iterator[None]:
        """A context in which ``reader(tokens, hidden)`` gets the hidden states, and returns those for the output
        layer."""
        self._reader = reader
        try:
            yield
        finally:
            self._reader = None

    @contextmanager
    def giving(self, hidden: mx.array) -> Iterator[None]:
        """A context in which a call of the model computes nothing but the logits of ``hidden``."""
        self._given = hidden
        try:
            yield
        finally:
            self._given = None

    def _call(self, kind: Any, module: nn.Module, tokens: mx.array, *arguments: Any, **keywords: Any) -> mx.array:
        if self._given is not None:
            return self._given
        self.hidden = kind.__call__(module, tokens, *arguments, **keywords)
        return self.hidden if self._reader is None else self._reader(tokens, self.hidden)


class LastHidden(PaddedRowCache):
    """The hidden state of the last token of each row; None where it is not known."""

    def before(self, hidden: mx.array) -> mx.array:
        """The hidden states before those of the next tokens, of the same shape (rows, tokens, size)."""
        return mx.concatenate([self.stacked(hidden)[:, None], hidden[:, :-1]], axis=1)

    def stacked(self, like: mx.array) -> mx.array:
        """The rows, of shape (rows, size), with zeros for those that are not known. ``like``: an array of that size."""
        return mx.stack([mx.zeros(like.shape[-1], like.dtype) if row is None else row for row in self.rows])

    def add(self, hidden: mx.array) -> None:
        """Takes the hidden states of the next tokens."""
        lengths = self.unpadded(hidden.shape[1])
        self.rows = [
            hidden[number, length - 1] if length else row
            for number, (row, length) in enumerate(zip(self.rows, lengths))
        ]


class MtpModel(DraftingModel):
    """A model and its MTP head.

    Args:
        backbone: what is in ``model``.
    """

    def __init__(self, model: Any, head: MtpHead, backbone: Backbone) -> None:
        self.model, self.head, self.backbone = model, head, backbone

    def make_cache(self) -> list[Any]:
        return [KVCache(), *make_prompt_cache(self.model), LastHidden()]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """The logits of the model."""
        with self.backbone.read_by(partial(self._add, cache)):
            logits: mx.array = self.model(tokens, cache=cache[1:-1])
        return logits

    def source(self) -> DraftSource:
        return _OfHead(self)

    def with_model(self, model: Any) -> Self:
        return type(self)(model, self.head, self.backbone)

    def predict(self, tokens: mx.array, before: mx.array, cache: list[Any]) -> mx.array:
        """The head's hidden states after ``tokens``. ``before``: the hidden states before each of them."""
        return self.head.predict(self.backbone.embed(tokens), before, cache[0])

    def logits(self, hidden: mx.array, tokens: mx.array, cache: list[Any]) -> mx.array:
        """The logits of the output layer. ``hidden``: the hidden states of ``tokens``."""
        with self.backbone.giving(hidden):
            logits: mx.array = self.model(tokens, cache=cache[1:-1])
        return logits

    def _add(self, cache: list[Any], tokens: mx.array, hidden: mx.array) -> mx.array:
        """Adds entries for tokens to the head's cache."""
        # All ranks compute first the model, then the head, then logits: MLX orders the collectives of each by graphs,
        # which differ between unequal shards.
        self.predict(tokens, mx.depends(cache[-1].before(hidden), hidden), cache)
        cache[-1].add(hidden)
        return mx.depends(hidden, arrays_of(cache[0]))


class _OfHead(DraftSource):
    model: MtpModel

    def begin(self, rows: Rows) -> None:
        super().begin(rows)
        self._last: LastHidden = rows.cache[-1]
        self._before = list(self._last.rows)

    def propose(self, rows: Rows) -> mx.array:
        """The next tokens with drafts, each from the hidden state that the head has made of the one before."""
        inputs = rows.next_tokens[:, None]
        embeddings = self.model.backbone.embed(inputs)
        hidden = self._last.stacked(embeddings)[:, None]
        for _ in range(rows.most):
            hidden = self.model.predict(inputs[:, -1:], hidden, rows.cache)
            logits = self.model.logits(hidden, inputs[:, -1:], rows.cache)
            tokens = rows.sample(logits[:, -1], inputs[:, 1:])
            inputs = mx.concatenate([inputs, tokens[:, None]], axis=1)
        rows.cache[0].trim(rows.most)  # the model's own hidden states take the places of these
        mx.async_eval(inputs)
        return inputs

    def keep(self, kept: Sequence[int], before: Sequence[int], inputs: mx.array) -> None:
        self._last.rows = self._before  # from where tokens are computed again
        super().keep(kept, before, inputs)
        hidden = self.model.backbone.hidden
        assert hidden is not None  # the step has computed it
        self._last.rows = [hidden[row, made - 1] for row, made in enumerate(kept)]
