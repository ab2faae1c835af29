"""/v1/completions: its request."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from ..protocol import Generate, Prompt
from ..refusal import Refusal
from .answers import ApiAnswer, CompletionAnswer
from .fields import Checked, Integer, Only, tokens_of
from .generation import MAX_ALL_CHOICES, MAX_TOPS, Generation

__all__ = ["CompletionRequest"]

_TOPS = Integer(0, MAX_TOPS, off={-1: None})


def _prompts(value: Any) -> list[Prompt]:
    """A text, texts, tokens, or lists of tokens."""
    if isinstance(value, str):
        return [Prompt(text=value)]
    if not (isinstance(value, list) and value):
        raise ValueError("must be a string, a list of strings, of tokens, or of lists of tokens")
    if not isinstance(value[0], str | list):
        return [Prompt(tokens=tokens_of(value))]
    if len(value) > MAX_ALL_CHOICES:
        raise ValueError(f"must have at most {MAX_ALL_CHOICES} prompts")
    if all(isinstance(each, str) for each in value):
        return [Prompt(text=each) for each in value]
    if any(isinstance(each, str) for each in value):
        raise ValueError("must be a list of strings, or of lists of tokens, and not of both")
    return [Prompt(tokens=tokens_of(each)) for each in value]


def _logprobs(value: Any) -> int | bool | None:
    return value if isinstance(value, bool) else _TOPS.check(value)


class CompletionRequest(Generation):
    """A request of /v1/completions."""

    prompt: Annotated[
        list[Prompt], Checked(_prompts, f"a string, a list of tokens, or up to {MAX_ALL_CHOICES} of either in a list")
    ]
    logprobs: Annotated[
        int | bool | None, Checked(_logprobs, f"0 to {MAX_TOPS}; mlx-lm's `true`: with `top_logprobs` of them")
    ] = None
    max_tokens: Annotated[int | None, Integer(0, (1 << 31) - 1, off={-1: None})] = Field(
        None, description="of the answer, by default the operator's; 0: with `echo`, the prompt alone"
    )
    echo: bool = Field(False, description="the prompt before the answer; with `logprobs`, also those of the prompt")
    add_special_tokens: bool = Field(True, description="vLLM's: what the tokenizer puts before and after a text")
    suffix: Annotated[Any, Only(("",))] = None

    @model_validator(mode="after")
    def _echoes(self) -> "CompletionRequest":
        if self._max_tokens == 0 and not self.echo:
            raise Refusal("max_tokens must be an integer from 1; 0 is for echo", param="max_tokens")
        return self

    def calls(self) -> list[Generate]:
        """A call for each prompt."""
        special = {"add_special_tokens": self.add_special_tokens}
        prompts = [prompt.model_copy(update=special) for prompt in self.prompt]
        echoed = self._tops if self.echo else None
        return list(self._calls(prompts, self._tops, wants_prompt=self.echo, prompt_logprobs=echoed))

    def answer(self, request_id: str, created: int) -> ApiAnswer:
        usage = self.stream_options.include_usage, self.stream_options.continuous_usage_stats
        return CompletionAnswer(f"cmpl-{request_id}", created, self.n, len(self.prompt), *usage)

    @property
    def _tops(self) -> int | None:
        if self.logprobs is None or isinstance(self.logprobs, bool):
            return self.top_logprobs or (0 if self.logprobs else None)
        return self.logprobs
