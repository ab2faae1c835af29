"""Stop words, found in the text of an answer wherever the borders of its tokens are.

mlx-lm searches for the tokens that its tokenizer makes of a word, but a model may write the word with others. Here
the text is searched, before any of it is shown.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from mlx_lm.generate import TextStateMachine

__all__ = ["AnswerText", "Piece", "Sections", "StopWords"]

_SURROGATES = 0xD800  # lone ones, which no text has
_UNFINISHED = "unfinished"  # a section after which mlx-lm's handler drops the call of a tool before it


class Piece(NamedTuple):
    """A character of an answer, or a control sequence as a whole, such as <think>.

    Attributes:
        text: the text that the model has written.
        shown: the text in its place; for a control sequence, :class:`Sections` has it.
    """

    text: str
    shown: str


class StopWords:
    """Finds the first stop word in a text that comes piece by piece. A word does not begin or end inside a piece.

    Args:
        words: the stop words; none is empty.

    Attributes:
        found: whether a word was found in the text.
        held: pieces that may begin a word; once a word is found, the pieces from its first one on.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self._first_characters = {word[0] for word in words}
        self.found = False
        self.held: list[Piece] = []

    def read(self, pieces: Iterable[Piece], is_end: bool = False) -> list[Piece]:
        """Reads the next, or the last, pieces of the text. Returns, in order, pieces that precede any stop word."""
        self.held += pieces
        text = "".join(piece.text for piece in self.held)
        borders = [0, *accumulate(len(piece.text) for piece in self.held)]
        # The word that begins first counts: a later match waits until an earlier possible match has failed.
        begins = (count for count, at in enumerate(borders[:-1]) if self._begins(text, at, borders, is_end))
        count = next(begins, len(self.held))
        before, self.held = self.held[:count], self.held[count:]
        return before

    def _begins(self, text: str, at: int, borders: Sequence[int], is_end: bool) -> bool:
        """Whether a word begins at ``at``, or may begin there."""
        if text[at] not in self._first_characters:
            return False
        self.found = any(text.startswith(word, at) and at + len(word) in borders for word in self._words)
        return self.found or (not is_end and any(word.startswith(text[at:]) for word in self._words))


class Sections:
    """The sections of answers, such as reasoning and tool calls, which mlx-lm's machine separates.

    The machine holds text back that may be a control sequence, and mlx-lm's handler of HTTP drops that at the end of an
    answer. Therefore the machine is here, and the handler gets another one, whose control sequences are one character.

    Attributes:
        machine: mlx-lm's machine, without stop words.
        of_handler: the machine for texts of :class:`AnswerText`.
        switches: the character with which each section begins.
    """

    def __init__(self, machine: TextStateMachine) -> None:
        ends = {"normal", "tool", _UNFINISHED}
        names = sorted(ends.union(machine._states, *(edges for _, edges in machine._states.values())))
        self.machine = machine
        self.switches = {name: chr(_SURROGATES + place) for place, name in enumerate(names)}
        edges = [(switch, name) for name, switch in self.switches.items()]
        self.of_handler = TextStateMachine(dict.fromkeys(names, edges))


class AnswerText:
    """The text of an answer, returned together with its tokens, up to the first stop word.

    Args:
        sections: the sections of this tokenizer.
        initial: the section with which the answer begins.
        words: the stop words.

    Attributes:
        length: the number of tokens before the one in which a stop word begins; None as long as there is no stop word.
    """

    def __init__(self, sections: Sections, initial: str, words: Sequence[str]) -> None:
        self._switches, self._section = sections.switches, sections.switches[initial]
        self._state = sections.machine.make_state(initial)
        self._has_words = bool(words)
        self._words = StopWords(words)
        self._read = 0  # characters
        self._unread: list[Any] = []  # tokens that have given no text yet
        self._undecided: deque[tuple[int, list[Any]]] = deque()  # where their common text ends, tokens
        self._text = ""  # decided, and not handed out
        self._handed_out = 0
        self.length: int | None = None

    def add(self, token: Any, text: str, is_last: bool) -> list[tuple[Any, str]]:
        """Adds a token. Returns tokens whose text is final, each with the text to show.

        After a stop word, the last returned token is the one in which the word begins, and no more follow.

        Args:
            text: the detokenizer's text after ``token``, which may belong to earlier tokens, too.
            is_last: whether the answer ends.
        """
        self._unread.append(token)
        self._read += len(text)
        if text or is_last:
            self._undecided.append((self._read, self._unread))
            self._unread = []
        for piece in self._words.read(self._split(text, is_last), is_last):
            self._text += piece.shown
            self._section = piece.shown if self._is_switch(piece) else self._section
        tokens = self._decided()
        if self._words.found:
            self.length = self._handed_out + len(tokens)
            tokens.append(self._undecided[0][1][0])
            if self._section == self._switches["tool"] and not self._is_switch(self._words.held[0]):
                self._text += self._switches[_UNFINISHED]
        if not tokens:
            return []
        self._handed_out += len(tokens)
        text, self._text = self._text, ""
        return [*((each, "") for each in tokens[:-1]), (tokens[-1], text)]

    def _decided(self) -> list[Any]:
        held = sum(len(piece.text) for piece in self._words.held)
        until = self._read - held - len(self._state[3])
        tokens: list[Any] = []
        while self._undecided and self._undecided[0][0] <= until:
            tokens += self._undecided.popleft()[1]
        return tokens

    def _split(self, text: str, is_last: bool) -> Iterator[Piece]:
        """Splits text by mlx-lm's machine; into characters only if there are stop words, because that takes time."""
        for part in text if self._has_words else [text]:
            pending = self._state[3] + part
            self._state, ((_, plain), *others) = TextStateMachine.split(self._state, part)
            yield from self._plain(plain)
            for section, following in others:
                yield Piece(pending[len(plain) :], self._switches[section])
                yield from self._plain(following)
        if is_last:
            self._state, rest, _ = TextStateMachine.flush(self._state)
            yield from self._plain(rest)

    def _plain(self, text: str) -> Iterator[Piece]:
        for part in text if self._has_words else filter(None, [text]):
            yield Piece(part, part)

    def _is_switch(self, piece: Piece) -> bool:
        return piece.shown in self._switches.values()
