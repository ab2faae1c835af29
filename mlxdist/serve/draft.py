"""Sources of drafts: the one interface by which a batch gets tokens to check, and its first implementation.

A source proposes tokens, sees the model compute them, and takes back what the model has rejected. Other sources are in
draft_model.py and mtp.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import mlx.core as mx

from .rollback import Rollback

__all__ = ["DraftSource", "DraftingModel", "PromptLookup", "Rows", "source_for"]


@dataclass(frozen=True)
class Rows:
    """The requests of a batch at the start of a step.

    Attributes:
        uids: their numbers.
        tokens: the tokens of each in the caches.
        next_tokens: for each the token behind these, which no cache has yet.
        cache: the prompt cache of the batch.
        most: the maximum number of drafts.
        sample: samples tokens after the next tokens and some drafts: from logits of shape (requests, vocabulary), and
            these drafts, of shape (requests, drafts).
    """

    uids: Sequence[int]
    tokens: Sequence[list[int]]
    next_tokens: mx.array
    cache: list[Any]
    most: int
    sample: Callable[[mx.array, mx.array], mx.array]


class DraftSource(ABC):
    """A source of drafts for one batch, which it sees in each step: begin, propose, compute, keep.

    Args:
        model: the model of the batch.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._rollbacks: list[tuple[Rollback, Callable[[mx.array], Any]]] = []

    def begin(self, rows: Rows) -> None:
        """Notes the caches before a step, with the calls that compute kept tokens again."""
        self._rollbacks = [(Rollback(rows.cache, by_single_tokens=False), partial(self.model, cache=rows.cache))]

    @abstractmethod
    def propose(self, rows: Rows) -> mx.array:
        """The next tokens with drafts behind them, of shape (requests, 1 + drafts): the inputs of the model."""

    def compute(self, inputs: mx.array, rows: Rows) -> mx.array:
        """The logits of the model for its inputs."""
        logits: mx.array = self.model(inputs, cache=rows.cache)
        return logits

    def keep(self, kept: Sequence[int], before: Sequence[int], inputs: mx.array) -> None:
        """Takes back all but the first ``kept`` inputs of each request.

        Args:
            kept: the number of inputs that are tokens of the answer.
            before: the number of tokens that the caches of each request had before the step.
            inputs: those of the model in the step.
        """
        for rollback, compute in self._rollbacks:
            rollback.keep(kept, before, inputs, compute)


class DraftingModel(ABC):
    """A model and what drafts for it, in the form of one model of mlx-lm: prompts are computed by both, into one
    prompt cache. Batches of prompts and the prefix cache are then mlx-lm's as they are.

    Attributes:
        model: the model whose tokens are the answer.
    """

    model: Any

    @abstractmethod
    def make_cache(self) -> list[Any]:
        """The entries of both, those with values of rows last."""

    @abstractmethod
    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """The logits of the model."""

    @abstractmethod
    def source(self) -> DraftSource:
        """A source of drafts for a batch."""

    @abstractmethod
    def with_model(self, model: Any) -> Self:
        """The same with another model, such as one that wraps ``model``."""


def source_for(model: Any) -> DraftSource:
    """The source of drafts for a batch of a model: its own, or the text."""
    return model.source() if isinstance(model, DraftingModel) else PromptLookup(model)


class PromptLookup(DraftSource):
    """Drafts from the text: the tokens that followed the last two tokens at their previous place, in the prompt or the
    answer ("prompt lookup decoding", github.com/apoorvumang)."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._lookups: dict[int, _Lookup] = {}

    def propose(self, rows: Rows) -> mx.array:
        """The next tokens with as many drafts as the longest row has; zeros fill the others."""
        following: Any = rows.next_tokens.tolist()
        self._lookups = {uid: self._lookups.get(uid) or _Lookup() for uid in rows.uids}
        found = [
            self._lookups[uid].after(tokens, token, rows.most)
            for uid, tokens, token in zip(rows.uids, rows.tokens, following)
        ]
        width = max(map(len, found))
        drafts = [each + [0] * (width - len(each)) for each in found]
        return mx.array([[token, *each] for token, each in zip(following, drafts)], mx.uint32)


class _Lookup:
    """An index of the last place where each pair of tokens was followed by another one."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, int], int] = {}
        self._seen = 2

    def after(self, tokens: list[int], following: int, most: int) -> list[int]:
        """Up to ``most`` tokens that followed the previous occurrence of the last two.

        Args:
            tokens: the sequence, which grows from call to call; its last token is the first of the two.
            following: the second of the two.
        """
        for end in range(self._seen, len(tokens) + 1):
            self._ends[tokens[end - 2], tokens[end - 1]] = end
        self._seen = max(len(tokens) + 1, 2)
        start = self._ends.get((tokens[-1], following)) if tokens else None
        return [] if start is None else [*tokens[start : start + most], following][:most]
