"""Rank 0: the tokens of an answer with their text, as a client gets them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_lm.tokenizer_utils import StreamingDetokenizer

from .stop_words import AnswerText, Sections

__all__ = ["Answer", "Token"]


@dataclass(frozen=True)
class Token:
    """A token that was sampled for a request.

    Attributes:
        finish_reason: why the answer ends, on its last token; None on the others.
        top: the most likely tokens, for the API's top_logprobs, after the token itself.
        text: the text that this token completes, as the machine ``of_handler`` of :class:`Sections` reads it.
    """

    token: int
    logprob: float
    finish_reason: str | None
    top: tuple[dict[str, Any], ...] = ()
    text: str = ""


class Answer:
    """The tokens of an answer, up to the one in which its first stop word begins.

    Args:
        detokenizer: a detokenizer for this answer alone.
        sections: the sections of this tokenizer.
        initial: the section with which the answer begins.
        words: the stop words.
    """

    def __init__(
        self, detokenizer: StreamingDetokenizer, sections: Sections, initial: str, words: Sequence[str]
    ) -> None:
        self._detokenizer = detokenizer
        self._text = AnswerText(sections, initial, words)

    @property
    def length(self) -> int | None:
        """The number of tokens before the one in which a stop word begins; None as long as there is no stop word."""
        return self._text.length

    def add(self, token: Token) -> list[Token]:
        """Adds a token. Returns the tokens whose text is now final. After a stop word, the last one ends the answer."""
        if token.finish_reason != "stop":  # the token that ends an answer is no text
            self._detokenizer.add_token(token.token)
        if token.finish_reason is not None:
            self._detokenizer.finalize()
        text = self._detokenizer.last_segment
        if token.finish_reason == "stop":
            text = text.rstrip("\ufffd")  # a character that is not complete, which mlx-lm's server leaves out, too
        found = self._text.add(token, text, token.finish_reason is not None)
        tokens = [replace(each, text=text) for each, text in found]
        if self.length is not None:
            tokens[-1] = replace(tokens[-1], finish_reason="stop")
        return tokens
