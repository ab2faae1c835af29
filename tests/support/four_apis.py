"""One chat, asked by each API of a server with the client of the vendor of that API; the answers have one form."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from serving import ServerProcess

TEXT, CHAT, MESSAGES, RESPONSES = APIS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
# The fields of a chat that each of the two younger APIs has no place for.
LACKS = {
    MESSAGES: {"logit_bias", "seed", "temperature", "structured_outputs"},
    RESPONSES: {"logit_bias", "seed", "temperature", "structured_outputs", "stop"},
}
_REASONS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}

# Text, calls of tools, why it ends, and how many tokens it has.
Answer = tuple[str, list[tuple[str, Any]], str | None, int]


def as_messages(chat: dict[str, Any]) -> dict[str, Any]:
    """The body for /v1/messages."""
    system = "".join(each["content"] for each in chat["messages"] if each["role"] == "system")
    body = {"model": chat.get("model", "default_model"), "max_tokens": chat["max_tokens"]}
    body |= {"system": system} if system else {}
    body["messages"] = [each for each in chat["messages"] if each["role"] != "system"]
    if "stop" in chat:
        body["stop_sequences"] = chat["stop"]
    if "tools" in chat:
        functions = [tool["function"] for tool in chat["tools"]]
        named = ("name", "description")
        body["tools"] = [{n: each[n] for n in named} | {"input_schema": each["parameters"]} for each in functions]
        choice = chat["tool_choice"]
        named = {"type": "tool", "name": choice["function"]["name"]} if isinstance(choice, dict) else {}
        body["tool_choice"] = named or {"type": "any" if choice == "required" else choice}
    if "response_format" in chat:
        schema = chat["response_format"]["json_schema"]["schema"]
        body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
    return body


def as_response(chat: dict[str, Any]) -> dict[str, Any]:
    """The body for /v1/responses."""
    system = "".join(each["content"] for each in chat["messages"] if each["role"] == "system")
    body = {"model": chat.get("model", "default_model"), "max_output_tokens": chat["max_tokens"]}
    body |= {"instructions": system} if system else {}
    body["input"] = [each for each in chat["messages"] if each["role"] != "system"]
    if "tools" in chat:
        body["tools"] = [{"type": "function"} | tool["function"] for tool in chat["tools"]]
        choice = chat["tool_choice"]
        body["tool_choice"] = {"type": "function"} | choice["function"] if isinstance(choice, dict) else choice
    if "response_format" in chat:
        body["text"] = {"format": {"type": "json_schema"} | chat["response_format"]["json_schema"]}
    return body


BODIES = {TEXT: dict, CHAT: dict, MESSAGES: as_messages, RESPONSES: as_response}


class Clients:
    """The clients of a server. `anthropic` and `openai` join the events of the APIs that they have made."""

    def __init__(self, server: ServerProcess) -> None:
        import anthropic
        import openai

        self.server = server
        settings: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 300}
        settings["default_headers"] = {"Connection": "close"}  # a kept one is a thread of the server
        self.anthropic = anthropic.Anthropic(base_url=server.address, **settings)
        self.openai = openai.OpenAI(base_url=server.address + "/v1", **settings)

    def ask(self, api: str, body: dict[str, Any], streams: bool) -> Answer:
        """The answer to a chat, or with ``api`` TEXT to a completion."""
        if api == MESSAGES:
            return self._message(as_messages(body), streams)
        if api == RESPONSES:
            return self._response(as_response(body), streams)
        if not streams:
            return content(api, [self.server.ask(body, api, 300)])
        *parts, done = self.server.stream(body | {"stream_options": {"include_usage": True}}, api)
        assert done == "[DONE]", parts[-1:]
        return content(api, list(map(json.loads, parts)))

    def _message(self, body: dict[str, Any], streams: bool) -> Answer:
        if streams:
            with self.anthropic.messages.stream(**body) as events:
                made = events.get_final_message()
        else:
            made = self.anthropic.messages.create(**body)
        text = "".join(block.text for block in made.content if block.type == "text")
        calls = [(block.name, block.input) for block in made.content if block.type == "tool_use"]
        return text, calls, _REASONS[made.stop_reason], made.usage.output_tokens

    def _response(self, body: dict[str, Any], streams: bool) -> Answer:
        if streams:
            ends = ("response.completed", "response.incomplete")
            with self.openai.responses.create(**body, stream=True) as events:
                (made,) = [event.response for event in events if event.type in ends]
        else:
            made = self.openai.responses.create(**body)
        calls = [(item.name, json.loads(item.arguments)) for item in made.output if item.type == "function_call"]
        reason = "length" if made.status == "incomplete" else "tool_calls" if calls else "stop"
        return made.output_text, calls, reason, made.usage.output_tokens

    def close(self) -> None:
        self.anthropic.close()
        self.openai.close()


@contextlib.contextmanager
def clients_of(server: ServerProcess) -> Iterator[Clients]:
    """The clients, which are closed at the end."""
    with contextlib.closing(Clients(server)) as clients:
        yield clients


def content(api: str, parts: list[dict[str, Any]]) -> Answer:
    """The content of an answer of OpenAI's older APIs: of one part if it is whole, else of the parts of its stream."""
    text, calls, reason = "", [], None
    for part in parts:
        for choice in part["choices"]:
            said = choice.get("message") or choice.get("delta") or {}
            text += (choice["text"] if api == TEXT else said.get("content")) or ""
            functions = [call["function"] for call in said.get("tool_calls") or []]
            calls += [(each["name"], json.loads(each["arguments"])) for each in functions]
            reason = choice["finish_reason"] or reason
    used = next(part["usage"]["completion_tokens"] for part in reversed(parts) if part.get("usage"))
    # OpenAI's chats say "stop" after a call that the request demanded by name.
    return text, calls, "tool_calls" if calls and reason == "stop" else reason, used
