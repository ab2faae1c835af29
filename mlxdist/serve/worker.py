"""The step of every rank: it carries out rank 0's decisions, then runs mlx-lm's BatchGenerator, or a variant of it.

The batch and the prefix cache depend only on the decisions and on tokens, which are the same on all ranks.
Nothing here reads a clock, a socket or the size of a shard.
"""

import itertools
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.generate import BatchGenerator, StopSequences
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.server import _make_logits_processors

from mlxdist.base.errors import InvalidArgument, Mismatch
from mlxdist.nn.layout.modules import source_of
from mlxdist.nn.models.pipeline_batch_generator import PipelineBatchGenerator
from mlxdist.nn.models.split_model import SplitModel
from mlxdist.nn.pipeline_parallel.stage import stage_of
from mlxdist.runtime.group.group import Group
from mlxdist.runtime.operations.collectives import all_gather

from .adapters import AdapterCache
from .answer import Token
from .cache_blocks import can_be_cut
from .decisions import Admission, Decisions
from .draft import DraftingModel
from .grammar import GrammarProcessor, grammar_tokenizer
from .memory import CacheMemory, reserved
from .prefix_disk import PrefixDisk, StoredNode
from .prefix_tree import PrefixTree, Reading
from .prompt_logprobs import PromptLogprobs, ScoredModel, ScoresCache
from .quantized_cache import are_quantized
from .request_cache import OneRequestModel, cannot_be_batched
from .row_caches import ModelWrapper, of_layers, of_rows
from .sampling import MinTokens, sampler_of
from .speculation import SpeculativeBatchGenerator
from .vocabulary import VocabParallelModel

__all__ = ["BatchLimits", "Outcome", "Worker"]

# Model files of mlx-lm whose batches give other tokens than a request alone. PROMPTS_ALONE: for prompts of unequal
# lengths, because recurrent layers compute the padding, too. REQUESTS_ALONE: in all batches.
PROMPTS_ALONE = ("baichuan_m1", "bailing_moe_linear", "jamba", "mamba", "olmo_hybrid", "recurrent_gemma", "rwkv7")
REQUESTS_ALONE = ("afm7", "longcat_flash_ngram", "minimax_m3_vl")

_WRAPPERS = (DraftingModel, ModelWrapper, SplitModel, VocabParallelModel)

_LAST_STATES = 512  # tokens before the end of a prompt at which there are states; and at twice as many, and so on


@dataclass(frozen=True)
class BatchLimits:
    """Limits of a batch and of the prefix cache.

    Attributes:
        decode_concurrency: the number of requests that run at a time.
        prompt_concurrency: the number of prompts in one chunk.
        prefill_step_size: the number of tokens of each prompt in a chunk.
        max_total_tokens: tokens of all KV caches, including the prefix cache; None for as many as memory allows.
        prompt_cache_size, prompt_cache_tokens: sequences in the prefix cache, and tokens of all of them; None for as
            many as memory allows. A prefix that sequences share counts once.
        snapshot_interval: tokens of a prompt after which the prefix cache keeps the states of a model with sliding
            windows or recurrent layers, from which another prompt can go on; near the prompt's end there are more.
        num_draft_tokens: drafts of each request in a step; with 0, a request gets one token per step.
    """

    decode_concurrency: int = 32
    prompt_concurrency: int = 8
    prefill_step_size: int = 512
    max_total_tokens: int | None = None
    prompt_cache_size: int | None = None
    prompt_cache_tokens: int | None = None
    snapshot_interval: int = 4096
    num_draft_tokens: int = 0


@dataclass
class Outcome:
    """The results of a step.

    Attributes:
        cached: for each admitted request, the number of tokens of its prompt that were in the prefix cache.
        prefill: mlx-lm's responses for prompts.
        prompt_logprobs: for requests that ask for it, the next tokens of their prompt with log-probabilities.
        tokens: mlx-lm's responses for requests that generate; with drafts, a request may have several.
        drafted, accepted: the number of drafts that the model has computed, and of those that it would have sampled.
        failed: for requests whose answer ended without matching their grammar, the reason.
        computed: of prefill ranks: requests of whose prompt all but the last token is computed; they run no more.
        received: of decode ranks: all have received the caches of requests with lower numbers.
        received_bytes: of decode ranks: bytes of caches that have been received since the step before.
    """

    cached: dict[int, int] = field(default_factory=dict)
    prefill: list[Any] = field(default_factory=list)
    prompt_logprobs: dict[int, list[Token]] = field(default_factory=dict)
    tokens: list[Any] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    failed: dict[int, str] = field(default_factory=dict)
    computed: list[int] = field(default_factory=list)
    received: int = 0
    received_bytes: int = 0


