"""Calls of tools: those that a request asks for, and those that a model has written, as OpenAI's API has them."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlxdist.base.json_reader import parse_json

from .prepared import CallFormat
from .protocol import ToolCall
from .refusal import Refusal

__all__ = ["arguments_of", "call_format", "parse_calls"]

Parser = Callable[[str, Any], Any]


def call_format(tool_choice: str, tools: Sequence[Mapping[str, Any]]) -> CallFormat:
    """How an answer writes calls. Raises Refusal: ``tool_choice`` needs a tool that the request does not have."""
    if tool_choice in ("none", "auto"):
        return "text"
    if tool_choice == "required":
        if not tools:
            raise Refusal("tool_choice is required, and the request has no tools", param="tool_choice")
        return "list"
    if tool_choice not in [tool["function"]["name"] for tool in tools]:
        raise Refusal(
            f"tool_choice names the function {tool_choice!r:.80}, which tools does not have", param="tool_choice"
        )
    return "arguments"


def parse_calls(
    text: str, how: CallFormat, name: str, tools: list[dict[str, Any]], parser: Parser | None
) -> list[ToolCall] | None:
    """The calls that a model has written; None if it has written none, or wrongly.

    A name that no tool has is a call all the same, as in OpenAI's API: the client answers it.

    Args:
        text: the content of the answer, or of a section of kind "tool" without its markers.
        name: the function whose arguments ``text`` is, where ``how`` is "arguments".
        parser: that of mlx-lm for the model; None if it has none.
    """
    try:
        if how == "arguments":
            return [_call(name, parse_json(text, repeated=True))]
        if how == "list":
            return [_call(each["name"], each["parameters"]) for each in parse_json(text, repeated=True)] or None
        if parser is None:
            return None
        written = parser(text, tools)
        calls = written if isinstance(written, list) else [written]
        found = [_call(each["name"], _arguments(each)) for each in calls]
        return None if any(_is_unread(call, tools) for call in found) else found or None
    except Exception:  # mlx-lm's parsers raise what they like, and RecursionError
        return None


def arguments_of(text: str) -> Any:
    """The value of ``arguments`` in the history of a chat. Raises ValueError: it is no JSON."""
    return parse_json(text, repeated=True) if text.strip() else {}


def _arguments(call: Mapping[str, Any]) -> Any:
    """The arguments of a call. Some models write them as JSON in a string, some call them parameters."""
    found = call.get("arguments", call.get("parameters"))
    if isinstance(found, str):
        return arguments_of(found)
    return {} if found is None else found


def _is_unread(call: ToolCall, tools: list[dict[str, Any]]) -> bool:
    """Whether a call stands for text that is none: mlx-lm's parser for GLM returns {"raw": text} then."""
    functions = [tool["function"] for tool in tools if tool["function"]["name"] == call.name]
    known = any("raw" in ((function.get("parameters") or {}).get("properties") or {}) for function in functions)
    return not known and list(parse_json(call.arguments)) == ["raw"]


def _call(name: Any, arguments: Any) -> ToolCall:
    """A call. Raises TypeError, ValueError: it has no name, or its arguments are no object of JSON."""
    if not isinstance(arguments, dict):
        raise TypeError(f"arguments are {type(arguments).__name__}")
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    written.encode()  # a ValueError for half a surrogate pair
    if not isinstance(name, str) or not name or not name.isprintable():
        raise ValueError("a call has no name")
    return ToolCall(name=name, arguments=written)
