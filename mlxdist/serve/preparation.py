"""Requests as tokens: chat templates, tokenizers, grammars and parsers of tools, in a process beside rank 0.

What is mlx-lm's of this is used here, and in `grammar.py` and `tool_calls.py`: its tokenizers with their markers and
parsers, and `convert_chat`. The parts of a prompt are those of its server, whose prefix cache they are for.
"""

import contextlib
import copy
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_lm.server import convert_chat
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_config, load_tokenizer
from transformers import PreTrainedTokenizerBase

from . import tool_calls
from .grammar import after_thinking, calls_grammar, grammar_of, or_calls
from .prepared import CallFormat, Prepared
from .protocol import Detokenize, Generate, Prompt, Tokenize, ToolCall
from .refusal import Refusal, sentence

__all__ = ["Limits", "Preparation"]

_THINK_TAIL = 11  # tokens at the end of a prompt in which mlx-lm looks for the beginning of thoughts
# Arguments of transformers' apply_chat_template, which are no variables of a template.
_OF_TOKENIZER = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


@dataclass(frozen=True)
class Limits:
    """The limits of prompts: see the attributes of :class:`PreparationPool`."""

    context: int
    vocabulary: int
    has_grammars: bool = True


class Preparation:
    """Makes requests into tokens.

    Args:
        directory: of the model.
        template_arguments: the operator's variables of the chat template.

    Raises:
        OSError, ValueError: there is no tokenizer.
    """

    def __init__(self, directory: Path, template_arguments: Mapping[str, Any]) -> None:
        eos: Any = load_config(directory).get("eos_token_id")
        self._tokenizer: TokenizerWrapper = load_tokenizer(directory, eos_token_ids=eos)
        self._template_arguments = template_arguments
        self._longest = max(map(len, self._tokenizer.get_vocab()))  # characters of a token, or more
        # A template that is a function of Python, such as DeepSeek's, means another role by that name, or none.
        self._knows_developers = "developer" in json.dumps(self._tokenizer.chat_template)

    def prepare(self, call: Generate, limits: Limits) -> Prepared:
        """A request as tokens, with its grammar.

        Raises:
            Refusal: it cannot be made into tokens, or into too many; its grammar is wrong.
        """
        prompt, is_chat = call.prompt, call.prompt.messages is not None
        tools = prompt.tools if call.tool_choice != "none" else []
        how = tool_calls.call_format(call.tool_choice, tools)
        messages = self._messages(prompt) if is_chat else []
        text, tokens = self._tokens(prompt, messages, tools, limits)
        _check(tokens, limits, "messages" if is_chat else "prompt")
        section = self._section(tokens) if is_chat and self._tokenizer.has_chat_template else "normal"
        if call.wants_prompt and text is None:
            text = self._tokenizer.decode(tokens)
        return Prepared(
            tokens=tokens,
            segments=self._segments(tokens, prompt, messages, tools),
            section=section,
            grammar=self._grammar(call, tools, how, section, limits.has_grammars),
            calls=how,
            prompt_text=text if call.wants_prompt else None,
            parses_tools=bool(tools),
        )

    def tokenize(self, call: Tokenize, limits: Limits) -> dict[str, Any]:
        """The tokens of a prompt of any length. Raises Refusal: it cannot be made into tokens."""
        messages = self._messages(call.prompt) if call.prompt.messages is not None else []
        _, tokens = self._tokens(call.prompt, messages, call.prompt.tools, None)
        return {"model": call.model, "tokens": tokens, "max_model_len": limits.context}

    def detokenize(self, call: Detokenize, limits: Limits) -> dict[str, str]:
        """The text of tokens. Raises Refusal: the model does not have one of them."""
        if not all(0 <= token < limits.vocabulary for token in call.tokens):
            raise Refusal(f"tokens must be from 0 to {limits.vocabulary - 1}", param="tokens")
        return {"prompt": self._tokenizer.decode(call.tokens)}

    def parse_calls(self, text: str, tools: list[dict[str, Any]], how: CallFormat, name: str) -> list[ToolCall] | None:
        """See :func:`tool_calls.parse_calls`."""
        return tool_calls.parse_calls(text, how, name, tools, self._tokenizer.tool_parser)

    def _messages(self, prompt: Prompt) -> list[dict[str, Any]]:
        """A copy of the messages, in the form that templates take."""
        messages = copy.deepcopy(prompt.messages or [])
        if not messages:
            raise Refusal("messages must have at least one message", param="messages")
        for message in messages:
            if message.get("content") is None:
                message["content"] = ""
            if message["role"] == "developer" and not self._knows_developers | (
                "developer" in (prompt.role_mapping or ())
            ):
                message["role"] = "system"
        return messages

    def _tokens(
        self, prompt: Prompt, messages: list[dict[str, Any]], tools: list[dict[str, Any]], limits: Limits | None
    ) -> tuple[str | None, list[int]]:
        """The text of a prompt, where it is known, and its tokens. ``limits``: None for a prompt of any length."""
        if prompt.tokens is not None:
            return None, prompt.tokens
        try:
            if prompt.text is not None:
                text, is_whole = prompt.text, not prompt.add_special_tokens
            elif self._tokenizer.has_chat_template:
                rendered = self._render_history(prompt, messages, tools)
                if not isinstance(rendered, str):
                    return None, rendered
                text, is_whole = rendered, True
            else:
                text, is_whole = self._converted(prompt, messages), False
            if limits is not None:
                self._check_length(text, limits, "messages" if messages else "prompt")
            return text, self._tokenizer.encode(text, add_special_tokens=not is_whole)
        except Refusal:
            raise
        except Exception as error:  # templates and tokenizers raise what they like
            raise Refusal(f"the request cannot be made into tokens: {sentence(error)}") from None

    def _converted(self, prompt: Prompt, messages: list[dict[str, Any]]) -> str:
        if prompt.continue_final_message or not prompt.add_generation_prompt:
            name = "continue_final_message" if prompt.continue_final_message else "add_generation_prompt"
            raise Refusal(f"{name} is not served with this model, which has no chat template", param=name)
        return convert_chat(messages, prompt.role_mapping)

    def _render_history(
        self, prompt: Prompt, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
    ) -> str | list[int]:
        """Renders a chat with earlier calls of tools.

        Their arguments are objects for most templates, and for those of DeepSeek text. Some that a client sends are no
        JSON, such as truncated ones: most templates write these as they are, some need an object.
        """
        functions = _parse_arguments(messages)
        try:
            return self._render(prompt, messages, tools)
        except Exception:
            if not functions:
                raise
        for function in functions:
            if isinstance(function["arguments"], str):
                function["arguments"] = {}
        try:
            return self._render(prompt, messages, tools)
        except Exception:
            for function in functions:
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        return self._render(prompt, messages, tools)

    def _render(
        self, prompt: Prompt, messages: list[dict[str, Any]], tools: list[dict[str, Any]], **changed: bool
    ) -> str | list[int]:
        """The text of a chat, or its tokens where the tokenizer has a renderer of its own."""
        if wrong := _OF_TOKENIZER & set(prompt.template_arguments):
            raise Refusal(
                f"chat_template_kwargs must not have {', '.join(sorted(wrong))}", param="chat_template_kwargs"
            )
        arguments: dict[str, Any] = {
            **self._template_arguments,
            **prompt.template_arguments,
            "add_generation_prompt": prompt.add_generation_prompt and not prompt.continue_final_message,
        }
        if prompt.continue_final_message:
            arguments["continue_final_message"] = True
        arguments |= changed
        renderer = type(self._tokenizer._tokenizer).apply_chat_template
        own = renderer is not PreTrainedTokenizerBase.apply_chat_template
        return self._tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=own, **arguments)

    def _check_length(self, text: str, limits: Limits, param: str) -> None:
        """Refuses a text whose characters need more tokens than the context has. Spaces may be no token."""
        most = self._longest * limits.context
        if len(text) > most and (count := len("".join(text.split()))) > most:
            raise Refusal(
                f"the prompt has {count} characters, and at most {limits.context - 1} tokens are served here",
                param=param,
                code="context_length_exceeded",
            )

    def _section(self, tokens: list[int]) -> str:
        """mlx-lm's section at the end of a chat: "reasoning" where the template has begun the thoughts."""
        tokenizer = self._tokenizer
        if tokenizer.response_initial_state:
            return tokenizer.response_initial_state
        if tokenizer.has_thinking and tokenizer.rfind_think_start(tokens) > tokenizer.rfind_think_end(tokens):
            return "reasoning"
        return "normal"

    def _segments(
        self, tokens: list[int], prompt: Prompt, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
    ) -> list[int]:
        """Lengths of the system prompts, the rest, and the beginning of thoughts, as mlx-lm cuts prompts."""
        if not messages or not self._tokenizer.has_chat_template or messages[-1]["role"] != "user":
            return [len(tokens)]
        system_end = self._system_end(tokens, prompt, messages, tools)
        tail = len(tokens)
        if self._tokenizer.has_thinking:
            found = self._tokenizer.rfind_think_start(tokens, start=tail - _THINK_TAIL)
            tail = found if found >= 0 else tail
        borders = [0, system_end, max(system_end, tail), len(tokens)]
        return [end - start for start, end in zip(borders, borders[1:]) if end > start]

    def _system_end(
        self, tokens: list[int], prompt: Prompt, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
    ) -> int:
        """The number of tokens that the system prompts at the beginning have in common with any chat of theirs."""
        count = next(place for place, message in enumerate(messages) if message["role"] != "system")
        if not count:
            return 0
        system = [*messages[:count], {"role": "user", "content": ""}]
        try:
            rendered = self._render(prompt, system, tools, add_generation_prompt=False)
        except Exception:  # of a template that takes no empty question
            return 0
        if isinstance(rendered, str):
            rendered = self._tokenizer.encode(rendered, add_special_tokens=False)
        return next((place for place, (one, other) in enumerate(zip(rendered, tokens)) if one != other), 0)

    def _grammar(
        self, call: Generate, tools: Sequence[dict[str, Any]], how: CallFormat, section: str, is_served: bool
    ) -> str:
        if how == "text" and call.grammar is None:
            return ""
        if not is_served:
            raise Refusal("structured output is not served with this model, whose tokenizer llguidance cannot read")
        if how != "text":
            grammar = calls_grammar(tools, how, call.tool_choice, call.parallel_tool_calls)
        else:
            assert call.grammar is not None
            grammar = grammar_of(call.grammar)
        if how == "text" and tools and self._tokenizer.has_tool_calling:
            grammar = or_calls(grammar, self._tokenizer, call.parallel_tool_calls)
        return grammar if call.prompt.messages is None else after_thinking(grammar, self._tokenizer, section)


def _check(tokens: list[int], limits: Limits, param: str) -> None:
    """Refuses tokens that the model does not have, or that leave no room for an answer."""
    if not tokens:
        raise Refusal("the prompt is empty", param=param)
    if len(tokens) >= limits.context:
        raise Refusal(
            f"the prompt has {len(tokens)} tokens, and at most {limits.context - 1} are served here",
            param=param,
            code="context_length_exceeded",
        )
    if not (min(tokens) >= 0 and max(tokens) < limits.vocabulary):
        last = limits.vocabulary - 1
        raise Refusal(f"the prompt has a token that the model does not have: they are 0 to {last}", param=param)


def _parse_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parses the arguments of earlier calls in their place, as far as they are objects. Returns the functions."""
    functions = []
    for message in messages:
        for call in message.get("tool_calls") or []:
            function = call.get("function")
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                functions.append(function)
                with contextlib.suppress(ValueError):  # it stays text
                    arguments = tool_calls.arguments_of(function["arguments"])
                    function["arguments"] = arguments if isinstance(arguments, dict) else function["arguments"]
    return functions
