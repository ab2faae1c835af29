"""Rank 0: makes the events of an answer from its tokens: text, what the model thinks, calls of tools."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from .answer import Answer, Token
from .protocol import Finished, Output, TokenLogprob, ToolCall

__all__ = ["OutputBuilder"]

_Parse = Callable[[str], Awaitable[list[ToolCall] | None]]


class OutputBuilder:
    """Reads the tokens of one answer.

    A call of a tool is handed out once it is complete. What the model has written in the place of a call and is none
    becomes text, with its control sequences: nothing that the model writes is lost.

    Args:
        answer: the answer whose tokens are read.
        section: the section with which the answer begins.
        calls: how calls are written, as in `preparation.Prepared`.
        parses_tools: whether sections of the kind "tool" are calls; else they are text.
        parallel: whether calls after the first one are handed out.
        has_grammar: whether a grammar describes the content: what looks like a control sequence in it is text.
        parse: makes the calls of a text; None if it is no call.
        logprob: makes the log-probabilities of a token; None without them.
        choice: the number of the answer in its call.
    """

    def __init__(
        self,
        answer: Answer,
        section: str,
        calls: str,
        parses_tools: bool,
        parallel: bool,
        parse: _Parse,
        logprob: Callable[[Token], TokenLogprob] | None,
        has_grammar: bool = False,
        choice: int = 0,
    ) -> None:
        self._answer, self._section, self._calls = answer, section, calls
        self._parses_tools, self._parallel, self._parse, self._logprob = parses_tools, parallel, parse, logprob
        self._has_grammar, self._choice = has_grammar, choice
        self._has_content = False  # more than spaces
        self._content = self._reasoning = ""  # of the event that is being made
        self._tool_calls: list[ToolCall] = []
        self._written = self._call = ""  # a call of a tool, with its control sequences and without
        self._whole = ""  # the content, where all of it is a call
        self._space = ""  # between calls, or after the last one: text only if text follows
        self._has_called = False
        self._tokens = 0

    async def read(self, tokens: Sequence[Token]) -> list[Output | Finished]:
        """The events that these tokens make, of which an answer's last ones end with :class:`Finished`."""
        for token in tokens:
            for piece in token.pieces:
                if piece.section is None:
                    self._add(piece.text)
                else:
                    await self._begin(piece.section, piece.text)
        self._tokens += len(tokens)
        reason = tokens[-1].finish_reason
        if reason is not None:
            await self._end(reason)
        events: list[Output | Finished] = []
        logprobs = [self._logprob(token) for token in tokens] if self._logprob else []
        if self._content or self._reasoning or self._tool_calls or logprobs:
            events.append(
                Output(
                    choice=self._choice,
                    content=self._content,
                    reasoning=self._reasoning,
                    tool_calls=self._tool_calls,
                    tokens=logprobs,
                    completion_tokens=self._tokens,
                )
            )
        self._content, self._reasoning, self._tool_calls = "", "", []
        if reason is not None:
            events.append(self._finished(reason, tokens[-1].token))
        return events

    def _add(self, text: str) -> None:
        """Adds plain text to the current section."""
        if self._section == "reasoning":
            self._reasoning += text
        elif self._section == "tool" and self._parses_tools:
            self._written += text
            self._call += text
        elif self._section in ("normal", "tool"):
            self._add_content(text)

    def _add_content(self, text: str) -> None:
        self._has_content = self._has_content or bool(text.strip())
        if self._calls != "text":
            self._whole += text
        elif self._has_called and not (self._space + text).strip():
            self._space += text
        else:
            self._content += self._space + text
            self._space = ""

    async def _begin(self, section: str, marker: str) -> None:
        """Reads a control sequence, with which another section begins."""
        if self._has_grammar and self._has_content:  # thoughts and calls come before that
            self._add(marker)
            return
        if self._section == "tool":
            if self._parses_tools:
                self._written += marker
                await self._end_call()
            else:
                self._add_content(marker)
        self._section = section
        if section == "tool":
            if self._parses_tools:
                self._written, self._call = marker, ""
            else:
                self._add_content(marker)

    async def _end_call(self) -> None:
        calls = await self._parse(self._call) if self._call.strip() else None
        if calls:
            kept = calls if self._parallel else calls[: 0 if self._has_called else 1]
            self._tool_calls += kept
            self._has_called = True
        else:
            self._add_content(self._written)
        self._written = self._call = ""

    async def _end(self, reason: str) -> None:
        """Reads the end of the answer."""
        is_whole = reason == "stop" and (self._answer.stop_word is None or self._answer.stops_at_control_sequence)
        if self._written and is_whole:  # its last control sequence may be the end of the answer
            await self._end_call()
        if self._written:
            self._add_content(self._written)
            self._written = ""
        if self._whole:
            calls = await self._parse(self._whole) if is_whole else None
            self._tool_calls += calls or []
            self._has_called = bool(calls)
            self._content += "" if calls else self._whole

    def _finished(self, reason: str, token: int) -> Finished:
        word = self._answer.stop_word
        has_called = self._has_called and self._calls != "arguments"  # OpenAI says "stop" where the request names it
        ended: Any = "tool_calls" if reason == "stop" and has_called else reason
        return Finished(
            choice=self._choice,
            finish_reason=ended,
            completion_tokens=self._tokens,
            stop_reason=word if word is not None else token if token in self._answer.stop_tokens else None,
        )
