"""/v1/responses, OpenAI's API of items: its request, as a chat of rank 0."""

import contextlib
import secrets
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, FailFast, Field, WrapValidator, model_validator

from ..protocol import Generate, Grammar, Prompt, Sampling
from ..refusal import Refusal
from .answers import ApiAnswer
from .chat import MAX_MESSAGES, MAX_TOOLS, Effort, check_tool_choice, effort_arguments
from .fields import Checked, Fields, OneOf, Only, Unused, check, list_or_text
from .generation import MaxTokens, Temperature, TopP, object_of
from .messages import MAX_NAME, Message, Name, as_given, assistant_message, for_template
from .response_store import ResponseStore
from .responses_answers import ResponsesAnswer
from .structured import response_format

__all__ = ["MAX_ITEMS", "ResponsesRequest", "ResponsesTurn"]

MAX_ITEMS = 4 * MAX_MESSAGES  # a message of a model has several: thoughts, text and calls
_MAX_PARTS = 4096  # of an item
_NO_MEDIA = "; images and files are not served here"


class _Item(Fields):
    model_config = ConfigDict(extra="allow")  # id, status, annotations and others change no answer


class _Text(_Item):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


class _Refusal(_Item):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


_Parts = Annotated[
    list[Annotated[_Text | _Refusal, OneOf(hint=_NO_MEDIA)]],
    FailFast(),
    Field(max_length=_MAX_PARTS),
    list_or_text("parts", lambda text: {"type": "input_text", "text": text}),
]


class _MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Parts


class _Call(_Item):
    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    arguments: str


class _CallOutput(_Item):
    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: _Parts


class _Thoughts(_Item):
    type: Literal["reasoning"]
    content: _Parts = []


class _FunctionTool(_Item):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _WebSearch(_Item):
    """A tool that a model need not use: it is left out."""

    type: Literal["web_search", "web_search_preview"]


_Tool = Annotated[
    _FunctionTool | _WebSearch, OneOf(hint="; the server runs no tools"), WrapValidator(as_given)
]  # given back in answers


def _tool_choice(value: Any) -> str:
    """ "none", "auto", "required", or the name of a function."""
    if value in ("none", "auto", "required"):
        return value
    name = value.get("name") if isinstance(value, dict) and value.get("type") == "function" else None
    if not (isinstance(name, str) and name):
        raise ValueError('must be none, auto, required or {"type": "function", "name": "..."}')
    return name


def _grammar(value: Any) -> Grammar | None:
    kind = object_of(value).get("type")
    if kind == "json_schema" and not isinstance(value.get("schema"), dict):
        raise ValueError("must have schema, an object")
    return response_format({"type": kind, "json_schema": value})


def _format(value: Any) -> dict[str, Any]:
    _grammar(value)
    return value


def _metadata(value: Any) -> dict[str, str]:
    if not all(isinstance(text, str) for text in object_of(value).values()):
        raise ValueError("must be an object of strings")
    return value


class _TextOptions(Fields):
    format: Annotated[dict[str, Any], Checked(_format)] = {"type": "text"}
    verbosity: Annotated[Any, Unused()] = None


class _Reasoning(Fields):
    effort: Effort | None = None
    summary: Annotated[Any, Unused()] = None
    generate_summary: Annotated[Any, Unused()] = None
    context: Annotated[Any, Unused()] = None
    mode: Annotated[Any, Unused()] = None


