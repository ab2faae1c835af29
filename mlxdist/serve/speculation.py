"""Speculative decoding of a batch: tokens are guessed, and the model computes several in one step.

Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", arXiv:2211.17192, in the form of
mlx-lm's ``speculative_generate_step``: a draft is accepted where the model samples the same token. Each token has the
random state of its place in the answer, so that answers are the same with and without drafts.

Drafts come from a smaller model (:class:`DraftedModel`), or from the text: the tokens that followed the last two tokens
at their previous place, in the prompt or the answer ("prompt lookup decoding", github.com/apoorvumang).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.generate import BatchGenerator, GenerationBatch
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from mlxdist.base.errors import InvalidArgument

from .rollback import Rollback, arrays_of
from .row_caches import flat
from .sampling import SeededSampler
from .sliding_windows import put_in_order
from .vocabulary import VocabParallelModel

__all__ = ["DraftedModel", "SpeculativeBatchGenerator"]

_KINDS = (ArraysCache, KVCache, RotatingKVCache)


class DraftedModel:
    """A model and its draft model, in the form of one model of mlx-lm: both compute each prompt, into one prompt cache.

    Batches of prompts and the prefix cache are then mlx-lm's as they are.

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


class SpeculativeBatchGenerator(BatchGenerator):
    """mlx-lm's ``BatchGenerator`` with several tokens of a request in a step, each with a response.

    Args:
        model: a DraftedModel; for any other one drafts are looked up.
        num_draft_tokens: drafts of each request in a step.
        options: arguments of BatchGenerator.

    Raises:
        InvalidArgument: the model has a cache that tokens cannot be removed from.
    """

    def __init__(self, model: Any, num_draft_tokens: int, **options: Any) -> None:
        super().__init__(model, **options)
        if unfit := {type(cache).__name__ for cache in flat(make_prompt_cache(model)) if type(cache) not in _KINDS}:
            raise InvalidArgument(
                f"serve: drafts need a cache from which rejected ones are taken back, not {', '.join(sorted(unfit))}"
            )
        self._batch = self._generation_batch = _SpeculativeBatch.empty(model, self.sampler)
        self.num_draft_tokens = num_draft_tokens

    @property
    def num_draft_tokens(self) -> int:
        """Drafts of each request in a step; may be set between steps, also to 0."""
        return self._batch.num_draft_tokens

    @num_draft_tokens.setter
    def num_draft_tokens(self, number: int) -> None:
        self._batch.num_draft_tokens = number

    @property
    def inputs(self) -> list[list[int]]:
        """The inputs of the model in the last step: for each request a token of its answer, and drafts."""
        return self._batch.inputs


