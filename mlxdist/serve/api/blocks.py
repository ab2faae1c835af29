"""Answers that are a list of blocks, as Anthropic's API and OpenAI's Responses have them: thoughts, text, calls."""

import json
import uuid
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal

from ..protocol import Event, Finished, Output
from .answers import ApiAnswer

__all__ = ["Block", "BlocksAnswer", "BlockKind"]

BlockKind = Literal["thinking", "text", "call"]


@dataclass
class Block:
    """A part of an answer.

    Attributes:
        number: its place among the blocks.
        id: a name of its own.
        name: of a call, the function.
        parts: its text, as it came; of a call, the arguments.
    """

    kind: BlockKind
    number: int
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:24])
    name: str = ""
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.parts)


class BlocksAnswer(ApiAnswer):
    """An answer of blocks, one after the other; a call comes as a whole.

    Args:
        answer_id: its id.
        created: seconds since 1970.
    """

    def __init__(self, answer_id: str, created: int) -> None:
        super().__init__(answer_id, created)
        self._blocks: list[Block] = []
        self._reasoning_tokens = 0  # up to the last one of thoughts
        self._has_begun = self._is_open = False  # the stream, and its last block

    def add(self, choice: int, event: Event) -> list[dict[str, Any]]:
        self._count(choice, event)
        if not isinstance(event, Output | Finished):
            return []
        if isinstance(event, Output) and not (event.reasoning or event.content or event.tool_calls):
            return []
        chunks = self._beginning()
        if isinstance(event, Finished):
            return chunks + self._close()
        if event.reasoning:
            self._reasoning_tokens = event.completion_tokens
            chunks += self._extend("thinking", event.reasoning)
        if event.content:
            chunks += self._extend("text", event.content)
        for call in event.tool_calls:
            chunks += self._begin(Block("call", len(self._blocks), name=call.name))
            chunks += self._extend("call", call.arguments)
        return chunks

    @staticmethod
    def encode(chunks: list[dict[str, Any]]) -> str:
        return "".join(f"event: {chunk['type']}\ndata: {json.dumps(chunk)}\n\n" for chunk in chunks)

    @property
    def has_called(self) -> bool:
        """Whether the answer has calls of tools."""
        return any(block.kind == "call" for block in self._blocks)

    @abstractmethod
    def _started(self) -> list[dict[str, Any]]:
        """The first chunks of a stream."""

    @abstractmethod
    def _block_begins(self, block: Block) -> list[dict[str, Any]]: ...

    @abstractmethod
    def _block_grows(self, block: Block, text: str) -> list[dict[str, Any]]: ...

    @abstractmethod
    def _block_ends(self, block: Block) -> list[dict[str, Any]]: ...

    def _beginning(self) -> list[dict[str, Any]]:
        """The first chunks, unless a stream has them. Before that a request may still be tried again."""
        if self._has_begun:
            return []
        self._has_begun = True
        return self._started()

    def _extend(self, kind: BlockKind, text: str) -> list[dict[str, Any]]:
        chunks = []
        if not self._is_open or self._blocks[-1].kind != kind:
            chunks = self._begin(Block(kind, len(self._blocks)))
        self._blocks[-1].parts.append(text)
        return chunks + self._block_grows(self._blocks[-1], text)

    def _begin(self, block: Block) -> list[dict[str, Any]]:
        chunks = self._close()
        self._blocks.append(block)
        self._is_open = True
        return chunks + self._block_begins(block)

    def _close(self) -> list[dict[str, Any]]:
        chunks = self._block_ends(self._blocks[-1]) if self._is_open else []
        self._is_open = False
        return chunks
