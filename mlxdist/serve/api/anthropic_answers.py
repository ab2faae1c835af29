"""Answers of Anthropic's API, whole or as the events of a stream."""

from typing import Any

from mlxdist.base.json_reader import parse_json

from ..refusal import Refusal
from .blocks import Block, BlocksAnswer

__all__ = ["MessagesAnswer"]


class MessagesAnswer(BlocksAnswer):
    """An answer of /v1/messages. Thoughts have no signature: nothing checks one here."""

    def last(self) -> list[dict[str, Any]]:
        stop = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        return [{"type": "message_delta", "delta": stop, "usage": self._usage()}, {"type": "message_stop"}]

    def whole(self) -> dict[str, Any]:
        content = [_content(block, block.text) for block in self._blocks]
        stop = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        return self._message(content) | stop

    def failed(self, refusal: Refusal) -> list[dict[str, Any]]:
        return [refusal.anthropic_error]

    @property
    def _stop_sequence(self) -> str | None:
        (choice,) = self._choices
        is_word = isinstance(choice.stop_reason, str) and not self.has_called
        return str(choice.stop_reason) if is_word else None

    @property
    def _stop_reason(self) -> str:
        (choice,) = self._choices
        if choice.finish_reason == "length":
            return "max_tokens"
        if self.has_called:
            return "tool_use"
        return "end_turn" if self._stop_sequence is None else "stop_sequence"

    def _started(self) -> list[dict[str, Any]]:
        message = self._message([]) | {"stop_reason": None, "stop_sequence": None}
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def _block_begins(self, block: Block) -> list[dict[str, Any]]:
        return [{"type": "content_block_start", "index": block.number, "content_block": _content(block, "")}]

    def _block_grows(self, block: Block, text: str) -> list[dict[str, Any]]:
        deltas = {
            "thinking": {"type": "thinking_delta", "thinking": text},
            "text": {"type": "text_delta", "text": text},
            "call": {"type": "input_json_delta", "partial_json": text},
        }
        return [{"type": "content_block_delta", "index": block.number, "delta": deltas[block.kind]}]

    def _block_ends(self, block: Block) -> list[dict[str, Any]]:
        return [{"type": "content_block_stop", "index": block.number}]

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": f"msg_{self._id}", "type": "message", "role": "assistant", "model": self._model}
        return head | {"content": content, "usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        return {
            "input_tokens": self.prompt_tokens - self.cached_tokens,  # Anthropic's: those that are computed
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.cached_tokens,
            "output_tokens": self.completion_tokens,
        }


def _content(block: Block, text: str) -> dict[str, Any]:
    """A block of a message with this text; with none, as its stream begins."""
    if block.kind == "thinking":
        return {"type": "thinking", "thinking": text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": text}
    arguments = parse_json(text, repeated=True) if text else {}
    return {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.name, "input": arguments}
