"""Answers of OpenAI's API: what the events of rank 0 become, whole and in chunks, for the `openai` package's models."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxdist.serve.api import ChatRequest, CompletionRequest, check, model_object, models_list
from mlxdist.serve.protocol import Admitted, Finished, Output, Progress, TokenLogprob, ToolCall
from mlxdist.serve.refusal import Refusal

QUESTION = [{"role": "user", "content": "What is a ring?"}]
PIECES = st.text("ab é\n\U0001f600", max_size=4)


def token(text, number=7, logprob=-0.5, top=(), raw=None):
    data = text.encode() if raw is None else raw
    return TokenLogprob(id=number, text=text, bytes=list(data), logprob=logprob, top=list(top))


def chat(**fields):
    return check({"messages": QUESTION} | fields, ChatRequest).answer("7", 1_700_000_000)


def completion(**fields):
    return check({"prompt": "Once"} | fields, CompletionRequest).answer("7", 1_700_000_000)


def finished(reason="stop", tokens=3, stop_reason=None):
    return Finished(finish_reason=reason, completion_tokens=tokens, stop_reason=stop_reason)


def admitted(prompt=5, cached=2, text=None):
    return Admitted(model="qwen", prompt_tokens=prompt, cached_tokens=cached, prompt_text=text)


def run(answer, *events):
    """The chunks that events make, of choice 0 or of (choice, event), with the last ones."""
    chunks = []
    for event in events:
        chunks += answer.add(*event) if isinstance(event, tuple) else answer.add(0, event)
    return chunks + answer.last()


TOKENS = st.builds(
    token,
    PIECES,
    st.integers(0, 300),
    st.floats(-50, 0),
    st.lists(st.builds(token, PIECES, st.integers(0, 300), st.floats(-50, 0)), max_size=3),
    st.none() | st.binary(max_size=3),
)
CALLS = st.builds(
    ToolCall, name=st.sampled_from(["get_weather", "f"]), arguments=st.sampled_from(["{}", '{"city": "é"}'])
)
OUTPUTS = st.builds(
    Output,
    content=PIECES,
    reasoning=PIECES,
    tool_calls=st.lists(CALLS, max_size=2),
    tokens=st.lists(TOKENS, max_size=3),
)
TEXTS = st.builds(Output, content=PIECES, tokens=st.lists(TOKENS, max_size=3))
ENDS = st.builds(
    finished, st.sampled_from(["stop", "length", "tool_calls"]), st.integers(1, 99), st.sampled_from([None, "END", 5])
)
TEXT_ENDS = st.builds(
    finished, st.sampled_from(["stop", "length"]), st.integers(1, 99), st.sampled_from([None, "END", 5])
)


@st.composite
def interleaved(draw, choices, outputs, ends, prompt_text=None):
    """The events of all choices, each in its order."""
    queues = []
    for _ in range(choices):
        first = [admitted(text=prompt_text), Progress(processed=3, total=5)]
        queues.append([*first, *draw(st.lists(outputs, max_size=5)), draw(ends)])
    events = []
    while any(queues):
        choice = draw(st.sampled_from([number for number, queue in enumerate(queues) if queue]))
        events.append((choice, queues[choice].pop(0)))
    return events


@settings(deadline=None, max_examples=150)
@given(interleaved(2, OUTPUTS, ENDS))
def test_the_chunks_of_a_chat_join_to_the_whole_answer(events):
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    answer = chat(n=2, logprobs=True, stream_options={"include_usage": True})
    chunks = [
        ChatCompletionChunk.model_validate(json.loads(json.dumps(chunk)), strict=True) for chunk in run(answer, *events)
    ]
    whole = ChatCompletion.model_validate(json.loads(json.dumps(answer.whole())), strict=True)
    for index, choice in enumerate(whole.choices):
        parts = [part for chunk in chunks for part in chunk.choices if part.index == index]
        deltas = [part.delta for part in parts]
        assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
        assert "".join(delta.content or "" for delta in deltas) == (choice.message.content or "")
        joined = "".join(getattr(delta, "reasoning", None) or "" for delta in deltas)
        assert joined == getattr(choice.message, "reasoning", "")
        called = [call for delta in deltas for call in delta.tool_calls or []]
        assert [call.index for call in called] == list(range(len(called)))
        assert [(call.id, call.function.name, call.function.arguments) for call in called] == [
            (call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls or []
        ]
        tokens = [each for part in parts if part.logprobs for each in part.logprobs.content]
        assert tokens == (choice.logprobs.content if choice.logprobs else [])
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
    assert [chunk.usage for chunk in chunks] == [None] * (len(chunks) - 1) + [whole.usage]
    assert chunks[-1].choices == [] and {chunk.id for chunk in chunks} == {whole.id}


@settings(deadline=None, max_examples=100)
@given(interleaved(1, OUTPUTS, ENDS))
def test_a_whole_chat_has_what_the_events_had(events):
    answer = chat(logprobs=True)
    run(answer, *events)
    message = answer.whole()["choices"][0]["message"]
    outputs = [event for _, event in events if isinstance(event, Output)]
    text, calls = "".join(each.content for each in outputs), [call for each in outputs for call in each.tool_calls]
    assert message["content"] == (text or (None if calls else ""))
    assert message.get("reasoning", "") == "".join(each.reasoning for each in outputs)
    assert [each["function"] for each in message.get("tool_calls", [])] == [call.model_dump() for call in calls]
    found = answer.whole()["choices"][0]["logprobs"]
    assert [each["id"] for each in (found or {"content": []})["content"]] == [
        t.id for each in outputs for t in each.tokens
    ]


@settings(deadline=None, max_examples=150)
@given(interleaved(4, TEXTS, TEXT_ENDS, "Once"))
def test_the_chunks_of_completions_join_to_the_whole_answer(events):
    from openai.types import Completion

    answer = completion(prompt=["Once", "Twice"], n=2, echo=True, stream_options={"include_usage": True})
    made = run(answer, *events)
    chunks = [Completion.model_validate(json.loads(json.dumps(_ended(chunk))), strict=True) for chunk in made]
    whole = Completion.model_validate(json.loads(json.dumps(answer.whole())), strict=True)
    for index, choice in enumerate(whole.choices):
        parts = [part for chunk in chunks for part in chunk.choices if part.index == index]
        outputs = [event for number, event in events if number == index and isinstance(event, Output)]
        assert "".join(part.text for part in parts) == choice.text == "Once" + "".join(each.content for each in outputs)
        reasons = [part["finish_reason"] for chunk in made for part in chunk["choices"] if part["index"] == index]
        assert reasons == [None] * (len(parts) - 1) + [choice.finish_reason]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [each for part in parts if part.logprobs for each in getattr(part.logprobs, name)]
            assert joined == (getattr(choice.logprobs, name) if choice.logprobs else [])
    assert [chunk.usage for chunk in chunks] == [None] * (len(chunks) - 1) + [whole.usage]


def _ended(chunk):
    """OpenAI's API has null for the reason of a part that is not the last; its model has one class for both."""
    parts = [part | {"finish_reason": part["finish_reason"] or "stop"} for part in chunk["choices"]]
    return chunk | {"choices": parts}


