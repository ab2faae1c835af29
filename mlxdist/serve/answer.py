"""Rank 0: the tokens of an answer with their text, as a client gets them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from mlx_lm.generate import TextStateMachine
from mlx_lm.tokenizer_utils import StreamingDetokenizer

from .stop_words import AnswerText, Piece

__all__ = ["Answer", "PromptTokens", "Token"]


@dataclass(frozen=True)
class Token:
    """A token that was sampled for a request, or one of its prompt.

    Attributes:
        logprob: its log-probability; None for the first token of a prompt.
        finish_reason: why the answer ends, on its last token; None on the others.
        top: the most likely tokens with their log-probabilities, the most likely first.
        pieces: the text that this token completes.
    """

    token: int
    logprob: float | None
    finish_reason: str | None
    top: tuple[tuple[int, float], ...] = ()
    pieces: tuple[Piece, ...] = ()

    @property
    def text(self) -> str:
        """The plain text that this token completes, in any section."""
        return "".join(piece.text for piece in self.pieces if piece.section is None)


@dataclass(frozen=True)
class PromptTokens:
    """All tokens of a prompt, with log-probabilities."""

    tokens: tuple[Token, ...]


class Answer:
    """The tokens of an answer, up to the one in which its first stop word begins.

    Args:
        detokenizer: a detokenizer for this answer alone.
        machine: mlx-lm's machine of the tokenizer's sections, without stop words.
        initial: the section with which the answer begins.
        words: the stop words.
        includes_stop: whether the stop word, or a token of ``stop_tokens`` that ends the answer, is a part of the text.
        hidden: tokens that are no text, such as those that end an answer.
        stop_tokens: tokens that end the answer because the request says so.
        min_tokens: the number of tokens in whose text no stop word begins.
    """

    def __init__(
        self,
        detokenizer: StreamingDetokenizer,
        machine: TextStateMachine,
        initial: str,
        words: Sequence[str],
        includes_stop: bool = False,
        hidden: Collection[int] = (),
        stop_tokens: Collection[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer, self._hidden, self.stop_tokens = detokenizer, hidden, stop_tokens
        self._shown = stop_tokens if includes_stop else ()
        self._text = AnswerText(machine, initial, words, includes_stop, min_tokens)

    @property
    def length(self) -> int | None:
        """The number of tokens before the one in which a stop word begins; None as long as there is no stop word."""
        return self._text.length

    @property
    def stop_word(self) -> str | None:
        """The stop word that has ended the answer, if there is one."""
        return self._text.stop_word

    @property
    def stops_at_control_sequence(self) -> bool:
        """Whether the stop word begins with a control sequence, such as the end of a call of a tool."""
        return self._text.stops_at_control_sequence

    def add(self, token: Token) -> list[Token]:
        """Adds a token. Returns the tokens whose text is now final. After a stop word, the last one ends the answer."""
        is_end = token.finish_reason == "stop" and token.token not in self._shown
        has_text = not is_end and token.token not in self._hidden
        if has_text:
            self._detokenizer.add_token(token.token)
        if token.finish_reason is not None:
            self._detokenizer.finalize()
        text = self._detokenizer.last_segment if has_text or token.finish_reason is not None else ""
        if token.finish_reason == "stop":
            text = text.rstrip("\ufffd")  # a character that is not complete, which mlx-lm's server leaves out, too
        found = self._text.add(token, text, token.finish_reason is not None)
        tokens = [replace(each, pieces=tuple(pieces)) for each, pieces in found]
        if self.length is not None:
            tokens[-1] = replace(tokens[-1], finish_reason="stop")
        return tokens
