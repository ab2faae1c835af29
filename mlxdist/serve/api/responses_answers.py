"""Answers of /v1/responses, whole or as the events of a stream."""

from collections.abc import Callable
from typing import Any

from ..protocol import Event, Finished
from ..refusal import Refusal
from .blocks import Block, BlocksAnswer

__all__ = ["ResponsesAnswer"]

_PREFIXES = {"thinking": "rs", "text": "msg", "call": "fc"}
_PARTS = {"thinking": "reasoning_text", "text": "output_text"}


class ResponsesAnswer(BlocksAnswer):
    """An answer of /v1/responses.

    Args:
        answer_id: its id.
        created: seconds since 1970.
        echo: the fields that are the request's.
        keep: gets the output at the end.
    """

    def __init__(
        self, answer_id: str, created: int, echo: dict[str, Any], keep: Callable[[list[dict[str, Any]]], None]
    ) -> None:
        super().__init__(answer_id, created)
        self._echo, self._keep = echo, keep
        self._events = 0

    def add(self, choice: int, event: Event) -> list[dict[str, Any]]:
        chunks = super().add(choice, event)
        if isinstance(event, Finished):
            self._keep(self._output())
        return chunks

    def last(self) -> list[dict[str, Any]]:
        return [self._event(f"response.{self._status}", response=self.whole())]

    def whole(self) -> dict[str, Any]:
        is_cut = self._status == "incomplete"
        more = {"output": self._output(), "usage": self._usage()}
        return self._response(
            self._status, incomplete_details={"reason": "max_output_tokens"} if is_cut else None, **more
        )

    def failed(self, refusal: Refusal) -> list[dict[str, Any]]:
        code = "rate_limit_exceeded" if refusal.status == 429 else "server_error"
        error = {"code": code, "message": str(refusal)}
        output = [self._item(block, "incomplete") for block in self._blocks]
        response = self._response("failed", error=error, output=output)
        return [*self._beginning(), self._event("response.failed", response=response)]

    @property
    def _status(self) -> str:
        (choice,) = self._choices
        return "incomplete" if choice.finish_reason == "length" else "completed"

    def _started(self) -> list[dict[str, Any]]:
        response = self._response("in_progress")
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def _block_begins(self, block: Block) -> list[dict[str, Any]]:
        item = self._item(block, "in_progress")
        added = self._event("response.output_item.added", output_index=block.number, item=item)
        if block.kind == "call":
            return [added]
        return [added, self._of("response.content_part.added", block, content_index=0, part=_part(block))]

    def _block_grows(self, block: Block, text: str) -> list[dict[str, Any]]:
        return [self._of(f"{_text_event(block)}.delta", block, **_text_fields(block), delta=text)]

    def _block_ends(self, block: Block) -> list[dict[str, Any]]:
        name = "arguments" if block.kind == "call" else "text"
        ended = [self._of(f"{_text_event(block)}.done", block, **_text_fields(block), **{name: block.text})]
        if block.kind != "call":
            ended.append(self._of("response.content_part.done", block, content_index=0, part=_part(block)))
        item = self._item(block, self._status)
        return [*ended, self._event("response.output_item.done", output_index=block.number, item=item)]

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1, **fields}

    def _of(self, kind: str, block: Block, **fields: Any) -> dict[str, Any]:
        """An event of a block."""
        return self._event(kind, item_id=_id(block), output_index=block.number, **fields)

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "usage": None,
            **self._echo,
            **fields,
        }

    def _output(self) -> list[dict[str, Any]]:
        """The items of the whole answer. Its last one may be cut off."""
        last = len(self._blocks) - 1
        return [self._item(block, self._status if block.number == last else "completed") for block in self._blocks]

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        """An item. In progress it has none of its text, which comes in deltas."""
        has_begun = status == "in_progress"
        if block.kind == "call":
            arguments = "" if has_begun else block.text
            named = {"type": "function_call", "call_id": f"call_{block.id}", "name": block.name, "arguments": arguments}
            return {"id": _id(block), "status": status, **named}
        content = [] if has_begun else [_part(block)]
        if block.kind == "thinking":
            return {"id": _id(block), "type": "reasoning", "status": status, "summary": [], "content": content}
        return {"id": _id(block), "type": "message", "status": status, "role": "assistant", "content": content}

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


def _id(block: Block) -> str:
    return f"{_PREFIXES[block.kind]}_{block.id}"


def _part(block: Block) -> dict[str, Any]:
    """The text of a block so far, as the one part of its item."""
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if block.kind == "text" else {}
    return {"type": _PARTS[block.kind], "text": block.text, **more}


def _text_event(block: Block) -> str:
    return "response.function_call_arguments" if block.kind == "call" else f"response.{_PARTS[block.kind]}"


def _text_fields(block: Block) -> dict[str, Any]:
    if block.kind == "call":
        return {}
    return {"content_index": 0} | ({"logprobs": []} if block.kind == "text" else {})
