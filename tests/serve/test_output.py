"""The events of an answer: text, thoughts and calls of tools, of which nothing is lost that the model has written."""

import asyncio
import json

import pytest
from bpe_models import bpe_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.generate import TextStateMachine
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper, _byte_decoder

from mlxdist.serve.answer import Answer, Token
from mlxdist.serve.output import OutputBuilder
from mlxdist.serve.protocol import Finished, ToolCall
from mlxdist.serve.token_bytes import TokenBytes

TOKENIZER = bpe_tokenizer()
BYTES = {value: character for character, value in _byte_decoder().items()}
MACHINE = TextStateMachine(
    {
        "normal": [("<think>", "reasoning"), ("<call>", "tool"), ("<eom>", "normal")],
        "reasoning": [("</think>", "normal"), ("<call>", "tool")],
        "tool": [("</call>", "normal")],
    }
)
GOOD = '{"name": "look", "arguments": {"at": 1}}'
CALL = ToolCall(name="look", arguments='{"at": 1}')
END = 0


async def parse(text):
    """The calls of a text, as a parser of mlx-lm finds them."""
    try:
        found = json.loads(text)
        return [ToolCall(name=found["name"], arguments=json.dumps(found["arguments"]))]
    except (ValueError, KeyError, TypeError):
        return None


def read(text, reason="stop", calls="text", parses_tools=True, parallel=True, words=(), sizes=(1,), grammar=False):
    """(content, reasoning, calls, Finished) of an answer whose tokens are the bytes of a text."""
    tokenizer = TokenizerWrapper(TOKENIZER, BPEStreamingDetokenizer)
    answer = Answer(tokenizer.detokenizer, MACHINE, "normal", words)
    output = OutputBuilder(answer, "normal", calls, parses_tools, parallel, parse, None, grammar)
    tokens = [TOKENIZER.convert_tokens_to_ids(BYTES[byte]) for byte in text.encode()]
    made = [Token(token, 0.0, None) for token in tokens]
    made = [*made, Token(END, 0.0, "stop")] if reason == "stop" else [*made[:-1], Token(tokens[-1], 0.0, reason)]
    decided = []
    for token in made:
        decided += answer.add(token)
        if answer.length is not None:
            break

    async def events():
        found, at, number = [], 0, 0
        while at < len(decided):
            size = sizes[number % len(sizes)]
            found += await output.read(decided[at : at + size])
            at, number = at + size, number + 1
        return found

    *parts, last = asyncio.run(events())
    assert isinstance(last, Finished)
    return (
        "".join(part.content for part in parts),
        "".join(part.reasoning for part in parts),
        [call for part in parts for call in part.tool_calls],
        last,
    )


def test_text_and_thoughts():
    content, reasoning, calls, last = read("<think>a thought</think>and an <eom>answer")
    assert (content, reasoning, calls) == ("and an answer", "a thought", [])
    assert (last.finish_reason, last.stop_reason, last.completion_tokens) == ("stop", None, 43)


@pytest.mark.parametrize("end", ["</call>", ""], ids=["with its end", "up to the end of the answer"])
def test_a_call_of_a_tool(end):
    """Spaces between calls are no text."""
    content, _, calls, last = read(f"so<call>{GOOD}</call>\n<call>{GOOD}{end}")
    assert (content, calls, last.finish_reason) == ("so", [CALL, CALL], "tool_calls")


def test_text_after_a_call_has_its_spaces():
    assert read(f"<call>{GOOD}</call>\n\nso")[0] == "\n\nso"


def test_calls_after_the_first_one_where_there_may_be_one():
    assert read(f"<call>{GOOD}</call><call>{GOOD}</call>", parallel=False)[2] == [CALL]


BROKEN = ["", "   ", "{", '{"name": "look"}', '{"name": 5, "arguments"', "look(at=1)"]


@pytest.mark.parametrize("text", BROKEN)
def test_a_call_that_is_none_is_text(text):
    content, _, calls, last = read(f"so<call>{text}</call>and<call>{GOOD}</call>")
    assert (content, calls, last.finish_reason) == (f"so<call>{text}</call>and", [CALL], "tool_calls")
    content, _, calls, last = read(f"so<call>{text}</call>")
    assert (content, calls, last.finish_reason) == (f"so<call>{text}</call>", [], "stop")


def test_a_call_that_is_cut_off_is_text():
    for reason, words in (("length", []), ("stop", ["at"])):
        content, _, calls, last = read(f"so<call>{GOOD}", reason, words=words)
        written = GOOD if reason == "length" else GOOD[: GOOD.index("at")]
        assert (content, calls, last.finish_reason) == (f"so<call>{written}", [], reason)
        assert last.stop_reason == (words[0] if words else None)


