"""Stop words: an answer is its text without them, up to the first of them, whatever its tokens are."""

import itertools

import pytest
from bpe_models import bpe_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.generate import TextStateMachine
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    NaiveStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
    _byte_decoder,
)
from stop_words_reference import length_of, reference, shown_of

from mlxdist.serve.answer import Answer, Token
from mlxdist.serve.stop_words import AnswerText

TOKENIZER = bpe_tokenizer()
BYTES = {value: character for character, value in _byte_decoder().items()}
MACHINE = {
    "normal": [("<think>", "reasoning"), ("<call>", "tool"), ("<eom>", "normal")],
    "reasoning": [("</think>", "normal"), ("<call>", "tool")],
    "tool": [("</call>", "normal")],
}
MARKERS = ["<think>", "</think>", "<call>", "</call>", "<eom>"]
# Few characters, so that words occur, overlap, and have beginnings of each other.
PARTS = st.sampled_from(["a", "b", "é", "<", "/", ">", "th", *MARKERS])
TEXT = st.lists(PARTS, max_size=14).map("".join)
WORDS = st.lists(st.lists(PARTS, min_size=1, max_size=3).map("".join), min_size=1, max_size=4)


def parts_of(text, cuts):
    """The text as tokens; some have none, as bytes of a character have."""
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(borders)]


def read(text, cuts, words, machine, includes_word=False, min_tokens=0):
    """(sections, the text that each step hands out, the tokens, AnswerText)."""
    answer = AnswerText(TextStateMachine(machine), "normal", words, includes_word, min_tokens)
    found, tokens, streamed = [], [], []
    section = "normal"
    parts = parts_of(text, cuts)
    for number, part in enumerate(parts):
        step = answer.add(number, part, number == len(parts) - 1)
        tokens += [token for token, _ in step]
        pieces = [piece for _, several in step for piece in several]
        for piece in pieces:
            section = piece.section or section
            found.append((None if piece.section else section, piece.text))
        streamed.append("".join(piece.text for piece in pieces))
        if answer.length is not None:
            break
    return shown_of(found), streamed, tokens, answer


CUTS = st.lists(st.integers(0, 60), max_size=20)


@settings(deadline=None, max_examples=150)
@given(TEXT, CUTS, WORDS)
@example("abc", [1, 2], ["b", "abc"])  # the one that begins first
@example("abd", [1, 2], ["b", "abc"])
@example("ababac", [1, 2, 3, 4, 5], ["abac"])
@example("aé", [1], ["é"])
@example("ab", [1], ["bc"])  # the answer ends within what may be a word
@example("ab", [1], ["ab", "a"])  # of two that begin there, the one that ends first
@example("ab", [], ["ab", "a"])
def test_a_text_ends_before_the_first_word(text, cuts, words):
    shown, streamed, tokens, answer = read(text, cuts, words, {})
    length = answer.length
    cut = min((text.find(word) for word in words if word in text), default=None)
    assert "".join(part for _, part in shown) == text[:cut]
    parts = parts_of(text, cuts)
    ends = list(itertools.accumulate(map(len, parts)))
    assert length == (None if cut is None else length_of(parts, cut))
    assert tokens == list(range(len(parts) if length is None else length + 1))
    found = [word for word in words if cut is not None and text.startswith(word, cut)]
    assert answer.stop_word == min(found, key=len, default=None)
    for number, end in enumerate(ends[: len(streamed) - 1]):  # what cannot be the beginning of a word does not wait
        begins = (at for at in range(end) if any(word.startswith(text[at:end]) for word in words))
        decided = next(begins, end)
        assert len("".join(streamed[: number + 1])) >= max(each for each in [0, *ends] if each <= decided)


@settings(deadline=None, max_examples=150)
@given(TEXT, CUTS, WORDS)
@example("<think>a</think>", [], ["th", "ink"])  # no word is in a control sequence
@example("<think>a</think>b", [9], ["a</think>b"])  # but it may be in a word
@example("a<", [1], ["<b"])  # what may be a control sequence is shown at the end
@example("a<b", [2], ["b"])
def test_reasoning_and_calls_of_tools(text, cuts, words):
    shown, _, _, answer = read(text, cuts, words, MACHINE)
    expected, cut = reference(text, words, TextStateMachine(MACHINE))
    assert shown == expected
    assert (answer.length is None) == (cut is None)


@settings(deadline=None, max_examples=150)
@given(TEXT, CUTS, WORDS)
@example("a<think>b", [], ["<think>b"])
@example("abcd", [1, 2, 3], ["bc"])  # and not the text of its token behind it
def test_the_word_may_be_a_part_of_the_text(text, cuts, words):
    without, with_word = read(text, cuts, words, MACHINE), read(text, cuts, words, MACHINE, includes_word=True)
    assert "".join(with_word[1]) == "".join(without[1]) + (without[3].stop_word or "")
    assert with_word[2] == without[2] and with_word[3].length == without[3].length


@settings(deadline=None, max_examples=150)
@given(TEXT, CUTS, WORDS, st.integers(1, 9))
@example("abcabc", [1, 2, 3, 4, 5], ["bc"], 2)
@example("a<eom", [1, 2, 3, 4], ["<eo"], 2)  # its first token waits for what may be a control sequence
@example("abé", [1, 1, 1], ["b"], 2)  # a token without a text of its own
def test_no_word_begins_in_the_first_tokens(text, cuts, words, min_tokens):
    """Nothing ends an answer before it has ``min_tokens`` tokens."""
    _, streamed, tokens, answer = read(text, cuts, words, {}, min_tokens=min_tokens)
    parts = parts_of(text, cuts)
    given = [place for place, part in enumerate(parts) if part or place == len(parts) - 1]  # with the tokens before
    start = max((end + 1 for begin, end in itertools.pairwise([-1, *given]) if begin + 1 < min_tokens), default=0)
    found = [text.find(word, len("".join(parts[:start]))) for word in words]
    cut = min((at for at in found if at >= 0), default=None)
    assert "".join(streamed) == text[:cut]
    assert (answer.length is None) == (cut is None) and (answer.length or min_tokens) >= min_tokens
    with_markers = read(text, cuts, words, MACHINE, min_tokens=min_tokens)[3]
    assert (with_markers.length or min_tokens) >= min_tokens


