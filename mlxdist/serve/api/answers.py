"""Answers of chats and completions, whole or in chunks, made of the events of rank 0; and what all APIs' have."""

import codecs
import json
import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from ..protocol import Admitted, Event, Finished, Output, TokenLogprob, ToolCall
from ..refusal import Refusal

__all__ = ["ApiAnswer", "ChatAnswer", "CompletionAnswer"]


@dataclass
class Choice:
    """The state of a choice: its text so far, and the parts that no chunk has had."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    echo: str = ""  # the prompt, as long as no chunk has it
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[Any] = field(default_factory=list)  # as the answer has them
    unsent: list[Any] = field(default_factory=list)  # tokens that no chunk has had
    begun: bool = False  # a chunk has been made
    wants_tokens: bool = False
    decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    offset: int = 0  # characters of tokens


class ApiAnswer(ABC):
    """The answer to a request of any API: of choices that rank 0 makes one by one.

    Args:
        answer_id: its id.
        created: seconds since 1970.
        n: the choices of each prompt.
        prompts: the number of prompts.

    Attributes:
        stream_end: the text after the last event of a stream that has not failed.
    """

    stream_end = ""

    def __init__(self, answer_id: str, created: int, n: int = 1, prompts: int = 1) -> None:
        self._id, self._created, self._n = answer_id, created, n
        self._model = ""
        self._choices = [Choice() for _ in range(n * prompts)]

    @abstractmethod
    def add(self, choice: int, event: Event) -> list[dict[str, Any]]:
        """Adds an event of a choice. Returns the chunks of a stream that it makes."""

    @abstractmethod
    def last(self) -> list[dict[str, Any]]:
        """The chunks of a stream after all choices have finished."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The answer as one object, after all choices have finished."""

    def failed(self, refusal: Refusal) -> list[dict[str, Any]]:
        """The last chunks of a stream that fails."""
        return [refusal.error]

    @staticmethod
    def encode(chunks: list[dict[str, Any]]) -> str:
        """The chunks as server-sent events."""
        return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)

    @property
    def prompt_tokens(self) -> int:
        """The tokens of all prompts that have a place in the batch: of each once, whatever its choices."""
        return sum(max(choice.prompt_tokens for choice in group) for group in self._groups())

    @property
    def cached_tokens(self) -> int:
        """The number of the prompts' tokens that the prefix cache had."""
        # Choices after the first may find their prompt in the cache because the first has put it there.
        return sum(min(choice.cached_tokens for choice in group) for group in self._groups())

    @property
    def completion_tokens(self) -> int:
        """The tokens of the choices so far."""
        return sum(choice.completion_tokens for choice in self._choices)

    @property
    def finish_reasons(self) -> list[str]:
        """Why choices have finished."""
        return [choice.finish_reason for choice in self._choices if choice.finish_reason is not None]

    def _count(self, choice: int, event: Event) -> Choice:
        """Notes what an event says beside its text. Returns its choice."""
        to = self._choices[choice]
        if isinstance(event, Admitted):
            self._model = event.model
            to.prompt_tokens, to.cached_tokens = event.prompt_tokens, event.cached_tokens
        elif isinstance(event, Output | Finished):
            to.completion_tokens = event.completion_tokens
        if isinstance(event, Finished):
            to.finish_reason, to.stop_reason = event.finish_reason, event.stop_reason
        return to

    def _groups(self) -> list[list[Choice]]:
        """The choices of each prompt."""
        return [self._choices[at : at + self._n] for at in range(0, len(self._choices), self._n)]