def test_openais_own_client_reads_the_stream_of_a_chat():
    from openai.lib.streaming.chat import ChatCompletionStreamState
    from openai.types.chat import ChatCompletionChunk

    answer = chat(logprobs=True, stream_options={"include_usage": True})
    called = ToolCall(name="get_weather", arguments='{"city": "Paris"}')
    chunks = run(
        answer,
        admitted(),
        Output(reasoning="Look it up."),
        Output(content="One ", tokens=[token("One ")]),
        Output(content="moment", tokens=[token("moment")]),
        Output(tool_calls=[called, called]),
        finished("tool_calls", 12),
    )
    state = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    made = state.get_final_completion()
    choice = made.choices[0]
    assert (choice.message.content, choice.finish_reason, made.model) == ("One moment", "tool_calls", "qwen")
    assert [call.function.arguments for call in choice.message.tool_calls] == ['{"city": "Paris"}'] * 2
    assert [each.token for each in choice.logprobs.content] == ["One ", "moment"]
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (5, 12)


def test_content_is_always_there():
    answer = chat(n=3)
    run(answer, (0, Output(content="A")), (1, Output(tool_calls=[ToolCall(name="f", arguments="{}")])), (2, finished()))
    assert [choice["message"]["content"] for choice in answer.whole()["choices"]] == ["A", None, ""]
    assert "tool_calls" not in answer.whole()["choices"][0]["message"]


def test_nothing_is_sent_before_there_is_a_part_of_the_answer():
    """A request of which nothing was sent is computed again when a rank has died."""
    for answer in (chat(), completion(echo=True)):
        assert run(answer, admitted(text="Once"), Progress(processed=1, total=5), Output()) == []
        assert run(answer, Output(tokens=[token("A")])) == []


def test_a_second_try_counts_its_prompt_once():
    answer = completion(echo=True)
    run(answer, admitted(text="Once"), admitted(text="Once"), Output(content=" more"), finished())
    assert answer.whole()["choices"][0]["text"] == "Once more" and answer.prompt_tokens == 5


def test_a_stream_without_usage_has_none():
    chunks = run(chat(), admitted(), Output(content="A"), finished())
    assert len(chunks) == 2 and not any("usage" in chunk for chunk in chunks)


