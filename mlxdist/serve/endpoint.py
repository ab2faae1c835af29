"""Rank 0's end of the protocol: prepares the requests that come, queues them, and sends the events of their answers.

It has a thread of its own, with an event loop. The model's thread only puts events into queues.
"""

import asyncio
import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.server import LogitsProcessorArguments, SamplingArguments
from pydantic import ValidationError

from .answer import Answer, PromptTokens, Token
from .authenticated_stream import AuthenticatedServer
from .cluster_status import ClusterStatus
from .decisions import MAX_BIASES, MAX_STOP_TOKENS, MAX_TOP_LOGPROBS, Admission
from .grammar import grammar_tokenizer
from .listener import MAX_REQUESTS
from .log import say
from .metrics import Metrics
from .output import OutputBuilder
from .preparation_pool import PreparationPool
from .prepared import Prepared
from .protocol import (
    CALL,
    MAX_LINE,
    Admitted,
    Detokenize,
    Failed,
    Finished,
    Generate,
    Output,
    Progress,
    Result,
    Status,
    Tokenize,
    ToolCall,
)
from .refusal import Refusal, sentence
from .scheduler import LATE, Request, Scheduler
from .token_bytes import TokenBytes

__all__ = ["Endpoint"]

_LAST_SECONDS = 2.0  # for what connections still send in the end
_ECHOED = 512  # tokens of a prompt in a line
_PLAIN = TextStateMachine()  # of completions, whose text has no sections
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "xtc_probability", "xtc_threshold")
_Queued = tuple[Request, asyncio.Event]
_LOGITS = ("repetition_{}", "presence_{}", "frequency_{}")