class _ChoicesAnswer(ApiAnswer):
    """An answer of chats or completions.

    Args:
        answer_id, created, n, prompts: as of :class:`ApiAnswer`.
        include_usage: whether a stream ends with the usage.
        usage_in_chunks: whether each chunk has that of its choice so far, as in vLLM.

    Attributes:
        kind, chunk_kind: OpenAI's types of the answer and of its chunks.
    """

    kind: str
    chunk_kind: str
    stream_end = "data: [DONE]\n\n"

    def __init__(
        self, answer_id: str, created: int, n: int, prompts: int, include_usage: bool, usage_in_chunks: bool
    ) -> None:
        super().__init__(answer_id, created, n, prompts)
        self._include_usage, self._usage_in_chunks = include_usage, include_usage and usage_in_chunks

    def add(self, choice: int, event: Event) -> list[dict[str, Any]]:
        to = self._count(choice, event)
        if isinstance(event, Admitted):
            to.echo = event.prompt_text or ""
        elif isinstance(event, Output):
            made = [self._token(to, token) for token in event.tokens]
            to.tokens += made
            to.unsent += made
            if event.content or event.reasoning or event.tool_calls:
                return [self._chunk(choice, self._add(to, event))]
        elif isinstance(event, Finished):
            return [self._chunk(choice, self._add(to, Output()))]
        return []

    def last(self) -> list[dict[str, Any]]:
        return [self._head(self.chunk_kind) | {"choices": [], "usage": self._usage()}] if self._include_usage else []

    def whole(self) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                **self._body(choice),
                "logprobs": self._logprobs(choice.tokens),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for index, choice in enumerate(self._choices)
        ]
        return self._head(self.kind) | {"choices": choices, "usage": self._usage()}

    @abstractmethod
    def _add(self, choice: Choice, output: Output) -> dict[str, Any]:
        """Adds a part of the answer. Returns what the chunk has of it."""

    @abstractmethod
    def _body(self, choice: Choice) -> dict[str, Any]:
        """The fields of a choice in the whole answer."""

    @abstractmethod
    def _token(self, choice: Choice, token: TokenLogprob) -> Any:
        """A token as :meth:`_logprobs` takes it."""

    @abstractmethod
    def _logprobs(self, tokens: list[Any]) -> dict[str, Any] | None:
        """The logprobs of tokens; None without any."""

    def _chunk(self, index: int, part: dict[str, Any]) -> dict[str, Any]:
        choice = self._choices[index]
        logprobs = self._logprobs(choice.unsent)
        choice.unsent = []
        choice.begun = True
        made = {"index": index, **part, "logprobs": logprobs, "finish_reason": choice.finish_reason}
        if choice.finish_reason is not None:
            made["stop_reason"] = choice.stop_reason
        now = _usage(choice.prompt_tokens, choice.completion_tokens, choice.cached_tokens)
        usage = {"usage": now if self._usage_in_chunks else None} if self._include_usage else {}
        return self._head(self.chunk_kind) | {"choices": [made]} | usage

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _usage(self) -> dict[str, Any]:
        return _usage(self.prompt_tokens, self.completion_tokens, self.cached_tokens)


class ChatAnswer(_ChoicesAnswer):
    """An answer of /v1/chat/completions."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def _add(self, choice: Choice, output: Output) -> dict[str, Any]:
        delta: dict[str, Any] = {} if choice.begun else {"role": "assistant", "content": ""}
        if output.content:
            choice.text.append(output.content)
            delta["content"] = output.content
        if output.reasoning:
            choice.reasoning.append(output.reasoning)
            delta["reasoning"] = output.reasoning  # mlx-lm's name, and now vLLM's
        if output.tool_calls:
            first = len(choice.tool_calls)
            calls = [_called(call) for call in output.tool_calls]
            choice.tool_calls += calls
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls, first)]
        return {"delta": delta}

    def _body(self, choice: Choice) -> dict[str, Any]:
        text: str | None = "".join(choice.text)
        message = {"role": "assistant", "content": text or (None if choice.tool_calls else ""), "refusal": None}
        if choice.reasoning:
            message["reasoning"] = "".join(choice.reasoning)
        calls = {"tool_calls": choice.tool_calls} if choice.tool_calls else {}
        return {"message": message | calls}

    def _token(self, choice: Choice, token: TokenLogprob) -> Any:
        return _logprob(token) | {"top_logprobs": [_logprob(each) for each in token.top]}

    def _logprobs(self, tokens: list[Any]) -> dict[str, Any] | None:
        return {"content": tokens, "refusal": None} if tokens else None


class CompletionAnswer(_ChoicesAnswer):
    """An answer of /v1/completions."""

    kind, chunk_kind = "text_completion", "text_completion"

    def _add(self, choice: Choice, output: Output) -> dict[str, Any]:
        # Text is text here: no parts of it are anything else.
        text = choice.echo + output.reasoning + output.content
        choice.echo = ""
        choice.text.append(text)
        return {"text": text}

    def _body(self, choice: Choice) -> dict[str, Any]:
        return {"text": "".join(choice.text)}

    def _token(self, choice: Choice, token: TokenLogprob) -> Any:
        offset = choice.offset
        choice.offset += len(choice.decoder.decode(bytes(token.bytes)))
        if token.logprob is None:  # the first one of a prompt
            return token, offset, None
        tops = {each.text: each.logprob for each in reversed(token.top)}  # of equal texts, the most likely one
        return token, offset, tops | {token.text: tops.get(token.text, token.logprob)}

    def _logprobs(self, tokens: list[Any]) -> dict[str, Any] | None:
        if not tokens:
            return None
        return {
            "tokens": [token.text for token, _, _ in tokens],
            "token_ids": [token.id for token, _, _ in tokens],
            "token_logprobs": [token.logprob for token, _, _ in tokens],
            "top_logprobs": [tops for _, _, tops in tokens],
            "text_offset": [offset for _, offset, _ in tokens],
        }


def _usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def _called(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    return {"id": token.id, "token": token.text, "bytes": token.bytes, "logprob": token.logprob}