@pytest.mark.parametrize("reason", ["END", 5, None])
def test_the_reason_of_a_stop_is_in_the_last_chunk_and_in_the_whole_answer(reason):
    answer = completion()
    last = run(answer, admitted(), Output(content="A"), finished(stop_reason=reason))[-1]
    assert last["choices"][0]["stop_reason"] == answer.whole()["choices"][0]["stop_reason"] == reason


def test_usage_counts_a_prompt_once_and_its_choices_each():
    answer = completion(prompt=["a", "b"], n=2)
    prompts = [admitted(5, 0), admitted(5, 5), admitted(7, 3), admitted(7, 7)]
    run(answer, *enumerate(prompts), *((number, finished(tokens=number + 1)) for number in range(4)))
    assert answer.whole()["usage"] == {
        "prompt_tokens": 12,
        "completion_tokens": 10,
        "total_tokens": 22,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert (answer.prompt_tokens, answer.completion_tokens) == (12, 10)
    assert answer.finish_reasons == ["stop"] * 4


def test_logprobs_of_a_chat_have_bytes_tops_and_mlx_lms_ids():
    answer = chat(logprobs=True, top_logprobs=1)
    top = token("B", 8, -0.25)
    (chunk, *_) = run(answer, admitted(), Output(content="A", tokens=[token("A", 7, -0.5, [top])]))
    assert chunk["choices"][0]["logprobs"]["content"] == [
        {
            "id": 7,
            "token": "A",
            "bytes": [65],
            "logprob": -0.5,
            "top_logprobs": [{"id": 8, "token": "B", "bytes": [66], "logprob": -0.25}],
        }
    ]


def test_logprobs_of_completions_have_offsets_in_characters():
    """Also of tokens that are parts of a character; of tops with the same text the likelier one counts."""
    first, second = "\U0001f600".encode()[:2], "\U0001f600".encode()[2:]
    tops = [token("\ufffd", 1, -0.1), token("\ufffd", 2, -3.0), token("x", 3, -4.0)]
    answer = completion(logprobs=3)
    parts = [
        token("é", 4, -1.0),
        token("\ufffd", 2, -3.0, tops, raw=first),
        token("\ufffd", 5, -1.0, raw=second),
        token("b", 6, -2.0, [token("c", 9, -0.5)]),
    ]
    run(answer, admitted(), Output(content="é\U0001f600b", tokens=parts), finished())
    assert answer.whole()["choices"][0]["logprobs"] == {
        "tokens": ["é", "\ufffd", "\ufffd", "b"],
        "token_ids": [4, 2, 5, 6],
        "token_logprobs": [-1.0, -3.0, -1.0, -2.0],
        "top_logprobs": [{"é": -1.0}, {"\ufffd": -0.1, "x": -4.0}, {"\ufffd": -1.0}, {"c": -0.5, "b": -2.0}],
        "text_offset": [0, 1, 1, 2],
    }


def test_the_list_of_models_has_the_model_and_its_adapters():
    from openai.types import Model

    listed = models_list(["org/qwen", "qwen"], ["sql"], 1_700_000_000)
    assert [Model.model_validate(each, strict=True).id for each in listed["data"]] == ["org/qwen", "sql"]
    assert listed["data"][1]["parent"] == "org/qwen"
    for name, found in (("qwen", "org/qwen"), ("org/qwen", "org/qwen"), ("sql", "sql")):
        assert model_object(name, ["org/qwen", "qwen"], ["sql"], 1)["id"] == found
    with pytest.raises(Refusal) as caught:
        model_object("gpt-4", ["org/qwen"], ["sql"], 1)
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


def test_an_echo_with_logprobs_begins_with_a_token_that_has_none():
    answer = completion(echo=True, logprobs=1, max_tokens=0)
    first = TokenLogprob(id=1, text="On", bytes=list(b"On"), logprob=None)
    second = TokenLogprob(id=2, text="ce", bytes=list(b"ce"), logprob=-3.0, top=[token("x", logprob=-0.5)])
    events = admitted(text="Once"), Output(tokens=[first]), Output(tokens=[second])
    assert run(answer, *events) == []  # nothing is sent before there is a part of the answer
    chunks = run(answer, finished("length", 0))
    (choice,) = answer.whole()["choices"]
    assert chunks[0]["choices"] == [choice] and (choice["text"], choice["finish_reason"]) == ("Once", "length")
    assert choice["logprobs"] == {
        "tokens": ["On", "ce"],
        "token_ids": [1, 2],
        "token_logprobs": [None, -3.0],
        "top_logprobs": [None, {"x": -0.5, "ce": -3.0}],
        "text_offset": [0, 2],
    }
