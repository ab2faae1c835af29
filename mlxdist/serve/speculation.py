"""Speculative decoding of a batch: tokens are guessed, and the model computes several in one step.

Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", arXiv:2211.17192, in the form of
mlx-lm's ``speculative_generate_step``: a draft is accepted where the model samples the same token. Each token has the
random state of its place in the answer, so that answers are the same with and without drafts.

Where drafts come from: draft.py.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, GenerationBatch
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from mlxdist.base.errors import InvalidArgument

from .draft import Rows, source_for
from .row_caches import flat
from .sampling import SeededSampler

__all__ = ["SpeculativeBatchGenerator"]

_KINDS = (ArraysCache, KVCache, RotatingKVCache)


class SpeculativeBatchGenerator(BatchGenerator):
    """mlx-lm's ``BatchGenerator`` with several tokens of a request in a step, each with a response.

    Args:
        model: a DraftingModel; for any other one drafts are looked up.
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
        self._source = source_for(self.model)

    def next(self) -> list[Any]:
        self.inputs = []
        self._current_tokens, self._current_logprobs = None, []  # of mlx-lm's step: it would join those of all requests
        if not self.uids:
            return []
        contexts = [
            buffer.update_and_fetch(self._next_tokens[row : row + 1]) if self.logits_processors[row] else None
            for row, buffer in enumerate(self._token_context)
        ]
        rows = Rows(
            self.uids,
            self.tokens,
            self._next_tokens,
            self.prompt_cache,
            self._most_drafts(),
            lambda logits, drafts: self._sample(logits, drafts, contexts)[0],
        )
        self._source.begin(rows)
        inputs = self._source.propose(rows)
        logits = self._source.compute(inputs, rows)
        sampled, logprobs = self._sample_all(logits, inputs, contexts)
        mx.eval(inputs, sampled, logprobs, self._next_logprobs)
        own: Any = inputs.tolist()
        after: Any = sampled.tolist()
        self.inputs = own
        return self._accept(after, logprobs, inputs)

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

    def _accept(self, sampled: list[list[int]], logprobs: mx.array, inputs: mx.array) -> list[Any]:
        """Returns responses for the next tokens and the drafts that the model sampled too, which stay in the caches.

        Args:
            sampled: for each request, the tokens that follow each of its inputs.
            logprobs: their log-probabilities, shape (requests, inputs, vocabulary).
            inputs: of the model in this step, shape (requests, inputs).
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
        self._source.keep(kept, before, inputs)
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
