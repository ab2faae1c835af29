"""Stop words, found in the text of an answer wherever the borders of its tokens are.

mlx-lm searches for the tokens that its tokenizer makes of a word, but a model may write the word with others. Here
the text is searched, before any of it is shown.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from mlx_lm.generate import TextStateMachine

__all__ = ["AnswerText", "Piece", "StopWords"]


class Piece(NamedTuple):
    """Text of an answer, or a control sequence as a whole, such as <think>.

    Attributes:
        text: the text that the model has written.
        section: the section that a control sequence begins, by its name in mlx-lm's machine; None for plain text.
    """

    text: str
    section: str | None = None


class StopWords:
    """Finds the first stop word in a text that comes piece by piece. A word does not begin or end inside a piece.

    Args:
        words: the stop words; none is empty.

    Attributes:
        found: the word that was found in the text; None as long as there is none.
        held: pieces that may begin a word; once a word is found, the pieces from its first one on.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self._first_characters = {word[0] for word in words}
        self.found: str | None = None
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
        matches = (word for word in self._words if text.startswith(word, at) and at + len(word) in borders)
        self.found = min(matches, key=len, default=None)  # the one that ends first, wherever the text was cut
        return self.found is not None or (not is_end and any(word.startswith(text[at:]) for word in self._words))


class AnswerText:
    """The text of an answer, returned together with its tokens, up to the first stop word.

    Args:
        machine: mlx-lm's machine of the tokenizer's sections, such as reasoning and calls of tools, without stop words.
        initial: the section with which the answer begins.
        words: the stop words.
        includes_word: whether the stop word is a part of the text.
        min_tokens: the number of tokens in whose text no stop word begins.

    Attributes:
        length: the number of tokens before the one in which a stop word begins; None as long as there is no stop word.
    """

    def __init__(
        self,
        machine: TextStateMachine,
        initial: str,
        words: Sequence[str],
        includes_word: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._state = machine.make_state(initial)
        self._words, self._has_words, self._includes_word = StopWords(words), bool(words), includes_word
        self._min_tokens, self._added = min_tokens, 0  # tokens
        self._read = self._split_off = 0  # characters, and those of them that are pieces
        self._searched_from = 0  # the character from which on words may begin
        self._unread: list[Any] = []  # tokens that have given no text yet
        self._undecided: deque[tuple[int, list[Any]]] = deque()  # where their common text ends, tokens
        self._pieces: list[Piece] = []  # decided, and not handed out
        self._handed_out = 0
        self.length: int | None = None

    @property
    def stop_word(self) -> str | None:
        """The stop word that has ended the text, if there is one."""
        return self._words.found

    @property
    def stops_at_control_sequence(self) -> bool:
        """Whether the stop word begins with a control sequence, which ends its section as without the word."""
        return self.stop_word is not None and self._words.held[0].section is not None

    def add(self, token: Any, text: str, is_last: bool) -> list[tuple[Any, list[Piece]]]:
        """Adds a token. Returns tokens whose text is final, each with the pieces to show.

        After a stop word, the last returned token is the one in which the word begins, and no more follow.

        Args:
            text: the detokenizer's text after ``token``, which may belong to earlier tokens, too.
            is_last: whether the answer ends.
        """
        self._unread.append(token)
        self._read += len(text)
        self._added += 1
        if text or is_last:
            if self._added - len(self._unread) < self._min_tokens:
                self._searched_from = self._read
            self._undecided.append((self._read, self._unread))
            self._unread = []
        searched: list[Piece] = []
        for piece in self._split(text, is_last):
            (self._pieces if self._split_off < self._searched_from else searched).append(piece)
            self._split_off += len(piece.text)
        self._pieces += self._words.read(searched, is_last)
        tokens = self._decided()
        if self._words.found is not None:
            self.length = self._handed_out + len(tokens)
            tokens.append(self._undecided[0][1][0])
            if self._includes_word:
                ends = accumulate(len(piece.text) for piece in self._words.held)
                count = 1 + sum(end < len(self._words.found) for end in ends)
                self._pieces += self._words.held[:count]
        if not tokens:
            return []
        self._handed_out += len(tokens)
        pieces, self._pieces = self._pieces, []
        return [*((each, []) for each in tokens[:-1]), (tokens[-1], pieces)]

    def _decided(self) -> list[Any]:
        held = sum(len(piece.text) for piece in self._words.held)
        until = self._read - held - len(self._state[3])
        tokens: list[Any] = []
        while self._undecided and self._undecided[0][0] <= until:
            tokens += self._undecided.popleft()[1]
        return tokens

    def _split(self, text: str, is_last: bool) -> Iterator[Piece]:
        """Splits text by mlx-lm's machine."""
        state, segments = TextStateMachine.split(self._state, text)
        if self._has_words or len(segments) > 1:  # into characters, which takes time: each ends one marker at most
            for character in text:
                pending = self._state[3] + character
                self._state, ((_, plain), *others) = TextStateMachine.split(self._state, character)
                yield from self._plain(plain)
                for section, _ in others:
                    yield Piece(pending[len(plain) :], section)
        else:
            self._state = state
            yield from self._plain(segments[0][1])
        if is_last:
            self._state, rest, _ = TextStateMachine.flush(self._state)
            yield from self._plain(rest)

    def _plain(self, text: str) -> Iterator[Piece]:
        for part in text if self._has_words else filter(None, [text]):
            yield Piece(part)