class _SpeculativeBatch(GenerationBatch):
    """A batch in which, as in mlx-lm's, each request has, between steps, one sampled token that no cache has yet."""

    num_draft_tokens = 0
    samplers: list[Any]
    logits_processors: list[Any]

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.inputs: list[list[int]] = []
        self._lookups: dict[int, _Lookup] = {}

    def next(self) -> list[Any]:
        self.inputs = []
        self._current_tokens, self._current_logprobs = None, []  # of mlx-lm's step: it would join those of all requests
        if not self.uids:
            return []
        has_draft = isinstance(self.model, DraftedModel)
        rollbacks = self._rollbacks()
        contexts = [
            buffer.update_and_fetch(self._next_tokens[row : row + 1]) if self.logits_processors[row] else None
            for row, buffer in enumerate(self._token_context)
        ]
        inputs = (self._draft if has_draft else self._look_up)(contexts)
        compute = self.model.target if has_draft else self.model
        logits = compute(inputs, cache=self.prompt_cache)
        sampled, logprobs = self._sample_all(logits, inputs, contexts)
        mx.eval(inputs, sampled, logprobs, self._next_logprobs)
        rows: Any = inputs.tolist()
        after: Any = sampled.tolist()
        self.inputs = rows
        return self._accept(after, logprobs, inputs, rollbacks)

    def _rollbacks(self) -> list[tuple[Rollback, Callable[[mx.array], Any]]]:
        """The caches of each model before the step, and a call of the model with them."""
        model, cache = self.model, self.prompt_cache
        if not isinstance(model, DraftedModel):
            return [(Rollback(cache, by_single_tokens=False), partial(model, cache=cache))]
        return [
            (Rollback(model.draft_caches(cache), by_single_tokens=True), partial(model.draft, cache=cache)),
            (Rollback(model.target_caches(cache), by_single_tokens=False), partial(model.target, cache=cache)),
        ]

    def _draft(self, contexts: list[mx.array | None]) -> mx.array:
        """Appends drafts of the draft model to the next tokens. Shape (requests, 1 + drafts)."""
        inputs = self._next_tokens[:, None]
        for _ in range(self._most_drafts()):
            logits = self.model.draft(inputs[:, -1:], self.prompt_cache)
            tokens, _ = self._sample(logits[:, -1], inputs[:, 1:], contexts)
            inputs = mx.concatenate([inputs, tokens[:, None]], axis=1)
        self.model.draft(inputs[:, -1:], self.prompt_cache)  # so that both models have the same tokens in their caches
        inputs = self.model.after_draft(inputs, self.prompt_cache)
        mx.async_eval(inputs)
        return inputs

    def _look_up(self, contexts: list[mx.array | None]) -> mx.array:
        """Appends looked-up drafts to the next tokens, as many as the longest row has; zeros fill the others."""
        following: Any = self._next_tokens.tolist()
        most = self._most_drafts()
        self._lookups = {uid: self._lookups.get(uid) or _Lookup() for uid in self.uids}
        found = [
            self._lookups[uid].after(tokens, token, most)
            for uid, tokens, token in zip(self.uids, self.tokens, following)
        ]
        width = max(map(len, found))
        drafts = [each + [0] * (width - len(each)) for each in found]
        return mx.array([[token, *each] for token, each in zip(following, drafts)], mx.uint32)

    def _most_drafts(self) -> int:
        """The maximum number of drafts, as far as some request can use them after its next token."""
        left = max(most - made for most, made in zip(self.max_tokens, self._num_tokens)) - 1
        return min(self.num_draft_tokens, left)

    def _sample_all(
        self, logits: mx.array, inputs: mx.array, contexts: list[mx.array | None]
    ) -> tuple[mx.array, mx.array]:
        """Tokens and log-probabilities after each of ``inputs``, of shape (requests, 1 + drafts)."""
        if not any(self.logits_processors) and not any(isinstance(each, SeededSampler) for each in self.samplers):
            return self._sample(logits, inputs, contexts)  # of all places at once
        places = range(inputs.shape[1])
        found = [self._sample(logits[:, place], inputs[:, 1 : place + 1], contexts) for place in places]
        tokens, logprobs = zip(*found)
        return mx.stack(list(tokens), axis=1), mx.stack(list(logprobs), axis=1)

    def _sample(self, logits: mx.array, drafts: mx.array, contexts: list[mx.array | None]) -> tuple[mx.array, mx.array]:
        """Tokens and log-probabilities after the next tokens and ``drafts``, of shape (requests, drafts)."""
        rows = []
        for row, (context, processors) in enumerate(zip(contexts, self.logits_processors)):
            one = logits[row : row + 1]
            for processor in processors or ():
                assert context is not None  # there are processors
                one = processor(mx.concatenate([context, drafts[row]]), one)
            rows.append(one)
        logits = mx.concatenate(rows) if any(self.logits_processors) else logits
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if not any(isinstance(sampler, SeededSampler) for sampler in self.samplers):
            return self.samplers[0](logprobs), logprobs  # mlx-lm's greedy one
        tokens = []
        for row, (sampler, made) in enumerate(zip(self.samplers, self._num_tokens)):
            one = logprobs[row : row + 1]
            is_seeded = isinstance(sampler, SeededSampler)
            tokens.append(sampler.at(made + 1 + drafts.shape[1], one) if is_seeded else sampler(one))
        return mx.concatenate(tokens), logprobs

    def _accept(
        self,
        sampled: list[list[int]],
        logprobs: mx.array,
        inputs: mx.array,
        rollbacks: list[tuple[Rollback, Callable[[mx.array], Any]]],
    ) -> list[Any]:
        """Returns responses for the next tokens and the drafts that the model sampled too, which stay in the caches.

        Args:
            sampled: for each request, the tokens that follow each of its inputs.
            logprobs: their log-probabilities, shape (requests, inputs, vocabulary).
            inputs: of the model in this step, shape (requests, inputs).
            rollbacks: of the models' caches before it.
        """
        before = [len(tokens) for tokens in self.tokens]
        kept, reasons = [], []
        for row, (own, after) in enumerate(zip(self.inputs, sampled)):
            wrong = (place for place, token in enumerate(after[:-1]) if own[place + 1] != token)
            right = next(wrong, len(after) - 1)  # drafts
            made, reason = 0, None
            while made <= right and reason is None:
                reason = self._ends(row, own[made])
                made += 1
            self.tokens[row] += own[:made]
            if self.logits_processors[row]:
                self._token_context[row].update_and_fetch(mx.array(own[1:made], mx.int32))
            kept.append(made)
            reasons.append(reason)
        for rollback, compute in rollbacks:
            rollback.keep(kept, before, inputs, compute)
        responses = [
            response
            for row, (made, reason) in enumerate(zip(kept, reasons))
            for response in self._responses(row, made, reason, logprobs)
        ]
        self._next_tokens = mx.array([after[made - 1] for after, made in zip(sampled, kept)], mx.uint32)
        self._next_logprobs = [logprobs[row, made - 1] for row, made in enumerate(kept)]
        if any(reasons):
            self.filter([row for row, reason in enumerate(reasons) if reason is None])
        return responses

    def _ends(self, row: int, token: int) -> str | None:
        """The reason why a request ends with this token; None if it continues."""
        self._num_tokens[row] += 1
        if self._matchers[row].advance(token):
            return "stop"
        return "length" if self._num_tokens[row] >= self.max_tokens[row] else None

    def _responses(self, row: int, made: int, reason: str | None, logprobs: mx.array) -> list[Any]:
        of_each = [self._next_logprobs[row], *(logprobs[row, place] for place in range(made - 1))]
        found = [
            self.Response(self.uids[row], token, of_each[place], None, None, None)
            for place, token in enumerate(self.inputs[row][:made])
        ]
        if reason is not None:
            found[-1].finish_reason, found[-1].all_tokens = reason, self.tokens[row]
            found[-1].prompt_cache = self.extract_cache(row)
        return found


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