class Endpoint:
    """Answers calls of `protocol` for one model.

    Args:
        pool: makes tokens of prompts.
        served: the names of the model, of which the first is the real one.
        adapters: the names of adapters; the first has number 1.
        defaults: max_tokens, temp, top_p, top_k and min_p of requests that do not say.
        timeout: the maximum duration of a request in seconds.
        metrics: what it and the scheduler count.

    Attributes:
        scheduler: the queue; None until the model is loaded.
    """

    def __init__(
        self,
        pool: PreparationPool,
        served: tuple[str, ...],
        adapters: tuple[str, ...],
        defaults: dict[str, Any],
        timeout: float,
        metrics: Metrics,
    ) -> None:
        self._pool, self._served, self._adapters = pool, served, adapters
        self._defaults, self._timeout = defaults, timeout
        self.metrics = metrics
        self.scheduler: Scheduler | None = None
        self._tokenizer: Any = None
        self._machine: Any = None
        self._thoughts = _PLAIN  # the machine of answers that a grammar describes, but for the thoughts before it
        self._token_bytes: TokenBytes | None = None
        self._vocabulary = self._context = 0
        self._gauges: Callable[[], dict[str, float]] = dict
        self._cluster: ClusterStatus | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="mlxdist endpoint", daemon=True)
        self._server: asyncio.Server | AuthenticatedServer | None = None
        self._connections: set[asyncio.Task] = set()
        self._lock = threading.Lock()
        self._woken: list[asyncio.Event] = []

    def open(
        self,
        scheduler: Scheduler,
        tokenizer: Any,
        vocabulary: int,
        context: int,
        gauges: Callable[[], dict[str, float]],
        cluster: ClusterStatus | None = None,
    ) -> None:
        """Begins to serve requests: up to ``context`` tokens each with its answer, all of them below ``vocabulary``.

        ``cluster``: what rank 0 says of all ranks; None without a view of them.
        """
        self._cluster = cluster
        self._tokenizer, self._vocabulary, self._context, self._gauges = tokenizer, vocabulary, context, gauges
        self._machine, self._token_bytes = make_text_state_machine(tokenizer), TokenBytes(tokenizer)
        if tokenizer.has_thinking:
            begin, end = [(tokenizer.think_start, "reasoning")], [(tokenizer.think_end, "normal")]
            self._thoughts = TextStateMachine({"normal": begin, "reasoning": end})
        self._pool.context, self._pool.vocabulary = context, vocabulary
        self._pool.has_grammars = grammar_tokenizer(tokenizer) is not None
        self.scheduler = scheduler

    def wait_for_tokenizer(self, seconds: float) -> None:
        """Waits, in :meth:`running`, until a process can make requests into tokens, for at most ``seconds``."""
        started = asyncio.run_coroutine_threadsafe(self._pool.started(), self._loop)
        with contextlib.suppress(TimeoutError):  # the first requests wait for it instead
            started.result(seconds)

    @property
    def unavailable(self) -> str:
        """The reason why no request is served; empty if requests are served."""
        return "the model is being loaded" if self.scheduler is None else self.scheduler.unavailable

    @contextlib.contextmanager
    def running(self, listener: socket.socket | None = None, secret: bytes = b"") -> Iterator[None]:
        """A context in which calls are answered.

        Args:
            listener: a Unix domain socket at which another process calls, or one of TCP for those that have
                ``secret``; None if only this process does.
        """
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._begin(listener, secret), self._loop).result()
        try:
            yield
        finally:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection for one call, in the event loop of the caller."""
        here, there = socket.socketpair()
        self._loop.call_soon_threadsafe(self._accept, there)
        return await asyncio.open_connection(sock=here, limit=MAX_LINE)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    async def _begin(self, listener: socket.socket | None, secret: bytes) -> None:
        if listener is not None and listener.family == socket.AF_UNIX:
            self._server = await asyncio.start_unix_server(
                self._connected, sock=listener, limit=MAX_LINE, backlog=MAX_REQUESTS
            )
        elif listener is not None:
            self._server = AuthenticatedServer(self._connected, secret, MAX_LINE)
            await self._server.start(listener, MAX_REQUESTS)
        await self._pool.start()

    async def _end(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._connections:  # the last events are on their way
            await asyncio.wait(self._connections, timeout=_LAST_SECONDS)
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._pool.close()

    def _accept(self, connection: socket.socket) -> None:
        async def serve() -> None:
            await self._connected(*await asyncio.open_connection(sock=connection, limit=MAX_LINE))

        task = self._loop.create_task(serve())
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the call of one connection, unless it is closed before."""
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        with contextlib.suppress(OSError, ValueError, asyncio.CancelledError):  # ValueError: a line without an end
            line = await reader.readline()
            leaves = asyncio.create_task(_leaves(reader, task))
            try:
                await self._answer(line, writer)
            except Refusal as refusal:
                await _send(writer, Failed.of(refusal))
            except OSError:  # the application has left
                raise
            except Exception as error:  # its client gets a sentence in place of a connection that is lost
                say(f"a request has failed: {type(error).__name__}: {sentence(error)!a}")
                await _send(writer, Failed(message=f"the request has failed: {sentence(error)}", status=500))
            finally:
                leaves.cancel()
        writer.close()

    async def _answer(self, line: bytes, writer: asyncio.StreamWriter) -> None:
        try:
            call = CALL.validate_json(line)
        except ValidationError as error:
            raise Refusal(f"the call of the application cannot be read: {error.errors()[0]['msg']}", 500) from None
        if isinstance(call, Status):
            await _send(writer, Result(value=await self._status(call)))
            return
        if self.scheduler is None:
            raise Refusal(self.unavailable, 503)
        model, adapter = self._model_of(call.model, getattr(call, "adapter", None))
        if isinstance(call, Tokenize):
            await _send(writer, Result(value=await self._pool.tokenize(call) | {"model": model}))
        elif isinstance(call, Detokenize):
            await _send(writer, Result(value=await self._pool.detokenize(call) | {"model": model}))
        else:
            await self._generate(call, model, adapter, writer)

    async def _status(self, call: Status) -> dict[str, Any]:
        status: dict[str, Any] = {"reason": self.unavailable, "models": list(self._served)}
        status["adapters"] = list(self._adapters)
        if call.metrics:
            status["metrics"] = self.metrics.text(self._gauges())
        if call.cluster and self._cluster is not None and not status["reason"]:
            status["cluster"] = await self._cluster.read()
        return status

    def _model_of(self, model: str | None, adapter: str | None) -> tuple[str, int]:
        """The real name of the model or adapter that a request names, and the number of the adapter; 0 for none."""
        listed = f"the adapters {', '.join(self._adapters)}" if self._adapters else "no adapter"
        code = "model_not_found"
        if model is not None and model not in (*self._served, *self._adapters):
            text = f"the model served here is {self._served[0]}, with {listed}; leave `model` out, or name those"
            raise Refusal(text, 404, param="model", code=code)
        if adapter is not None and adapter not in self._adapters:
            text = f"the model is served with {listed}; leave `adapters` out, or name one"
            raise Refusal(text, 404, param="adapters", code=code)
        if model in self._adapters and adapter not in (None, model):
            raise Refusal("`model` and `adapters` name different adapters", param="adapters")
        name = adapter or (model if model in self._adapters else None)
        return name or self._served[0], 0 if name is None else 1 + self._adapters.index(name)

    async def _generate(self, call: Generate, model: str, adapter: int, writer: asyncio.StreamWriter) -> None:
        requests: list[_Queued] = []
        try:
            prepared = await self._begin_choices(call, adapter, requests)
            async with asyncio.TaskGroup() as choices:
                for choice, queued in enumerate(requests):
                    choices.create_task(self._send_choice(call, prepared, model, choice, queued, writer))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            for request, _ in requests:
                request.cancel()

    async def _begin_choices(self, call: Generate, adapter: int, requests: list[_Queued]) -> Prepared:
        """Queues a request for each choice, and adds it to ``requests``. Raises Refusal."""
        arrived = time.monotonic()
        try:
            prepared = await self._prepared(call)
            for choice in range(call.n):
                requests.append(self._queue(call, prepared, adapter, choice, arrived))
        except Refusal as refusal:
            self.metrics.ended("timeout" if refusal.status == 504 else "refused")
            raise
        return prepared

    async def _send_choice(
        self, call: Generate, prepared: Prepared, model: str, choice: int, queued: _Queued, writer: asyncio.StreamWriter
    ) -> None:
        """Sends the events of a choice."""
        request, wakes = queued
        output = self._output(call, prepared, request.answer, choice)
        async for event in _events(request, wakes):
            if isinstance(event, int):
                admitted = Admitted(
                    choice=choice,
                    model=model,
                    prompt_tokens=len(prepared.tokens),
                    cached_tokens=event,
                    prompt_text=prepared.prompt_text,
                )
                await _send(writer, admitted)
            elif isinstance(event, tuple):
                await _send(writer, Progress(choice=choice, processed=event[0], total=event[1]))
            elif isinstance(event, PromptTokens):
                await self._echo(event, choice, writer)
            elif call.max_tokens == 0:  # mlx-lm's batches make a token at least, which no one gets
                await _send(writer, Finished(choice=choice, finish_reason="length", completion_tokens=0))
                return
            else:
                await _send(writer, *await output.read(event))

    async def _echo(self, prompt: PromptTokens, choice: int, writer: asyncio.StreamWriter) -> None:
        """Sends the tokens of a prompt, which may be many with twenty others each."""
        assert self._token_bytes is not None  # it is open
        for start in range(0, len(prompt.tokens), _ECHOED):
            tokens = [self._token_bytes.logprob(token) for token in prompt.tokens[start : start + _ECHOED]]
            await _send(writer, Output(choice=choice, tokens=tokens))

    def _queue(self, call: Generate, prepared: Prepared, adapter: int, choice: int, arrived: float) -> _Queued:
        """Queues a request, which sets the event when something has happened to it. Raises Refusal."""
        assert self.scheduler is not None  # it is open
        wakes = asyncio.Event()
        request = Request(
            self._admission(call, prepared, adapter, choice),
            Answer(
                self._tokenizer.detokenizer,
                self._machine_of(call, prepared),
                prepared.section,
                call.stop,
                call.include_stop,
                self._tokenizer.eos_token_ids,
                call.stop_token_ids,
                call.min_tokens,
            ),
            timeout=self._timeout,
            priority=call.priority,
            top_logprobs=call.top_logprobs,
            wake=lambda: self._wake(wakes),
            arrived=arrived,
        )
        self.scheduler.submit(request)
        return request, wakes

    def _machine_of(self, call: Generate, prepared: Prepared) -> TextStateMachine:
        """mlx-lm's machine for the sections that an answer has."""
        if call.prompt.messages is None:
            return _PLAIN
        has_calls = prepared.calls == "text" and prepared.parses_tools
        return self._thoughts if prepared.grammar and not has_calls else self._machine

    async def _prepared(self, call: Generate) -> Prepared:
        try:
            async with asyncio.timeout(self._timeout):
                return await self._pool.prepare(call)
        except TimeoutError:  # it has waited for a process
            raise Refusal(LATE, 504) from None

    def _output(self, call: Generate, prepared: Prepared, answer: Answer, choice: int) -> OutputBuilder:
        async def parse(text: str) -> list[ToolCall] | None:
            return await self._pool.parse_calls(text, call.prompt.tools, prepared.calls, call.tool_choice)

        assert self._token_bytes is not None  # it is open
        logprob = None if call.top_logprobs is None else self._token_bytes.logprob
        parts = prepared.section, prepared.calls, prepared.parses_tools, call.parallel_tool_calls
        return OutputBuilder(answer, *parts, parse, logprob, has_grammar=bool(prepared.grammar), choice=choice)

    def _admission(self, call: Generate, prepared: Prepared, adapter: int, choice: int) -> Admission:
        """The request as the ranks get it. Raises Refusal: a number is beyond the vocabulary."""
        self._check_tokens(call)
        ends = [name for name in ("stop_token_ids", "ignore_eos", "min_tokens") if getattr(call, name)]
        if prepared.grammar and ends:
            text = f"{ends[0]} is not served with a grammar, as of response_format: that says where the answer ends"
            raise Refusal(text, param=ends[0])
        sampling, defaults = call.sampling, self._defaults
        given = {
            "temperature": defaults["temp"] if sampling.temperature is None else sampling.temperature,
            "top_p": defaults["top_p"] if sampling.top_p is None else sampling.top_p,
            "top_k": defaults["top_k"] if sampling.top_k is None else sampling.top_k,
            "min_p": defaults["min_p"] if sampling.min_p is None else sampling.min_p,
        }
        most = defaults["max_tokens"] if call.max_tokens is None else call.max_tokens
        penalties = [getattr(sampling, name.format(part)) for name in _LOGITS for part in ("penalty", "context_size")]
        return Admission(
            number=-1,  # until it is admitted
            prompt=prepared.tokens,
            segments=prepared.segments,
            max_tokens=min(max(most, 1), self._context - len(prepared.tokens)),
            # Rank 0 draws the seed, because all ranks must sample with the same one.
            seed=secrets.randbits(64) if call.seed is None else (call.seed + choice) % (1 << 64),
            sampling=SamplingArguments(*(given.get(name, getattr(sampling, name)) for name in _SAMPLING)),
            logits=LogitsProcessorArguments(sampling.logit_bias or None, *penalties),
            logprobs=call.top_logprobs is not None,
            prompt_logprobs=call.prompt_logprobs,
            adapter=adapter,
            grammar=prepared.grammar.encode(),
            min_tokens=call.min_tokens,
            ignore_eos=call.ignore_eos,
            stop_tokens=call.stop_token_ids,
        )

    def _check_tokens(self, call: Generate) -> None:
        most = self._vocabulary
        if (call.sampling.top_k or 0) >= most:
            raise Refusal(f"top_k must be less than {most}, the size of the vocabulary", param="top_k")
        tops, most_tops = max(call.top_logprobs or 0, call.prompt_logprobs or 0), min(MAX_TOP_LOGPROBS, most - 1)
        if tops > most_tops:
            raise Refusal(f"top_logprobs must be at most {most_tops}", param="top_logprobs")
        for name, tokens, number in (
            ("logit_bias", call.sampling.logit_bias, MAX_BIASES),
            ("stop_token_ids", call.stop_token_ids, MAX_STOP_TOKENS),
        ):
            if len(tokens) > number:
                raise Refusal(f"{name} must have at most {number} tokens", param=name)
            if not all(0 <= token < most for token in tokens):
                raise Refusal(f"{name} must have tokens from 0 to {most - 1}", param=name)

    def _wake(self, wakes: asyncio.Event) -> None:
        """Sets an event of the loop, from another thread: the loop is woken once for all that a step has delivered."""
        with self._lock:
            self._woken.append(wakes)
            if len(self._woken) > 1:
                return
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._set_woken)

    def _set_woken(self) -> None:
        with self._lock:
            woken, self._woken = self._woken, []
        for each in woken:
            each.set()


async def _events(request: Request, wakes: asyncio.Event) -> Any:
    """Yields the number of cached tokens, (computed, all) tokens of the prompt, its PromptTokens, and lists of tokens.

    Raises:
        Refusal: the answer has ended early.
    """
    while True:
        await wakes.wait()
        wakes.clear()
        tokens: list[Token] = []
        while not request.events.empty():
            event = request.events.get_nowait()
            if isinstance(event, Token):
                tokens.append(event)
                continue
            if tokens:
                yield tokens
                tokens = []
            if isinstance(event, Refusal):
                raise event
            yield event
        if tokens:
            yield tokens
            if tokens[-1].finish_reason is not None:
                return


async def _send(writer: asyncio.StreamWriter, *events: Any) -> None:
    for event in events:
        writer.write(event.model_dump_json().encode() + b"\n")
    await writer.drain()


async def _leaves(reader: asyncio.StreamReader, task: asyncio.Task) -> None:
    """Cancels a task when the other side has closed its connection."""
    with contextlib.suppress(OSError):
        while await reader.read(1 << 16):
            continue
    task.cancel()
