"""/v1/messages and /v1/messages/count_tokens, Anthropic's API: their requests, as chats of rank 0."""

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, FailFast, Field, model_validator

from ..protocol import Generate, Grammar, Prompt, Sampling, Tokenize
from .answers import ApiAnswer
from .anthropic_answers import MessagesAnswer
from .chat import MAX_MESSAGES, MAX_TOOLS, Effort, check_tool_choice, effort_arguments
from .fields import Checked, Fields, Integer, OneOf, Only, Unused, list_or_text
from .generation import StopWords, Temperature, TopK, TopP, object_of
from .messages import MAX_NAME, Message, Name, assistant_message, for_template
from .stable_heads import stable_head
from .structured import json_schema

__all__ = ["MAX_BLOCKS", "CountTokensRequest", "MessagesRequest"]

MAX_BLOCKS = 4096  # of a message, and of a result
_MAX_ID = 256
_NO_MEDIA = "; images and documents are not served here"


_AS_BLOCKS = list_or_text("blocks", lambda text: {"type": "text", "text": text})


class _Block(Fields):
    model_config = ConfigDict(extra="allow")  # cache_control, citations and others change no answer


class _Text(_Block):
    type: Literal["text"]
    text: str


class _Thinking(_Block):
    type: Literal["thinking"]
    thinking: str


class _RedactedThinking(_Block):
    type: Literal["redacted_thinking"]


class _ToolUse(_Block):
    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1, max_length=_MAX_ID)]
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    input: dict[str, Any]


_Texts = Annotated[list[Annotated[_Text, OneOf(hint=_NO_MEDIA)]], FailFast(), Field(max_length=MAX_BLOCKS), _AS_BLOCKS]


class _ToolResult(_Block):
    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1, max_length=_MAX_ID)]
    content: _Texts = []
    is_error: bool = False


_Content = Annotated[
    list[Annotated[_Text | _Thinking | _RedactedThinking | _ToolUse | _ToolResult, OneOf(hint=_NO_MEDIA)]],
    FailFast(),
    Field(max_length=MAX_BLOCKS),
    _AS_BLOCKS,
]
_ROLES = {"thinking": "assistant", "redacted_thinking": "assistant", "tool_use": "assistant", "tool_result": "user"}


class _Message(Fields):
    role: Literal["user", "assistant", "system"]
    content: _Content

    @model_validator(mode="after")
    def _are_of_the_role(self) -> "_Message":
        if not self.content and self.role != "assistant":
            raise ValueError("has no content")
        for number, block in enumerate(self.content):
            if _ROLES.get(block.type, self.role) != self.role:
                raise ValueError(
                    f"has the role {self.role} and a block, {number}, of the type {block.type}, which is one of the "
                    f"role {_ROLES[block.type]}"
                )
        return self


def _tool_type(value: Any) -> str:
    if value != "custom":
        raise ValueError("is not served but as custom: the server runs no tools")
    return value


class _Tool(Fields):
    model_config = ConfigDict(extra="allow")

    type: Annotated[str, Checked(_tool_type)] = "custom"
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]


class _ToolChoice(Fields):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _names_a_tool(self) -> "_ToolChoice":
        if (self.type == "tool") != bool(self.name):
            raise ValueError("must have name, a tool, with the type tool, and only then")
        return self


class _ThinkingChoice(Fields):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int | None, Integer(1, (1 << 31) - 1)] = None
    display: Annotated[Any, Unused()] = None


def _format(value: Any) -> Grammar:
    if object_of(value).get("type") != "json_schema":
        raise ValueError("must have the type json_schema")
    return json_schema(value.get("schema"))


class _OutputOptions(Fields):
    effort: Effort | None = None
    format: Annotated[Grammar | None, Checked(_format)] = None
    task_budget: Annotated[Any, Unused()] = None


