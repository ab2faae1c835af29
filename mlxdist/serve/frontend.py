"""Rank 0: connects mlx-lm's handler of HTTP with the scheduler, and tokenizes requests."""

import secrets
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from mlx_lm.generate import make_text_state_machine
from mlx_lm.server import CompletionRequest, GenerationArguments, GenerationContext, Response, ResponseGenerator

from .answer import Answer
from .decisions import Admission
from .grammar import after_thinking, grammar_tokenizer
from .limits import sentence
from .metrics import Metrics
from .refusal import Refusal
from .scheduler import Request, Scheduler
from .stop_words import Sections

__all__ = ["Frontend"]


class Frontend(ResponseGenerator):
    """The generator that mlx-lm's handler calls: it tokenizes a request, queues it, and returns its answer.

    Derived from mlx-lm's ResponseGenerator for its name and its tokenization; it has no thread, model or ranks.

    Args:
        options: options of mlx-lm's server, as far as its handler and chat templates read them.
        served: the names of the model.
        timeout: the maximum duration of a request in seconds.
        api_key: the key that clients send; empty for none.
        adapters: the names of adapters; the first has number 1.
    """

    def __init__(
        self, options: Namespace, served: tuple[str, ...], timeout: float, api_key: str, adapters: tuple[str, ...] = ()
    ) -> None:
        self.model_provider: Any = SimpleNamespace(cli_args=options, processor=None)
        self._sections: Any = None
        self._tokenizing = threading.Lock()  # a tokenizer is for one thread at a time
        self._timeout = timeout
        self.served, self.adapters, self.api_key = served, adapters, api_key
        self.metrics = Metrics()
        self.scheduler: Scheduler | None = None
        self.tokenizer: Any = None
        self.vocabulary = self.context = 0
        self.gauges: Callable[[], dict[str, float]] = dict

    def open(
        self,
        scheduler: Scheduler,
        tokenizer: Any,
        vocabulary: int,
        context: int,
        gauges: Callable[[], dict[str, float]],
    ) -> None:
        """Begins to serve requests: up to ``context`` tokens each with its answer, all of them below ``vocabulary``."""
        self.tokenizer, self.vocabulary, self.context, self.gauges = tokenizer, vocabulary, context, gauges
        self._sections = Sections(make_text_state_machine(tokenizer))
        self.scheduler = scheduler

    @property
    def unavailable(self) -> str:
        """The reason why no request is served; empty if requests are served."""
        return "the model is being loaded" if self.scheduler is None else self.scheduler.unavailable

    def generate(
        self,
        request: CompletionRequest,
        generation_args: GenerationArguments,
        progress_callback: Callable[[int, int], None] | None = None,
        is_connected: Callable[[], bool] = lambda: True,
        priority: int = 0,
        grammar: str = "",
    ) -> tuple[GenerationContext, Iterator[Response]]:
        """Queues a request. Returns its context and its answer, once it has a place in the batch.

        Raises:
            Refusal: the request cannot be served, or not now.
        """
        if self.scheduler is None:
            raise Refusal(self.unavailable, 503)
        with self._tokenizing:
            admission, context = self._prepare(request, generation_args, grammar)
            detokenizer = self.tokenizer.detokenizer
        answer = Answer(detokenizer, self._sections, context.initial_state, generation_args.stop_words)
        top = generation_args.top_logprobs if admission.logprobs else None
        running = Request(admission, is_connected, answer, timeout=self._timeout, priority=priority, top_logprobs=top)
        self.scheduler.submit(running)
        first = running.events.get()
        if isinstance(first, Refusal):
            raise first
        context.prompt_cache_count = running.cached or 0
        vars(context)["stop"] = running.cancel
        return context, _answer(running, progress_callback)

    def _prepare(
        self, request: CompletionRequest, args: GenerationArguments, grammar: str
    ) -> tuple[Admission, GenerationContext]:
        tokenizer = self.tokenizer
        try:
            prompt, parts, kinds, initial_state, _ = self._tokenize(tokenizer, request, args)
        except Exception as error:  # templates raise what they like
            raise Refusal(f"the request cannot be made into tokens: {sentence(error)}") from None
        if not prompt:
            raise Refusal("the prompt is empty")
        if len(prompt) >= self.context:
            raise Refusal(f"the prompt has {len(prompt)} tokens, and at most {self.context - 1} are served here")
        if not all(0 <= token < self.vocabulary for token in prompt):
            raise Refusal("the tokenizer gives tokens that the model does not have")
        named = args.model.model, args.model.adapter
        if grammar and grammar_tokenizer(tokenizer) is None:
            raise Refusal("structured output is not served with this model, whose tokenizer llguidance cannot read")
        if grammar and request.request_type == "chat":
            grammar = after_thinking(grammar, tokenizer, initial_state)
        admission = Admission(
            number=-1,  # until it is admitted
            prompt=prompt,
            segments=[(kind, len(part)) for kind, part in zip(kinds, parts)],
            max_tokens=min(args.max_tokens, self.context - len(prompt)),
            # Rank 0 draws the seed, because all ranks must sample with the same one.
            seed=secrets.randbits(64) if args.seed is None else args.seed,
            sampling=args.sampling,
            logits=replace(args.logits, logit_bias=args.logits.logit_bias or None),
            logprobs=args.logprobs or args.top_logprobs > 0,
            adapter=next((number for number, name in enumerate(self.adapters, 1) if name in named), 0),
            grammar=grammar.encode(),
        )
        context = GenerationContext(
            has_tool_calling=tokenizer.has_tool_calling,
            has_thinking=tokenizer.has_thinking,
            tool_parser=tokenizer.tool_parser,
            text_sm=self._sections.of_handler,
            initial_state=initial_state,
            prompt=prompt,
        )
        return admission, context


def _answer(request: Request, progress: Callable[[int, int], None] | None) -> Iterator[Response]:
    """The tokens of a request as mlx-lm's handler takes them.

    The handler shows no text of a response with the reason "stop", and reports an answer without a reason as "stop".

    Raises:
        Refusal: the answer ended early.
    """
    while True:
        event = request.events.get()
        if isinstance(event, Refusal):
            raise event
        if isinstance(event, tuple):
            if progress is not None:
                progress(*event)
            continue
        assert not isinstance(event, int)  # it has been admitted
        reason = None if event.finish_reason == "stop" else event.finish_reason
        top: Any = event.top
        yield Response(event.text, event.token, event.logprob, reason, top)
        if event.finish_reason is not None:
            return
