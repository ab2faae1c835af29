"""/v1/chat/completions: its request."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, model_validator

from ..protocol import Generate, Prompt
from ..refusal import Refusal
from .answers import ApiAnswer, ChatAnswer
from .fields import Checked, Fields, Only
from .generation import Generation, object_of
from .messages import Message, Tool, for_template

__all__ = [
    "MAX_MESSAGES", "MAX_TOOLS", "NOT_OF_TEMPLATES", "ChatPrompt", "ChatRequest", "Effort",
    "check_tool_choice", "effort_arguments",
]  # fmt: skip

MAX_MESSAGES = 4096
MAX_TOOLS = 256
# Arguments of transformers' apply_chat_template, which are not variables of the template.
NOT_OF_TEMPLATES = frozenset(
    {
        "self",
        "conversation",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "kwargs",
    }
)


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _template_arguments(value: Any) -> dict[str, Any]:
    if wrong := NOT_OF_TEMPLATES & object_of(value).keys():
        raise ValueError(f"must not have {', '.join(sorted(wrong))}")
    return value


def _tool_choice(value: Any) -> str:
    """ "none", "auto", "required", or the name of a function."""
    if value in ("none", "auto", "required"):
        return value
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not (isinstance(name, str) and name):
        raise ValueError('must be none, auto, required or {"type": "function", "function": {"name": "..."}}')
    return name


def _role_mapping(value: Any) -> dict[str, str]:
    if not all(isinstance(text, str) for text in object_of(value).values()):
        raise ValueError("must be an object of strings")
    return value


def check_tool_choice(choice: str, names: list[str]) -> None:
    """Raises Refusal: ``choice``, "none", "auto", "required" or a name, needs a tool that is not in ``names``."""
    if choice in ("none", "auto"):
        return
    if not names:
        raise Refusal(f"tool_choice is {choice[:64]!r}, and there are no tools", param="tool_choice")
    if choice != "required" and choice not in names:
        raise Refusal(f"tool_choice names {choice[:64]!r}, which is none of tools", param="tool_choice")


def effort_arguments(effort: str | None) -> dict[str, Any]:
    """The variables of the template for OpenAI's `reasoning_effort`."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})


class ChatPrompt(Fields):
    """The fields of a chat that its template reads."""

    # FailFast: pydantic would make an error of each of a million items.
    messages: Annotated[
        list[Message], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES, description="text alone")
    ]
    tools: Annotated[list[Tool], FailFast(), Field(max_length=MAX_TOOLS, description="functions")] = []
    chat_template_kwargs: Annotated[dict[str, Any], Checked(_template_arguments, "variables of the template")] = {}
    add_generation_prompt: bool | None = Field(None, description="the template begins an answer, by default")
    continue_final_message: bool = Field(False, description="the answer continues the last message")
    role_mapping: Annotated[
        dict[str, str] | None, Checked(_role_mapping, "mlx-lm's, for tokenizers without a template")
    ] = None
    chat_template: Annotated[Any, Only(hint="the operator chooses it")] = None
    documents: Annotated[Any, Only(([],))] = None
    media_io_kwargs: Annotated[Any, Only(({},))] = None
    mm_processor_kwargs: Annotated[Any, Only(({},))] = None

    @model_validator(mode="after")
    def _ends_well(self) -> "ChatPrompt":
        if self.continue_final_message and self.add_generation_prompt:
            raise Refusal(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        if self.continue_final_message and self.messages and not self.messages[-1].content:
            raise Refusal(
                f"messages[{len(self.messages) - 1}].content is empty: continue_final_message continues it",
                param=f"messages[{len(self.messages) - 1}].content",
            )
        return self

    def _chat(self, arguments: Mapping[str, Any], add_generation_prompt: bool = True) -> Prompt:
        begins = add_generation_prompt if self.add_generation_prompt is None else self.add_generation_prompt
        tools: Any = self.tools  # as they were given
        return Prompt(
            messages=[for_template(message) for message in self.messages],
            tools=tools,
            template_arguments={**arguments, **self.chat_template_kwargs},
            continue_final_message=self.continue_final_message,
            add_generation_prompt=begins and not self.continue_final_message,
            role_mapping=self.role_mapping,
        )


class ChatRequest(Generation, ChatPrompt):
    """A request of /v1/chat/completions."""

    logprobs: bool = Field(False, description="logprobs of the answer's tokens")
    tool_choice: Annotated[str, Checked(_tool_choice, "`none`, `auto`, `required`, or a function by its name")] = "auto"
    parallel_tool_calls: bool = Field(True, description="an answer may have several calls")
    reasoning_effort: Effort | None = Field(
        None, description="a variable of the template; `none` switches `enable_thinking` off"
    )
    audio: Annotated[Any, Only()] = None
    modalities: Annotated[Any, Only((["text"],))] = None
    moderation: Annotated[Any, Only()] = None
    functions: Annotated[Any, Only(([],), "tools replaces it")] = None
    function_call: Annotated[Any, Only((), "tool_choice replaces it")] = None
    verbosity: Annotated[Any, Only(("medium",))] = None
    web_search_options: Annotated[Any, Only()] = None
    echo: Annotated[Any, Only((False,))] = None
    add_special_tokens: Annotated[Any, Only((False,))] = None
    include_reasoning: Annotated[Any, Only((True,))] = None
    reasoning: Annotated[Any, Only((), "reasoning_effort replaces it")] = None
    thinking: Annotated[Any, Only((), "reasoning_effort or chat_template_kwargs replaces it")] = None
    enable_thinking: Annotated[Any, Only((), "it goes into chat_template_kwargs")] = None
    reasoning_format: Annotated[Any, Only(("auto",))] = None
    thinking_forced_open: Annotated[Any, Only((False,))] = None
    parse_tool_calls: Annotated[Any, Only((True,))] = None

    @model_validator(mode="after")
    def _has_tools(self) -> "ChatRequest":
        tools: Any = self.tools
        check_tool_choice(self.tool_choice, [tool["function"]["name"] for tool in tools])
        return self

    def calls(self) -> list[Generate]:
        """A call for each choice."""
        tops = self.top_logprobs or (0 if self.logprobs else None)
        choice = {"tool_choice": self.tool_choice, "parallel_tool_calls": self.parallel_tool_calls}
        return list(self._calls([self._chat(effort_arguments(self.reasoning_effort))], tops, **choice))

    def answer(self, request_id: str, created: int) -> ApiAnswer:
        usage = self.stream_options.include_usage, self.stream_options.continuous_usage_stats
        return ChatAnswer(f"chatcmpl-{request_id}", created, self.n, 1, *usage)
