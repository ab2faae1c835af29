"""What every rank does in a step: rank 0's decisions, then one step of mlx-lm's BatchGenerator, or of one of several.

All that changes the batch or the prefix cache comes from the decisions or from tokens, which are the same on all ranks.
Nothing here reads a clock, a socket or the size of a shard.
"""

import zlib
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.generate import BatchGenerator, StopSequences
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.server import _make_logits_processors

from mlxdist.base.errors import InvalidArgument, Mismatch
from mlxdist.nn.pipeline import PipelineBatchGenerator
from mlxdist.nn.pipeline.stage import stage_of

from .decisions import Admission, Decisions
from .memory import UNLIMITED, reserved
from .prefix_cache import PrefixCache
from .sampling import sampler_of

__all__ = ["KEY", "BatchLimits", "Outcome", "Worker"]

KEY = "model"  # of the prefix cache; mlx-lm's caches are of several models, and here there is one


@dataclass(frozen=True)
class BatchLimits:
    """How much is computed together, and kept.

    Attributes:
        decode_concurrency: requests that run at a time.
        prompt_concurrency: prompts of one chunk.
        prefill_step_size: tokens of each prompt in a chunk.
        max_total_tokens: of all KV caches, those of the prefix cache included; None for what there is memory for.
        prompt_cache_size, prompt_cache_tokens: sequences in the prefix cache, and tokens of all of them.
    """

    decode_concurrency: int = 32
    prompt_concurrency: int = 8
    prefill_step_size: int = 512
    max_total_tokens: int | None = None
    prompt_cache_size: int = 64
    prompt_cache_tokens: int = 1 << 15


class _Stops(StopSequences):
    """mlx-lm's, for an answer of which there are tokens already."""

    def __init__(self, sequences: list[tuple[int, ...]], generated: list[int]) -> None:
        super().__init__(sequences)
        self._generated = generated

    def matcher(self) -> StopSequences.Matcher:
        matcher = super().matcher()
        for token in self._generated:
            matcher.advance(token)
        return matcher


@dataclass
class Outcome:
    """What a step gave.

    Attributes:
        cached: of each admitted request, the tokens of its prompt that the prefix cache had.
        prefill: mlx-lm's responses of prompts.
        tokens: mlx-lm's responses of requests that generate.
    """

    cached: dict[int, int] = field(default_factory=dict)
    prefill: list[Any] = field(default_factory=list)
    tokens: list[Any] = field(default_factory=list)


