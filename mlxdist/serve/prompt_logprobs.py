"""Log-probabilities of the tokens of prompts, computed where mlx-lm's batches compute the prompts.

mlx-lm calls the model with each chunk of a batch of prompts, and does not evaluate the logits. Here they are evaluated
for the rows that ask for them, a few positions at a time: only the log-probabilities of the prompt's tokens, and of the
likely tokens in their places, are kept. Rejected: a call of the model for such a prompt alone, which would need a turn
of its own between the steps of the batch, and an order of its own among the messages of stages.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from .answer import Token
from .row_caches import ModelWrapper, PaddedRowCache
from .sliding_windows import put_in_order

__all__ = ["PromptLogprobs", "ScoredModel", "ScoresCache"]

_CALL = 1024  # tokens of all rows in a call with logits: 300 MB of them in bfloat16 for 150,000 tokens
_BLOCK = 128  # tokens of a row whose logits are float32 at a time
_LEAST = -9999.0  # in place of minus infinity, which JSON does not have; vLLM's


class PromptLogprobs:
    """The log-probabilities of a prompt's tokens, from its first token on, as they are computed.

    Args:
        prompt: its tokens.
        likely: the number of likely tokens that come with each.
    """

    def __init__(self, prompt: list[int], likely: int) -> None:
        self._prompt, self._likely = prompt, likely
        self._computed = 0  # tokens that the model has had
        self._made = [Token(prompt[0], None, None)]  # nothing comes before it

    def __deepcopy__(self, memo: object) -> "PromptLogprobs":
        """Returns this object: mlx-lm copies prompt caches to split a batch, and its row is in one part alone."""
        return self

    @property
    def left(self) -> int:
        """The number of tokens of the prompt whose logits are needed: all but the last one's."""
        return len(self._prompt) - 1 - self._computed

    def add(self, logprobs: mx.array) -> None:
        """Adds the log-probabilities after the next tokens of the prompt, of shape (tokens, vocabulary)."""
        start = self._computed + 1
        self._computed += logprobs.shape[0]
        tokens = self._prompt[start : self._computed + 1]
        chosen = mx.take_along_axis(logprobs, mx.array(tokens)[:, None], axis=-1)[:, 0]
        tops = [()] * len(tokens)
        if self._likely:
            likely = mx.argpartition(-logprobs, self._likely - 1)[:, : self._likely]
            tops = _pairs(likely, mx.take_along_axis(logprobs, likely, axis=-1))
        values: Any = mx.maximum(chosen, _LEAST).tolist()
        self._made += [Token(token, value, None, top) for token, value, top in zip(tokens, values, tops)]

    def take(self) -> list[Token]:
        """The tokens since the last call. The first one of a prompt has no log-probability."""
        made, self._made = self._made, []
        return made


def _pairs(tokens: mx.array, logprobs: mx.array) -> list[Any]:
    """Returns the tokens of each row with their log-probabilities, the most likely first."""
    ids: Any = tokens.tolist()
    values: Any = mx.maximum(logprobs, _LEAST).tolist()
    return [tuple(sorted(zip(*row), key=lambda each: -each[1])) for row in zip(ids, values)]


class ScoresCache(PaddedRowCache):
    """The :class:`PromptLogprobs` of each row; None for a row without."""

    def extract(self, idx: int) -> "ScoresCache":
        return ScoresCache()  # what the prefix cache keeps belongs to no request

    @property
    def are_wanted(self) -> bool:
        """Whether the logits of the next call are needed."""
        return any(row is not None and row.left for row in self.rows)

    def add(self, logits: mx.array, full: Callable[[mx.array], mx.array]) -> None:
        """Adds the logits of a call, of shape (rows, tokens, vocabulary). ``full`` makes log-probabilities of them."""
        for number, (row, own) in enumerate(zip(self.rows, self.unpadded(logits.shape[1]))):
            end = 0 if row is None else min(own, row.left)
            for start in range(0, end, _BLOCK):
                row.add(full(logits[number, start : min(start + _BLOCK, end)]))


class ScoredModel(ModelWrapper):
    """A model for mlx-lm's generators, whose prompt caches end with a :class:`ScoresCache`.

    Args:
        model: mlx-lm's, or one that wraps it.
        gathered: makes all logits of a row of those that the model returns, if they are sharded over the vocabulary.
    """

    def __init__(self, model: Any, gathered: Callable[[mx.array], mx.array] | None = None) -> None:
        super().__init__(model)
        self._gathered = gathered

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """The logits of the model. Where log-probabilities are wanted, those of the last part of ``tokens``."""
        *own, scores = cache
        if tokens.shape[1] > 1:
            put_in_order(own)
        if not scores.are_wanted:
            logits: mx.array = self.model(tokens, cache=own)
            return logits
        most = max(1, _CALL // tokens.shape[0])
        for start in range(0, tokens.shape[1], most):
            logits = self.model(tokens[:, start : start + most], cache=own)
            scores.add(logits, self._logprobs)
        return logits

    def make_cache(self) -> list[Any]:
        return [*make_prompt_cache(self.model), ScoresCache()]

    def _logprobs(self, logits: mx.array) -> mx.array:
        logits = logits.astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if self._gathered is not None:
            logprobs = self._gathered(logprobs)
        mx.eval(logprobs)  # before the next ones are computed, so that their float32 copies are not there together
        return logprobs