def test_a_call_before_a_stop_word_that_is_its_end():
    content, _, calls, last = read(f"so<call>{GOOD}</call>", words=["</call>"])
    assert (content, calls, last.finish_reason) == ("so", [CALL], "tool_calls")


def test_without_tools_all_that_looks_like_a_call_is_text():
    text = f"so<call>{GOOD}</call> and<think>a thought</think>"
    content, reasoning, calls, last = read(text, parses_tools=False)
    assert (content, reasoning) == (text.partition("<think>")[0], "a thought")
    assert (calls, last.finish_reason) == ([], "stop")


@pytest.mark.parametrize("calls, reason", [("list", "tool_calls"), ("arguments", "stop")])
def test_an_answer_that_is_a_call_as_a_whole(calls, reason):
    """OpenAI says "stop" where the request names the function."""
    assert read(GOOD, calls=calls)[::3][0] == "" and read(GOOD, calls=calls)[2] == [CALL]
    assert read(GOOD, calls=calls)[3].finish_reason == reason
    content, _, found, last = read(GOOD[:-3], "length", calls=calls)
    assert (content, found, last.finish_reason) == (GOOD[:-3], [], "length")


IN_JSON = [
    "<think>a</think>",
    f"<call>{GOOD}</call>".replace('"', "'"),
    "<call>{}</call>",
    "</think>",
    "<eom>",
    "<call>",
]


@pytest.mark.parametrize("text", IN_JSON)
@pytest.mark.parametrize("parses_tools", [False, True])
def test_what_looks_like_a_control_sequence_in_the_content_of_a_grammar_is_text(text, parses_tools):
    written = json.dumps({"name": "look", "arguments": {"at": text}})
    content, reasoning, calls, _ = read(f"<think>so</think>\n{written}", parses_tools=parses_tools, grammar=True)
    assert (content, reasoning, calls) == ("\n" + written, "so", [])
    for how in ("list", "arguments"):
        content, _, calls, _ = read(written, calls=how, grammar=True)
        assert content == "" and [json.loads(call.arguments) for call in calls] == [{"at": text}]


def test_a_call_before_the_content_of_a_grammar():
    for text in (
        f"<call>{GOOD}</call>\n<call>{GOOD}</call>",
        f"<think>so</think>\n<call>{GOOD}</call><call>{GOOD}</call>",
    ):
        assert read(text, grammar=True)[2] == [CALL, CALL]


def test_spaces_before_a_call_that_is_cut_off_are_text():
    assert read(f"<call>{GOOD}</call>\n\n<call>{GOOD[:-3]}", "length")[0] == f"\n\n<call>{GOOD[:-3]}"


PARTS = st.sampled_from(["a", " ", "\n", "é", "<", "</call>", "<call>", "<think>", "</think>", GOOD, "{"])


@settings(deadline=None, max_examples=100)
@given(st.lists(PARTS, max_size=10).map("".join), st.lists(st.integers(1, 9), min_size=1, max_size=5))
@example("<call><call>{</call>", [1])
def test_nothing_is_lost_however_tokens_come_together(text, sizes):
    """But the markers of thoughts, and spaces after a call."""
    content, reasoning, calls, last = read(text, sizes=sizes)
    assert (content, reasoning, calls, last) == read(text, sizes=[1])
    written = content + reasoning + "".join(f"<call>{GOOD}</call>" for _ in calls)
    kept = lambda each: sorted(each.replace("<think>", "").replace("</think>", "").split())
    count = lambda each: {
        character: "".join(kept(each)).count(character) for character in set(each) - set("<>/thinkcal ")
    }
    found, expected = count(written), count(text)
    for character in expected:
        assert found.get(character, 0) == expected[character] or character in "\n"


def test_the_bytes_of_tokens():
    """A token may be a part of a character, and its text is none then."""
    tokenizer = TokenizerWrapper(TOKENIZER, BPEStreamingDetokenizer)
    texts = TokenBytes(tokenizer)
    text = "a слово, naïve 停止"
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    assert b"".join(texts.of(token) for token in tokens) == text.encode()
    first, *_ = [TOKENIZER.convert_tokens_to_ids(BYTES[byte]) for byte in "й".encode()]
    entry = texts.logprob(Token(first, -0.5, None, ((first, -0.5), (tokens[0], -1.0))))
    assert (entry.text, bytes(entry.bytes), entry.logprob) == ("\ufffd", "й".encode()[:1], -0.5)
    assert [bytes(each.bytes) for each in entry.top] == ["й".encode()[:1], texts.of(tokens[0])]