class Worker:
    """The batch of this rank.

    Attributes:
        digest: CRC-32 of the tokens of the last step and their requests.

    Raises:
        InvalidArgument: the model has caches that mlx-lm cannot join in a batch.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, limits: BatchLimits) -> None:
        if unfit := {type(cache).__name__ for cache in make_prompt_cache(model) if not hasattr(cache, "merge")}:
            raise InvalidArgument(f"serve: mlx-lm cannot batch requests of a model with {', '.join(sorted(unfit))}")
        self._model, self._tokenizer = model, tokenizer
        stage = stage_of(model)
        stages = 1 if stage is None else stage.stages
        # In stages each step is one of a batch of several, which have the places together.
        sizes: dict[str, Any] = {
            "completion_batch_size": -(-limits.decode_concurrency // stages),
            "prefill_batch_size": -(-limits.prompt_concurrency // stages),
            "prefill_step_size": limits.prefill_step_size,
        }
        self._generator: Any
        if stages > 1:
            self._generator = PipelineBatchGenerator(model, **sizes)
        else:
            self._generator = BatchGenerator(model, stream=mx.default_stream(mx.default_device()), **sizes)
        self._places: int = sizes["completion_batch_size"]
        self._first_is_due = False  # a token that no request has had before comes in the next step
        self.cache = PrefixCache(limits.prompt_cache_size, limits.prompt_cache_tokens)
        self._max_total_tokens = limits.max_total_tokens or UNLIMITED
        self._needs: dict[int, int] = {}  # of each request the tokens that its KV cache comes to have, at most
        self._kinds: dict[int, list[str]] = {}  # of each request's segments that are not computed yet, the last first
        self.digest = 0

    def warm_up(self) -> int:
        """Generates some tokens for a prompt, and for longer ones that join it, so that batches have been compiled.

        Three, since a mask with a wrong axis may fit batches of as many as there are KV heads.

        Collective. Returns the size of the vocabulary.

        Raises:
            InvalidArgument: on every rank, mlx-lm cannot compute batches of this model.
        """
        stream = mx.default_stream(mx.default_device())
        generator = BatchGenerator(self._model, prefill_step_size=2, stream=stream)
        generator.insert([[0], [0] * 5, [0] * 7], max_tokens=[8, 6, 2])
        vocabulary = 0
        try:
            while responses := generator.next_generated():
                vocabulary = responses[0].logprobs.shape[-1]
        except (ValueError, TypeError, AttributeError, IndexError) as error:  # of shapes, on all ranks alike
            raise InvalidArgument(f"serve: mlx-lm cannot batch requests of this model: {error}") from error
        finally:
            generator.close()
        return vocabulary

    def limit_tokens(self, max_total_tokens: int) -> None:
        """From now on all KV caches have at most that many."""
        self._max_total_tokens = max_total_tokens
        self._make_room()

    def step(self, decisions: Decisions) -> Outcome:
        """Collective as the model is; in a step without requests nothing is computed.

        Raises:
            Mismatch: rank 0 has sampled other tokens in the step before than this rank.
        """
        if decisions.digest != self.digest:
            raise Mismatch(f"serve: before step {decisions.step} this rank has sampled other tokens than rank 0")
        outcome = Outcome()
        self._drop([number for number in decisions.cancel if number in self._kinds])
        for request in decisions.admit:
            outcome.cached[request.number] = self._admit(request)
        if self._kinds:
            if isinstance(self._generator, BatchGenerator):
                # mlx-lm returns tokens after the chunk of a prompt that it computes in the same step, and none if full.
                self._generator.completion_batch_size = 0 if self._first_is_due else self._places
            outcome.prefill, outcome.tokens = self._generator.next()
            self._first_is_due = any(response.end_of_prompt for response in outcome.prefill)
            self._keep(outcome)
        sampled = np.array([(response.uid, response.token) for response in outcome.tokens], "<u4")
        self.digest = zlib.crc32(sampled.tobytes())
        return outcome

    def close(self) -> None:
        """Waits for the token that is computed ahead."""
        mx.synchronize()
        self._generator.close()

    def _admit(self, request: Admission) -> int:
        prompt = list(request.prompt)
        cache, rest = self.cache.fetch_nearest_cache(KEY, prompt)
        if not rest:  # the last token is computed in any case: its logits are not kept
            cache, rest = self.cache.fetch_nearest_cache(KEY, prompt[:-1])
            rest = [*rest, prompt[-1]]
        cached = len(prompt) - len(rest)
        segments, kinds, end = [], [], 0
        for kind, length in request.segments:
            start, end = max(cached, end), end + length
            if start < end:
                segments.append(prompt[start:end])
                kinds.append(kind)
        eos = [(token,) for token in self._tokenizer.eos_token_ids]
        (uid,) = self._generator.insert_segments(
            [segments],
            max_tokens=[request.max_tokens],
            caches=[cache],
            all_tokens=[prompt[:cached]],
            samplers=[sampler_of(request, self._tokenizer)],
            logits_processors=[_make_logits_processors(request)],
            stop_sequences=[_Stops([*eos, *map(tuple, request.stop)], prompt[len(prompt) - request.generated :])],
        )
        if uid != request.number:
            raise Mismatch(f"serve: rank 0 admits request {request.number}, and the next one here is {uid}")
        self._kinds[uid], self._needs[uid] = kinds[::-1], request.tokens
        self._make_room()
        return cached

    def _drop(self, numbers: list[int]) -> None:
        """Ends requests. What is computed of them is kept: they may come again, with what they have generated."""
        computed = self._generator.remove(numbers, return_prompt_caches=True)
        self._forget(numbers)
        for cache, tokens in computed.values():
            if tokens:
                self._insert(tokens, cache, "assistant")

    def _forget(self, numbers: list[int]) -> None:
        for number in numbers:
            del self._kinds[number], self._needs[number]
        self._make_room()

    def _make_room(self) -> None:
        self.cache.make_room(self._max_total_tokens - reserved(self._needs.values()))

    def _keep(self, outcome: Outcome) -> None:
        """Puts what is computed of prompts, and finished requests, in the prefix cache; as mlx-lm's server does."""
        ended = [
            response.uid
            for response in outcome.prefill
            if response.end_of_segment and not response.end_of_prompt and self._kinds[response.uid]
        ]
        for uid, (cache, tokens) in self._generator.extract_cache(ended).items():
            self._insert(tokens, cache, self._kinds[uid].pop())
        finished = [response for response in outcome.tokens if response.finish_reason is not None]
        self._forget([response.uid for response in finished])
        for response in finished:
            self._insert(response.all_tokens, response.prompt_cache, "assistant")

    def _insert(self, tokens: list[int], cache: list[Any], kind: str) -> None:
        mx.async_eval([each.state for each in cache])  # lazy, they would hold the memory of the whole batch
        self.cache.insert_cache(KEY, tokens[:], cache, cache_type=kind)
