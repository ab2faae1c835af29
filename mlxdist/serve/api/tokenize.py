"""/tokenize and /detokenize, as vLLM has them."""

from typing import Annotated, Any

from pydantic import FailFast, Field, model_validator

from ..protocol import Detokenize, Prompt, Tokenize
from ..refusal import Refusal
from .chat import MAX_MESSAGES, ChatPrompt
from .fields import Checked, Fields, Only, tokens_of
from .messages import Message

__all__ = ["DetokenizeRequest", "TokenizeRequest"]


class TokenizeRequest(ChatPrompt):
    """A request of /tokenize: of a text, or of a chat."""

    model: str | None = Field(None, description="the name of the model, or of an adapter")
    prompt: str | None = Field(None, description="a text")
    messages: Annotated[
        list[Message], FailFast(), Field(max_length=MAX_MESSAGES, description="a chat, in place of `prompt`")
    ] = []
    add_special_tokens: bool = Field(True, description="of `prompt`: what the tokenizer puts before and after a text")
    return_token_strs: Annotated[Any, Only((False,))] = None
    content: Annotated[Any, Only((), "prompt replaces it")] = None

    @model_validator(mode="after")
    def _is_one(self) -> "TokenizeRequest":
        if (self.prompt is None) != bool(self.messages):
            raise Refusal("a request must have prompt, a string, or messages, and not both", param="prompt")
        return self

    def call(self) -> Tokenize:
        """The call of rank 0."""
        text = Prompt(text=self.prompt, add_special_tokens=self.add_special_tokens)
        return Tokenize(model=self.model, prompt=self._chat({}) if self.prompt is None else text)

    def answer(self, value: dict[str, Any]) -> dict[str, Any]:
        """The answer, from rank 0's."""
        tokens = value["tokens"]
        most = value["max_model_len"]
        return {"count": len(tokens), "max_model_len": most, "tokens": tokens, "token_strs": None}


class DetokenizeRequest(Fields):
    """A request of /detokenize."""

    model: str | None = Field(None, description="the name of the model, or of an adapter")
    tokens: Annotated[list[int], Checked(tokens_of, "a list of tokens")]

    def call(self) -> Detokenize:
        """The call of rank 0."""
        return Detokenize(model=self.model, tokens=self.tokens)

    def answer(self, value: dict[str, Any]) -> dict[str, Any]:
        """The answer, from rank 0's."""
        return {"prompt": value["prompt"]}