class _Conversation(Fields):
    """The fields of both requests."""

    model: str | None = None
    system: _Texts = []
    messages: Annotated[list[_Message], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Annotated[list[_Tool], FailFast(), Field(max_length=MAX_TOOLS)] = []
    tool_choice: _ToolChoice = _ToolChoice(type="auto")
    thinking: _ThinkingChoice | None = None
    output_config: _OutputOptions = _OutputOptions()
    # They change no answer: who asks, what is kept where, how fast it comes.
    betas: Annotated[Any, Unused()] = None
    billing_policy: Annotated[Any, Unused()] = None
    cache_control: Annotated[Any, Unused()] = None
    context_management: Annotated[Any, Unused()] = None  # the client's history is kept as it is
    diagnostics: Annotated[Any, Unused()] = None
    fallbacks: Annotated[Any, Unused()] = None
    fallback_credit_token: Annotated[Any, Unused()] = None
    inference_geo: Annotated[Any, Unused()] = None
    metadata: Annotated[Any, Unused()] = None
    service_tier: Annotated[Any, Unused()] = None
    speed: Annotated[Any, Unused()] = None
    user_profile_id: Annotated[Any, Unused()] = None
    workspace_id: Annotated[Any, Unused()] = None
    compaction: Annotated[Any, Only()] = None
    container: Annotated[Any, Only()] = None
    mcp_servers: Annotated[Any, Only(([],))] = None
    thread: Annotated[Any, Only()] = None

    @model_validator(mode="after")
    def _has_tools(self) -> "_Conversation":
        check_tool_choice(self._choice, [tool.name for tool in self.tools])
        return self

    def with_stable_head(self) -> tuple[Self, str]:
        """The request with a system prompt that its next one has, too, and the client whose rule has changed it."""
        stable = [stable_head(block.text) for block in self.system]
        blocks = [block.model_copy(update={"text": text}) for block, (text, _) in zip(self.system, stable)]
        client = next((client for _, client in stable if client), "")
        return (self.model_copy(update={"system": blocks}) if client else self), client

    @property
    def _choice(self) -> str:
        """The choice as OpenAI's API has it."""
        return self.tool_choice.name or {"any": "required"}.get(self.tool_choice.type, self.tool_choice.type)

    def _prompt(self) -> Prompt:
        system = _joined(self.system)
        messages = [Message(role="system", content=system)] if system else []
        for message in self.messages:
            messages += [_assistant(message)] if message.role == "assistant" else _others(message)
        last = messages[-1]
        continues = last.role == "assistant" and bool(last.content) and not last.tool_calls
        arguments = effort_arguments(self.output_config.effort)
        if self.thinking is not None:
            arguments["enable_thinking"] = self.thinking.type != "disabled"
        return Prompt(
            messages=[for_template(message) for message in messages],
            tools=[_function(tool) for tool in self.tools],
            template_arguments=arguments,
            continue_final_message=continues,
            add_generation_prompt=not continues,
        )


class MessagesRequest(_Conversation):
    """A request of /v1/messages."""

    max_tokens: Annotated[int, Integer(1, (1 << 31) - 1)]
    stop_sequences: StopWords = []
    stream: bool = False
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None

    def calls(self) -> list[Generate]:
        """The call of rank 0."""
        sampling = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k")}
        return [
            Generate(
                model=self.model,
                prompt=self._prompt(),
                tool_choice=self._choice,
                parallel_tool_calls=not self.tool_choice.disable_parallel_tool_use,
                max_tokens=self.max_tokens,
                stop=self.stop_sequences,
                sampling=Sampling(**sampling),
                grammar=self.output_config.format,
            )
        ]

    def answer(self, request_id: str, created: int) -> ApiAnswer:
        """The builder of the answer. ``created``: seconds since 1970."""
        return MessagesAnswer(request_id, created)


class CountTokensRequest(_Conversation):
    """A request of /v1/messages/count_tokens."""

    def call(self) -> Tokenize:
        """The call of rank 0."""
        prompt = self._prompt()
        return Tokenize(
            model=self.model, prompt=prompt.model_copy(update={"tools": []}) if self._choice == "none" else prompt
        )

    def answer(self, value: dict[str, Any]) -> dict[str, Any]:
        """The answer, from rank 0's."""
        return {"input_tokens": len(value["tokens"])}


def _joined(blocks: list[Any]) -> str:
    return "".join(block.text for block in blocks if isinstance(block, _Text))


def _assistant(message: _Message) -> Message:
    calls = [
        {"id": block.id, "function": {"name": block.name, "arguments": block.input}}
        for block in message.content
        if isinstance(block, _ToolUse)
    ]
    thoughts = "".join(block.thinking for block in message.content if isinstance(block, _Thinking))
    return assistant_message(_joined(message.content), thoughts, calls, "messages")


def _others(message: _Message) -> list[Message]:
    """A message of a user, or of the system: each result of a tool is a message, and text between them is another."""
    made: list[Message] = []
    texts: list[str] = []

    def end_text() -> None:
        if texts:
            made.append(Message(role=message.role, content="".join(texts)))
            texts.clear()

    for block in message.content:
        if isinstance(block, _ToolResult):
            end_text()
            text = ("Error: " if block.is_error else "") + _joined(block.content)
            made.append(Message(role="tool", content=text, tool_call_id=block.tool_use_id))
        elif isinstance(block, _Text):
            texts.append(block.text)
    end_text()
    return made


def _function(tool: _Tool) -> dict[str, Any]:
    described = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": tool.input_schema}}
