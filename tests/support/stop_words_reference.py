"""What an answer is with stop words: plain, from its whole text without them."""

import itertools
from collections.abc import Sequence

from mlx_lm.generate import TextStateMachine

__all__ = ["contents_of", "length_of", "reference", "shown_of"]


def pieces(text: str, machine: TextStateMachine, initial: str) -> list[tuple[str | None, str]]:
    """(section, text) of each character, and (None, text) of each control sequence."""
    found: list[tuple[str | None, str]] = []
    state = machine.make_state(initial)
    for character in text:
        pending, before = state[3] + character, state[0]
        state, ((_, plain), *switches) = TextStateMachine.split(state, character)
        found += [(before, each) for each in plain]
        found += [(None, pending[len(plain) :]) for _ in switches]
    return found + [(state[0], each) for each in state[3]]


def reference(
    text: str, words: Sequence[str], machine: TextStateMachine, initial: str = "normal"
) -> tuple[list[tuple[str, str]], int | None]:
    """Sections of the text before the first occurrence of a word that begins and ends between pieces; where that is."""
    whole = pieces(text, machine, initial)
    borders = [0, *itertools.accumulate(len(piece) for _, piece in whole)]
    cuts = [at for at in borders for word in words if text.startswith(word, at) and at + len(word) in borders]
    cut = min(cuts, default=len(text))
    before = [piece for piece, at in zip(whole, borders) if at < cut]
    return shown_of(before), cut if cuts else None


def contents_of(
    text: str, words: Sequence[str], machine: TextStateMachine, initial: str
) -> tuple[str, str, int | None]:
    """Content and reasoning of a chat without tools, whose calls are content with their markers; where the word is."""
    whole = pieces(text, machine, initial)
    borders = [0, *itertools.accumulate(len(piece) for _, piece in whole)]
    cuts = [at for at in borders for word in words if text.startswith(word, at) and at + len(word) in borders]
    cut = min(cuts, default=len(text))
    content = reasoning = ""
    state = machine.make_state(initial)
    for (section, piece), at in zip(whole, borders):
        before = state[0]
        state, _ = TextStateMachine.split(state, piece)
        if at >= cut:
            break
        if section == "reasoning":
            reasoning += piece
        elif section is not None or "tool" in (before, state[0]):
            content += piece
    return content, reasoning, cut if cuts else None


def shown_of(whole: Sequence[tuple[str | None, str]]) -> list[tuple[str, str]]:
    """The text of each section, in the order of the text."""
    kept = [(section, text) for section, text in whole if section is not None]
    return [(key, "".join(text for _, text in group)) for key, group in itertools.groupby(kept, lambda each: each[0])]


def length_of(parts: Sequence[str], cut: int) -> int:
    """The number of tokens before the one in which the text at ``cut`` begins; or before the first of several that have
    that text together. ``parts``: the text that comes with each token."""
    ends = list(itertools.accumulate(map(len, parts)))
    within = next(number for number, end in enumerate(ends) if end > cut)
    return max((number + 1 for number in range(within) if parts[number]), default=0)