@pytest.mark.parametrize("kind", [BPEStreamingDetokenizer, NaiveStreamingDetokenizer, SPMStreamingDetokenizer])
@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 419), min_size=1, max_size=30), st.data())
def test_tokens_of_any_detokenizer(kind, tokens, data):
    """They are a part of a character, or of several words."""
    tokenizer = TokenizerWrapper(TOKENIZER, kind)
    whole = tokenizer.detokenizer
    for token in tokens:
        whole.add_token(token)
    whole.finalize()
    text = whole.text
    start = data.draw(st.integers(0, len(text)))
    words = [text[start : start + data.draw(st.integers(1, 9))] or "none"]
    words += data.draw(st.lists(st.sampled_from(["e ", "the", "о", "停止", "\ufffd"]), max_size=2))
    answer = Answer(tokenizer.detokenizer, TextStateMachine(), "normal", words)
    found: list[Token] = []
    for number, token in enumerate(tokens, 1):
        found += answer.add(Token(token, 0.0, "length" if number == len(tokens) else None))
        if found and found[-1].finish_reason is not None:
            break
    cut = min((text.find(word) for word in words if word in text), default=None)
    assert "".join(each.text for each in found) == text[:cut]
    assert [each.finish_reason for each in found] == [None] * (len(found) - 1) + ["length" if cut is None else "stop"]
    assert [each.token for each in found] == tokens[: len(found)]


def test_the_end_of_an_answer_is_shown_but_for_a_character_that_is_not_complete():
    """Its last space, and what could have been the beginning of a control sequence or of a stop word."""
    tokenizer = TokenizerWrapper(TOKENIZER, BPEStreamingDetokenizer)
    for text, shown in (("a ", "a "), ("a<th", "a<th"), ("a st", "a st"), ("aй", "a")):
        answer = Answer(tokenizer.detokenizer, TextStateMachine(MACHINE), "normal", ["stop"])
        data = text.encode()[: -1 if shown == "a" else None]
        tokens = [TOKENIZER.convert_tokens_to_ids(BYTES[byte]) for byte in data]
        found = [answer.add(Token(token, 0.0, None)) for token in tokens] + [answer.add(Token(0, 0.0, "stop"))]
        assert "".join(token.text for step in found for token in step) == shown


@pytest.mark.parametrize("is_included", [True, False])
def test_the_text_of_a_stop_token_is_a_part_of_an_answer_that_includes_it(is_included):
    """Also one that completes a character, or begins one; the token that ends all answers is no text."""
    tokenizer = TokenizerWrapper(TOKENIZER, BPEStreamingDetokenizer)
    end = 5
    for text, hidden, shown in (("so.", (), "so."), ("aй", (), "aй"), (b"a\xd0", (), "a"), ("so.", (end,), "so")):
        data = text if isinstance(text, bytes) else text.encode()
        tokens = [TOKENIZER.convert_tokens_to_ids(BYTES[byte]) for byte in data]
        tokens = [*tokens[:-1], end] if hidden else tokens
        answer = Answer(
            tokenizer.detokenizer, TextStateMachine(MACHINE), "normal", ["never"], is_included, hidden, [tokens[-1]]
        )
        found = [answer.add(Token(token, 0.0, None)) for token in tokens[:-1]]
        found.append(answer.add(Token(tokens[-1], 0.0, "stop")))
        without = data[:-1].decode(errors="ignore")
        assert "".join(token.text for step in found for token in step) == (shown if is_included else without)


@pytest.mark.parametrize(
    "words, stops", [(["END"], False), (["</call>"], True), (["after"], False)], ids=["within", "its end", "after it"]
)
def test_a_stop_word_may_be_the_end_of_a_call(words, stops):
    text = 'so<call>{"stop": "END"}</call>and after'
    for size in range(1, len(text)):
        shown, _, _, answer = read(text, range(0, len(text), size), words, MACHINE)
        calls = [part for section, part in shown if section == "tool"]
        assert calls == (['{"stop": "'] if words == ["END"] else ['{"stop": "END"}'])
        assert answer.stop_word == words[0] and answer.stops_at_control_sequence == stops


def test_without_stop_words_text_comes_at_once():
    found = read("<think>a thought</think>and an <eom>answer<", range(100), [], MACHINE)
    assert found[0] == [("reasoning", "a thought"), ("normal", "and an answer<")] and found[3].length is None


@settings(deadline=None, max_examples=150)
@given(TEXT, CUTS)
@example("<call>b</call>a<call>", [])
@example("<call>b", [5])  # the end of a marker and text, in one token
def test_without_stop_words_pieces_are_the_text_wherever_its_tokens_end(text, cuts):
    """And the control sequences among them are those of the text, each by itself."""
    shown, streamed, tokens, _ = read(text, cuts, [], MACHINE)
    assert "".join(streamed) == text
    assert shown == read(text, range(len(text)), ["never"], MACHINE)[0]
    assert tokens == list(range(len(parts_of(text, cuts))))