class ResponsesRequest(Fields):
    """A request of /v1/responses."""

    model: str | None = None
    input: Annotated[
        list[Annotated[_MessageItem | _Call | _CallOutput | _Thoughts, OneOf(default="message", hint=_NO_MEDIA)]],
        FailFast(),
        Field(min_length=1, max_length=MAX_ITEMS),
        list_or_text("items", lambda text: {"role": "user", "content": text}),
    ]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    tools: Annotated[list[_Tool], FailFast(), Field(max_length=MAX_TOOLS)] = []
    tool_choice: Annotated[str, Checked(_tool_choice)] = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: MaxTokens = None
    temperature: Temperature = None
    top_p: TopP = None
    text: _TextOptions = _TextOptions()
    reasoning: _Reasoning = _Reasoning()
    stream: bool = False
    metadata: Annotated[dict[str, str], Checked(_metadata)] = {}
    # They change no answer: who asks, what is kept where, how fast it comes, limits of tools that the server would run.
    client_metadata: Annotated[Any, Unused()] = None
    include: Annotated[Any, Unused()] = None
    max_tool_calls: Annotated[Any, Unused()] = None
    prompt_cache_key: Annotated[Any, Unused()] = None
    prompt_cache_options: Annotated[Any, Unused()] = None
    prompt_cache_retention: Annotated[Any, Unused()] = None
    safety_identifier: Annotated[Any, Unused()] = None
    service_tier: Annotated[Any, Unused()] = None
    stream_options: Annotated[Any, Unused()] = None
    user: Annotated[Any, Unused()] = None
    access_programs: Annotated[Any, Only()] = None
    background: Annotated[Any, Only((False,))] = None
    background_options: Annotated[Any, Only()] = None
    context_management: Annotated[Any, Only(([],))] = None
    conversation: Annotated[Any, Only((), "previous_response_id replaces it")] = None
    image: Annotated[Any, Only()] = None
    moderation: Annotated[Any, Only()] = None
    prompt: Annotated[Any, Only()] = None
    top_logprobs: Annotated[Any, Only((0,), "/v1/chat/completions has logprobs")] = None
    truncation: Annotated[Any, Only(("disabled",))] = None

    @model_validator(mode="after")
    def _has_tools(self) -> "ResponsesRequest":
        check_tool_choice(self.tool_choice, [tool["function"]["name"] for tool in self.functions()])
        return self

    def functions(self) -> list[dict[str, Any]]:
        """The tools as chats have them."""
        given: Any = self.tools  # as they were given
        functions = [tool for tool in given if tool["type"] == "function"]
        names = ("name", "description", "parameters")
        made = [{name: tool[name] for name in names if tool.get(name) is not None} for tool in functions]
        return [{"type": "function", "function": function} for function in made]

    def messages(self) -> list[dict[str, Any]]:
        """The input as messages of a chat. What a model has made between two others is one message."""
        made: list[Message] = []
        turn: list[Any] = []
        for item in self.input:
            if isinstance(item, _Call | _Thoughts) or (isinstance(item, _MessageItem) and item.role == "assistant"):
                turn.append(item)
                continue
            made += _assistant(turn)
            turn = []
            if isinstance(item, _CallOutput):
                made.append(Message(role="tool", content=_joined(item.output), tool_call_id=item.call_id))
            else:
                made.append(Message(role=item.role, content=_joined(item.content)))
        return [for_template(message) for message in made + _assistant(turn)]

    def turn(self, store: ResponseStore) -> "ResponsesTurn":
        """The request with its conversation. Raises Refusal: the one that it names is not there, or it is too long."""
        earlier = [] if self.previous_response_id is None else store.get(self.previous_response_id)
        messages = earlier + self.messages()
        if len(messages) > MAX_MESSAGES:
            raise Refusal(f"the conversation must have at most {MAX_MESSAGES} messages", param="input")
        return ResponsesTurn(self, messages, store)


@dataclass(frozen=True)
class ResponsesTurn:
    """A request of /v1/responses, with what it continues.

    Attributes:
        messages: those of the whole conversation, without the instructions, which are of one answer alone.
        store: gets the conversation, with the answer.
    """

    request: ResponsesRequest
    messages: list[dict[str, Any]]
    store: ResponseStore

    @property
    def stream(self) -> bool:
        return self.request.stream

    def calls(self) -> list[Generate]:
        """The call of rank 0."""
        request = self.request
        instructions = [{"role": "system", "content": request.instructions}] if request.instructions else []
        return [
            Generate(
                model=request.model,
                prompt=Prompt(
                    messages=instructions + self.messages,
                    tools=request.functions(),
                    template_arguments=effort_arguments(request.reasoning.effort),
                ),
                tool_choice=request.tool_choice,
                parallel_tool_calls=request.parallel_tool_calls,
                max_tokens=request.max_output_tokens,
                sampling=Sampling(temperature=request.temperature, top_p=request.top_p),
                grammar=_grammar(request.text.format),
            )
        ]

    def answer(self, request_id: str, created: int) -> ApiAnswer:
        """The builder of the answer. ``created``: seconds since 1970."""
        name = f"resp_{secrets.token_hex(16)}"  # not the client's: who knows it can continue the conversation

        def keep(output: list[dict[str, Any]]) -> None:
            if not self.request.store:
                return
            with contextlib.suppress(Refusal):  # no request may have the name of a tool that the model has made up
                answered = check({"input": output}, ResponsesRequest).messages() if output else []
                self.store.put(name, self.messages + answered)

        return ResponsesAnswer(name, created, self._echo(), keep)

    def _echo(self) -> dict[str, Any]:
        request = self.request
        choice = request.tool_choice
        return {
            "instructions": request.instructions,
            "previous_response_id": request.previous_response_id,
            "store": request.store,
            "tools": request.tools,
            "tool_choice": choice if choice in ("none", "auto", "required") else {"type": "function", "name": choice},
            "parallel_tool_calls": request.parallel_tool_calls,
            "max_output_tokens": request.max_output_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "text": {"format": request.text.format},
            "reasoning": {"effort": request.reasoning.effort, "summary": None},
            "truncation": "disabled",
            "metadata": request.metadata,
        }


def _joined(parts: list[Any]) -> str:
    return "".join(part.text for part in parts)


def _assistant(items: list[Any]) -> list[Message]:
    """The message of a model, of the items that it has made; none of none."""
    if not items:
        return []
    calls = [
        {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
        for item in items
        if isinstance(item, _Call)
    ]
    thoughts = "".join(_joined(item.content) for item in items if isinstance(item, _Thoughts))
    text = "".join(_joined(item.content) for item in items if isinstance(item, _MessageItem))
    return [assistant_message(text, thoughts, calls, "input")]