@dataclass
class _Running:
    """A request of the batch.

    Attributes:
        needs: the maximum number of tokens of its KV cache, at its end.
        adapter: the number of its adapter.
        logprobs: whether rank 0 reads log-probabilities.
        scores: the log-probabilities of its prompt, or None.
        grammar: the processor for the grammar of its answer, or None.
    """

    needs: int
    adapter: int
    logprobs: bool
    scores: PromptLogprobs | None
    grammar: GrammarProcessor | None


class Worker:
    """The batch on this rank.

    Attributes:
        digest: CRC-32 of the tokens of the last step and their requests, and of the drafts.

    Raises:
        InvalidArgument: there are to be drafts, and the model has caches from which these cannot be removed, or mlx-lm
            cannot compute its requests in batches.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, limits: BatchLimits) -> None:
        file = source_of(_innermost(model))
        fails_in_batches = cannot_be_batched(model, file)
        if fails_in_batches and limits.num_draft_tokens:
            raise InvalidArgument(f"serve: drafts are for models that mlx-lm can batch, and {file} is none")
        if file in PROMPTS_ALONE and limits.num_draft_tokens:
            raise InvalidArgument(f"serve: drafts are not for {file}, whose prompts mlx-lm computes one at a time")
        self._tokenizer = tokenizer
        self._grammar_tokenizer = grammar_tokenizer(tokenizer)
        target = model.model if isinstance(model, DraftingModel) else model
        self._sharded = target if isinstance(target, VocabParallelModel) else None
        self._model = _scored(OneRequestModel(model) if fails_in_batches else model, self._sharded)
        self._drafts = limits.num_draft_tokens
        # With pipeline stages there are as many batches as stages, and they share the places: each step computes one.
        # A step with drafts ends with tokens on the host, so that no other batch could be on its way meanwhile.
        stage = None if self._drafts else stage_of(self._model)
        self._batches = 1 if stage is None else stage.stages
        requests_alone = fails_in_batches or file in REQUESTS_ALONE
        places = 1 if requests_alone else limits.decode_concurrency
        prompts = 1 if requests_alone or file in PROMPTS_ALONE else limits.prompt_concurrency
        self._places = -(-places // self._batches)
        self._sizes = {"completion_batch_size": self._places, "prefill_batch_size": -(-prompts // self._batches)}
        self._generator = self._new_generator(limits.prefill_step_size)
        self._first_is_due = False  # a token that no request has had before comes in the next step
        self._running: dict[int, _Running] = {}
        self._finished: dict[int, tuple[list[Any], list[int]]] = {}  # of those that run no more, cache and tokens
        self._limits = limits
        self._gather: Callable[[np.ndarray], np.ndarray] = lambda row: row[None]
        self._queue: deque[Admission] = deque()  # of requests whose prompts are read from the disk, or behind those
        self._reading: Reading | None = None  # for the first of them
        self._read = 0  # tokens that were read for it
        self._cancelled: set[int] = set()  # of them
        self.limit(CacheMemory() if limits.max_total_tokens is None else CacheMemory((limits.max_total_tokens,)))
        self.digest = 0

    def warm_up(self) -> int:
        """Generates some tokens for a prompt, and for longer ones that join it, so that batches have been compiled.

        It uses three requests: a mask with a wrong axis may fit a batch of as many requests as there are KV heads.

        Collective. Returns the size of the vocabulary.

        Raises:
            InvalidArgument: on every rank, mlx-lm cannot compute batches of this model.
        """
        generator = self._new_generator(prefill_step_size=2)
        rows = [row for row in ((1, 8, 0), (5, 6, 1), (7, 2, 1)) for _ in range(self._batches)]  # one in each batch
        prompts, most, adapters = zip(*rows)
        caches = [self._prompt_cache(adapter) for adapter in adapters]
        generator.insert([[0] * length for length in prompts], max_tokens=list(most), caches=caches)
        vocabulary = 0
        try:
            while responses := generator.next_generated():
                vocabulary = responses[0].logprobs.shape[-1]
            if self._sharded is not None:
                vocabulary = self._sharded.vocabulary
        except (ValueError, TypeError, AttributeError, IndexError) as error:  # of shapes, on all ranks alike
            how = " with quantized KV caches (--kv-bits)" if are_quantized(caches[0]) else ""
            raise InvalidArgument(f"serve: mlx-lm cannot batch requests of this model{how}: {error}") from error
        finally:
            generator.close()
        return vocabulary

    def limit(self, memory: CacheMemory) -> None:
        """Makes a prefix cache, which is empty, and limits it and all other caches to that memory."""
        self._memory, self._above, limits = memory, np.zeros(len(memory.left)), self._limits
        is_cut = can_be_cut(make_prompt_cache(self._model))
        self.cache = PrefixTree(is_cut, limits.prompt_cache_size, limits.prompt_cache_tokens, memory.costs)
        self._make_room()

    def open_disk(self, disk: PrefixDisk, stored: Sequence[StoredNode], group: Group) -> int:
        """Gives the prefix cache a disk with nodes, on all ranks of the ``group``. Returns how many it takes."""
        self._gather = lambda row: all_gather(row, group=group).reshape(group.size(), -1)
        return self.cache.open(disk, stored)

    def _new_generator(self, prefill_step_size: int) -> Any:
        sizes: dict[str, Any] = self._sizes | {"prefill_step_size": prefill_step_size}
        sizes["sampler"] = self._sharded and self._sharded.greedy
        if self._batches > 1:
            return PipelineBatchGenerator(self._model, **sizes)
        sizes["stream"] = mx.default_stream(mx.default_device())
        if self._drafts:
            return SpeculativeBatchGenerator(self._model, self._drafts, **sizes)
        return BatchGenerator(self._model, **sizes)

    def step(self, decisions: Decisions) -> Outcome:
        """Carries out decisions and computes one step, if there are requests. Collective like the model's call.

        Raises:
            Mismatch: rank 0 has sampled other tokens than this rank in the previous step.
        """
        # Without this check, a rank that sampled other tokens would compute different batches from here on, silently.
        if decisions.digest != self.digest:
            raise Mismatch(f"serve: before step {decisions.step} this rank has sampled other tokens than rank 0")
        outcome = Outcome()
        self.cache.step += 1
        self.end(decisions.end)
        self._queue += decisions.admit
        while self._queue and self._is_read(self._queue[0]):
            self._begin(self._queue.popleft(), outcome)
        if self._running:
            if isinstance(self._generator, BatchGenerator):
                # mlx-lm computes a chunk of prompts before it returns the tokens of the step, unless the batch is full.
                # "Full" in the step in which a first token is due keeps a long prompt from delaying that token.
                self._generator.completion_batch_size = 0 if self._first_is_due else self._places
            if isinstance(self._generator, SpeculativeBatchGenerator):
                self._generator.num_draft_tokens = min(self._drafts, decisions.drafts)
            outcome.prefill, outcome.tokens = self._generator.next()
            taken = ((uid, each.scores.take()) for uid, each in self._running.items() if each.scores is not None)
            outcome.prompt_logprobs = {uid: tokens for uid, tokens in taken if tokens}
            self._gather_logprobs(outcome.tokens)
            self._first_is_due = any(response.end_of_prompt for response in outcome.prefill)
            self._keep(outcome)
        sampled = np.array([(response.uid, response.token) for response in outcome.tokens], "<u4")
        self.digest = zlib.crc32(sampled.tobytes())
        if outcome.tokens and isinstance(self._generator, SpeculativeBatchGenerator):
            inputs = np.array(self._generator.inputs, "<u4")
            self.digest = zlib.crc32(inputs.tobytes(), self.digest)
            outcome.drafted, outcome.accepted = inputs[:, 1:].size, len(outcome.tokens) - len(inputs)
        return outcome

    def _is_read(self, request: Admission) -> bool:
        """Whether memory has what the disk has for this request, the first of the queue. Collective while it reads."""
        while True:
            # What memory has no room for is evicted as it comes: no more is read than the prompt has.
            is_due = request.number not in self._cancelled and self._read < len(request.prompt)
            if self._reading is None and request.prompt_logprobs is None and is_due:
                self._reading = self.cache.read(request.adapter, request.prompt[:-1])
            if self._reading is None:
                self._read = 0
                return True
            counts = self._gather(np.array([self._reading.count(wait=not self._running)]))
            if counts.min() < 0:
                return False
            self._read += self.cache.finish(self._reading, int(counts.min()))
            self._reading = None

    def _begin(self, request: Admission, outcome: Outcome) -> None:
        cached = self._admit(request)
        if request.number in self._cancelled:  # now that it has its number in the generator
            self._cancelled.remove(request.number)
            self.end([(request.number, 0)])
        else:
            outcome.cached[request.number] = cached

    def end(self, requests: Sequence[tuple[int, int]]) -> None:
        """Ends ``requests``, pairs as in `Decisions.end`. Their computed tokens stay in the prefix cache, up to a stop
        word, because the requests, or longer ones, may come again."""
        self._cancelled.update({number for number, _ in requests} & {each.number for each in self._queue})
        kept = {number: tokens for number, tokens in requests if number in self._running}
        if not kept:
            return
        computed = self._generator.remove(kept.keys() - self._finished.keys(), return_prompt_caches=True)
        adapters = {number: self._running.pop(number).adapter for number in kept}
        self._make_room()
        for number, most in kept.items():
            cache, tokens = self._finished.pop(number, None) or computed[number]
            if len(tokens) <= most or self.cache.can_be_cut:  # others end with a stop word, and states do not go back
                self.cache.insert(adapters[number], tokens[:most], cache)

    def _gather_logprobs(self, responses: list[Any]) -> None:
        """Gathers the log-probabilities that clients have requested. Collective."""
        if self._sharded is None:
            return
        for response in responses:
            if self._running[response.uid].logprobs:
                response.logprobs = self._sharded.gathered(response.logprobs)
        mx.eval([response.logprobs for response in responses])

    def close(self) -> None:
        """Waits for the token that mlx-lm computes in advance."""
        mx.synchronize()
        self._generator.close()

    def _admit(self, request: Admission) -> int:
        prompt = list(request.prompt)
        scores = None if request.prompt_logprobs is None else PromptLogprobs(prompt, request.prompt_logprobs)
        cache = self._prompt_cache(request.adapter, scores)
        cached = self._fetch(request, cache)
        ends = [cached, *self._ends_of_segments(request, cached)]
        segments = [prompt[start:end] for start, end in zip(ends, ends[1:])]
        processors = _make_logits_processors(request)
        ends = [*(() if request.ignore_eos else self._tokenizer.eos_token_ids), *request.stop_tokens]
        asked = len(request.prompt) - request.generated
        if request.min_tokens and ends:
            processors.append(MinTokens(ends, asked + request.min_tokens))
        grammar = self._grammar_of(request, asked)
        if grammar is not None:
            processors.append(grammar)  # the last one, which no other can undo
        if self._sharded is None:
            sampler = sampler_of(request, self._tokenizer)
        else:
            sampler = sampler_of(request, self._tokenizer, self._sharded.sampler)
            processors = self._sharded.processors(processors)
        (uid,) = self._generator.insert_segments(
            [segments],
            max_tokens=[request.max_tokens],
            caches=[cache],
            all_tokens=[prompt[:cached]],
            samplers=[sampler],
            logits_processors=[processors],
            stop_sequences=[StopSequences([(token,) for token in ends])],
        )
        if uid != request.number:
            raise Mismatch(f"serve: rank 0 admits request {request.number}, and the next one here is {uid}")
        self._running[uid] = _Running(request.tokens, request.adapter, request.logprobs, scores, grammar)
        self._make_room()
        return cached

    def _fetch(self, request: Admission, cache: list[Any]) -> int:
        """Puts what there is of the request's prompt into ``cache``, which is new. Returns its number of tokens."""
        if request.prompt_logprobs is not None:
            return 0
        # The logits of what is cached are not kept, so the last token is computed in any case.
        return self.cache.fetch(request.adapter, list(request.prompt[:-1]), cache)

    def _ends_of_segments(self, request: Admission, cached: int) -> list[int]:
        """Returns where the prompt is put into the prefix cache as it is computed, and its end."""
        ends = set(itertools.accumulate(request.segments))
        if not self.cache.can_be_cut:
            length, interval = len(request.prompt), self._limits.snapshot_interval
            ends.update(range(0, length, interval))
            # Most edits are near the end, and states are large: twice the distance is as good twice as far from it.
            distance = _LAST_STATES
            while distance < min(interval, length):
                ends.add(length - distance)
                distance *= 2
        return sorted(end for end in ends if end > cached)

    def _prompt_cache(self, adapter: int, scores: PromptLogprobs | None = None) -> list[Any]:
        """The empty prompt cache of a request."""
        made = make_prompt_cache(self._model)
        for each in of_rows(made):
            if isinstance(each, AdapterCache):
                each.rows = [adapter]
            elif isinstance(each, ScoresCache):
                each.rows = [scores]
        return made

    def _grammar_of(self, request: Admission, prompt: int) -> GrammarProcessor | None:
        if not request.grammar:
            return None
        assert self._grammar_tokenizer is not None  # rank 0 has admitted it
        text = request.grammar.decode(errors="replace")
        return GrammarProcessor(text, self._grammar_tokenizer, prompt)

    def report(self) -> np.ndarray:
        """What :meth:`compare` takes of each rank: bytes that MLX uses, and how far the disk is."""
        return np.array([mx.get_active_memory(), *self.cache.progress()], np.int64)

    def compare(self, reports: np.ndarray) -> None:
        """Takes the reports of all ranks, (ranks, 3), at the same step on each."""
        # What MLX uses beyond its limit, such as for long prompts, the prefix cache gives back until it is no more.
        self._above = np.clip(self._above + reports[:, 0] - self._memory.limits, 0, np.maximum(self._memory.left, 0))
        done = int(reports[:, 1].min())
        self.cache.compared(done, bool(reports[reports[:, 1] == done, 2].any()))
        self._make_room()

    def _reserved(self) -> int:
        """The number of tokens in the KV caches of requests."""
        return reserved([each.needs for each in self._running.values()])

    def _make_room(self) -> None:
        running = self._reserved()
        memory = self._memory.less(self._above.tolist())
        self.cache.make_room(lambda tokens, states: memory.fits(running + tokens, states))

    def _keep(self, outcome: Outcome) -> None:
        """Puts computed segments of prompts into the prefix cache; holds finished requests."""
        ended = [response.uid for response in outcome.prefill if response.end_of_segment and not response.end_of_prompt]
        for uid, (cache, tokens) in self._generator.extract_cache(ended).items():
            self.cache.insert(self._running[uid].adapter, tokens, cache)
        for response in [response for response in outcome.tokens if response.finish_reason is not None]:
            grammar = self._running[response.uid].grammar
            has_ended = response.token in self._tokenizer.eos_token_ids
            if grammar and has_ended and (reason := grammar.failure(response.all_tokens)):
                outcome.failed[response.uid] = reason
            _evaluate(of_layers(response.prompt_cache))
            self._finished[response.uid] = response.prompt_cache, response.all_tokens


def _evaluate(cache: list[Any]) -> None:
    """Begins to compute the arrays, because lazy ones keep the memory of the whole batch alive."""
    mx.async_eval([each.state for each in cache])


def _scored(model: Any, sharded: VocabParallelModel | None) -> Any:
    """A model that can make log-probabilities of prompts; one with a source of drafts, of its own.
    ``sharded``: what is in it where its logits are sharded over the vocabulary."""
    if isinstance(model, DraftingModel):
        return model.with_model(_scored(model.model, sharded))
    return ScoredModel(model, None if sharded is None else sharded.gathered)


def _innermost(model: Any) -> nn.Module:
    """mlx-lm's model inside its wrappers."""
    while isinstance(model, _WRAPPERS):
        model = model.model
    return model
