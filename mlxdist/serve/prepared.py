"""A request as the scheduler needs it: for rank 0, from the processes that tokenize."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

__all__ = ["CallFormat", "Prepared"]

CallFormat = Literal["text", "arguments", "list"]


class Prepared(BaseModel):
    """A request as tokens, with its grammar.

    Attributes:
        tokens: the prompt.
        segments: lengths of the parts of the prompt, at whose ends other prompts go on: a system prompt, a question.
        section: mlx-lm's section of the text with which the answer begins, such as "normal" or "reasoning".
        grammar: the grammar of the answer in llguidance's format; empty for none.
        calls: how calls of tools are written. "text": in the model's own way, in sections of kind "tool".
            "arguments": the content is the arguments of the function that tool_choice names. "list": the content is a
            JSON list of {"name": ..., "parameters": ...}.
        prompt_text: the text of the prompt, where the request wants it.
        parses_tools: whether sections of kind "tool" are calls: the request has tools, and tool_choice is not "none".
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: list[int]
    segments: list[int]
    section: str
    grammar: str = ""
    calls: CallFormat = "text"
    prompt_text: str | None = None
    parses_tools: bool = False
