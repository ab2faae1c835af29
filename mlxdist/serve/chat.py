"""`mlxdist chat`: the server's loop with a terminal, or a pipe, in place of HTTP. Every line is a question."""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.console import Console

from mlxdist.base.errors import InvalidArgument

from .api import CompletionRequest, check
from .endpoint import Endpoint
from .http_options import HttpOptions
from .listener import MAX_BODY
from .options import ServeOptions
from .placement import Layout
from .protocol import Finished, Generate, Output, Prompt
from .rank_zero import RankZero
from .refusal import Refusal
from .server import run, take_signals
from .worker import BatchLimits

__all__ = ["ChatOptions", "chat"]

_HELP = "q: exit, r: forget what was said, h: help; Ctrl-C stops an answer"  # mlx_lm.chat's commands


@dataclass(frozen=True)
class ChatOptions:
    """The options of `mlxdist chat`.

    Attributes:
        model, layout, stream_weights, max_context, chat_template_args: see ServeOptions.
        temp, top_p, max_tokens: the sampling of answers, and their maximum length in tokens.
        seed: the seed with which every answer is drawn; None for a new one each time.
        system_prompt: the system prompt before the first question; empty for none.
        interactive: whether prompts and statistics are shown, as on a terminal.
    """

    model: str
    layout: Layout = Layout()
    stream_weights: bool = False
    max_context: int | None = None
    chat_template_args: dict[str, Any] = field(default_factory=dict)
    temp: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 256
    seed: int | None = None
    system_prompt: str = ""
    interactive: bool = False


def chat(options: ChatOptions) -> None:
    """Answers the lines of rank 0's standard input until it ends. Every rank calls it, in its main thread.

    Raises:
        InvalidArgument, PeerLost, Timeout, Mismatch, Aborted, TransportError: as `Server.run`.
    """
    served = ServeOptions(
        options.model,
        layout=options.layout,
        stream_weights=options.stream_weights,
        limits=BatchLimits(decode_concurrency=1, prompt_concurrency=1),
        http=HttpOptions(request_timeout=float("inf")),
        max_context=options.max_context,
        chat_template_args=options.chat_template_args,
    )
    run("chat", served, lambda endpoint: Terminal(endpoint, options), partial(take_signals, [], 0.0))


class Terminal:
    """The standard streams of rank 0. Answers go to the standard output, all else to the standard error.

    Raises:
        InvalidArgument: an option is out of its range.
    """

    def __init__(self, endpoint: Endpoint, options: ChatOptions) -> None:
        try:
            fields = {"prompt": "any", "temperature": options.temp, "top_p": options.top_p}
            self._sampling = check(fields, CompletionRequest).calls()[0].sampling
        except Refusal as refusal:
            raise InvalidArgument(f"chat: {refusal}") from None
        self._endpoint = endpoint
        self._options = options
        self._console = Console(stderr=True, highlight=False, force_terminal=options.interactive or None)
        self._messages: list[dict[str, str]] = []
        self._ready, self._stopped = threading.Event(), threading.Event()
        self._stop_answer: Any = None  # a function, while there is an answer
        self._error: Exception | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        # A daemon thread, because nothing interrupts a read of a terminal.
        thread = threading.Thread(target=self._talk, name="mlxdist chat", daemon=True)
        with self._endpoint.running():
            thread.start()
            yield
        if self._error is not None:
            raise self._error

    def ready(self, name: str, ranks: int, layout: str) -> None:
        self._show(f"{name} is ready, ranks: {ranks}, {layout}; {_HELP}")
        self._ready.set()

    def failed(self) -> None:
        """Does nothing: the answer ends with the reason."""

    def interrupt(self) -> None:
        """Stops the answer. Before a question, the second call ends the chat."""
        if (stop := self._stop_answer) is not None:
            with contextlib.suppress(RuntimeError):  # the answer has just ended, and its event loop
                stop()
        elif self._stopped.is_set():
            self._end()
        else:
            self._stopped.set()
            os.write(2, b"\n(Ctrl-C again, or q, ends the chat)\n> ")  # print is not for handlers of signals

    def _talk(self) -> None:
        self._ready.wait()
        try:
            self._forget()
            for line in self._lines():
                if line == "q":
                    break
                if line == "r":
                    self._forget()
                    self._show("what was said is forgotten")
                elif line == "h":
                    self._show(_HELP)
                elif line:
                    self._answer(line)
                if self._endpoint.unavailable:
                    break
        except Exception as error:  # the main thread raises it
            self._error = error
        self._end()

    def _lines(self) -> Iterator[str]:
        # Unbuffered: a thread that waits in a buffer of Python's would hold its lock when the process ends.
        with open(0, "rb", buffering=0, closefd=False) as source:
            while True:
                if self._options.interactive:
                    self._console.print("> ", end="", style="bold")
                line = source.readline(MAX_BODY)
                self._stopped.clear()
                if not line:
                    self._show("")
                    return
                yield line.decode(errors="replace").strip()

    def _answer(self, question: str) -> None:
        self._messages.append({"role": "user", "content": question})
        answer: list[str] = []
        tokens, times = [0], [time.monotonic()]
        problem = ""
        try:
            asyncio.run(self._generate(answer, tokens, times))
        except asyncio.CancelledError:
            problem = "cancelled"
        except Refusal as refusal:
            if refusal.status < 499 and not self._options.interactive:
                raise InvalidArgument(f"chat: {refusal}") from None
            problem = str(refusal)
        finally:
            self._stop_answer = None
            self._stopped.clear()
        if len(times) > 1:
            print(flush=True)
            self._messages.append({"role": "assistant", "content": "".join(answer)})
            rate = (tokens[0] - 1) / max(times[-1] - times[1], 1e-9)
            self._show(f"{tokens[0]} tokens, the first after {times[1] - times[0]:.2f} s, {rate:.1f} tokens/s")
        else:
            self._messages.pop()
        if problem:
            self._show(problem)

    async def _generate(self, answer: list[str], tokens: list[int], times: list[float]) -> None:
        """Prints an answer. Adds its parts to ``answer`` and the times of these to ``times``; counts ``tokens``."""
        options, loop, task = self._options, asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._stop_answer = partial(loop.call_soon_threadsafe, task.cancel)
        prompt = Prompt(messages=[dict(message) for message in self._messages])
        call = Generate(prompt=prompt, sampling=self._sampling, max_tokens=options.max_tokens, seed=options.seed)
        async for event in RankZero(self._endpoint.connect, float("inf")).generate(call):
            if isinstance(event, Output | Finished):
                tokens[0] = event.completion_tokens
            if not isinstance(event, Output):
                continue
            times.append(time.monotonic())
            if event.reasoning:
                self._console.print(event.reasoning, end="", style="dim", markup=False)
            answer.append(event.content)
            print(event.content, end="", flush=True)

    def _forget(self) -> None:
        system = self._options.system_prompt
        self._messages = [{"role": "system", "content": system}] if system else []

    def _end(self) -> None:
        assert self._endpoint.scheduler is not None  # it is ready
        self._endpoint.scheduler.stop()

    def _show(self, text: str) -> None:
        if self._options.interactive:
            self._console.print(text, style="dim", markup=False)
