"""Messages and tools of a chat."""

import json
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, FailFast, Field, WrapValidator, model_validator

from ..refusal import Refusal
from .fields import Checked, Fields, Only, Unused

__all__ = ["MAX_NAME", "Message", "Name", "Tool", "as_given", "assistant_message", "for_template"]

_RESERVED = ("none", "auto", "required")  # values of tool_choice
MAX_NAME = 256
_MAX_CALLS = 256  # of a message


def _content(value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError('must be a string, or a list of {"type": "text", "text": "..."}')
    return "".join(_text(index, part) for index, part in enumerate(value))


def _text(index: int, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "refusal") and isinstance(kind, str):
        raise ValueError(f"has a part, {index}, of the type {kind[:64]!r}: images, audio and files are not served here")
    text = part.get(kind) if isinstance(kind, str) else None
    if not isinstance(text, str):
        raise ValueError(f'has a part, {index}, that is not {{"type": "text", "text": "..."}}')
    return text


def _arguments(value: Any) -> str:
    """The arguments of an earlier call as a text, which may be no JSON: a model that was cut off leaves that."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise ValueError("must be a string with a JSON object")
    return json.dumps(value, ensure_ascii=False)


def _name(value: Any) -> str:
    if not (isinstance(value, str) and 0 < len(value) <= MAX_NAME):
        raise ValueError(f"must be a string of 1 to {MAX_NAME} characters")
    if value in _RESERVED:
        raise ValueError(f"must not be {value}, which is a value of tool_choice")
    return value


Name = Annotated[str, Checked(_name)]


class _CalledFunction(Fields):
    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    arguments: Annotated[str, Checked(_arguments)] = "{}"
    parsed_arguments: Annotated[Any, Unused()] = None  # the same once more, by the parse helper of OpenAI's client


class _ToolCall(Fields):
    model_config = ConfigDict(extra="allow")

    id: str | None = None
    type: Literal["function"] = "function"
    function: _CalledFunction


class Message(Fields):
    """A message of a chat. Templates get what else it has."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, Checked(_content)] = None
    name: str | None = None
    tool_calls: Annotated[list[_ToolCall], FailFast(), Field(max_length=_MAX_CALLS)] = []
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    parsed: Annotated[Any, Unused()] = None  # the content once more, by that helper
    audio: Annotated[Any, Only()] = None
    function_call: Annotated[Any, Only(hint="tool_calls replaces it")] = None

    @model_validator(mode="after")
    def _is_whole(self) -> "Message":
        if self.content is None and self.role in ("system", "developer", "user"):
            raise ValueError("has no content, a string")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"has the role {self.role} and tool_calls, which only an assistant's message has")
        return self


class _Function(Fields):
    model_config = ConfigDict(extra="allow")

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(Fields):
    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: _Function


def as_given(value: Any, check: Any) -> Any:
    """The value itself, once it is checked: the body of a WrapValidator."""
    check(value)
    return value  # templates write it into the prompt, in the order of its fields


Tool = Annotated[_Tool, WrapValidator(as_given)]


def for_template(message: Message) -> dict[str, Any]:
    """A message as templates read it: its content is text or None, and reasoning has both of its names."""
    extra = message.model_extra or {}
    made = {"role": message.role, "content": message.content} | extra
    if message.content is None and message.refusal is not None:
        made["content"] = message.refusal
    reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
    if reasoning is not None:
        made |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if message.tool_calls:
        made["tool_calls"] = [call.model_dump(exclude_none=True) for call in message.tool_calls]
    named = {"name": message.name, "tool_call_id": message.tool_call_id}
    return made | {name: value for name, value in named.items() if value is not None}


def assistant_message(text: str, thoughts: str, calls: list[dict[str, Any]], param: str) -> Message:
    """A message of the model, whose parts other APIs have one by one.

    Args:
        text: its content.
        thoughts: its reasoning.
        calls: as in `tool_calls`.
        param: the field of the request that has its parts.

    Raises:
        Refusal: there are too many calls.
    """
    if len(calls) > _MAX_CALLS:
        raise Refusal(
            f"{param} has a turn of the model with {len(calls)} calls; at most {_MAX_CALLS} are served", param=param
        )
    fields: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
    fields |= {"tool_calls": calls} if calls else {}
    return Message.model_validate(fields | ({"reasoning": thoughts} if thoughts else {}))
