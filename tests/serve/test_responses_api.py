"""OpenAI's API of items: /v1/responses, with the `openai` package as client and reference."""

import functools
import json
import re
from pathlib import Path
from typing import get_args

import pytest
from calling_model import CALL, save_model_that_calls_a_tool
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_zero import ADMITTED, PROGRESS, answer, launcher_server, named_events_of, require_cancelled, said, started
from serving import ServerProcess, save_model_folder

from mlxdist.serve.api import ResponsesRequest, ResponseStore, check, parse
from mlxdist.serve.api.responses import MAX_ITEMS
from mlxdist.serve.listener import MAX_BODY
from mlxdist.serve.protocol import Admitted, Failed, Finished, Generate, Output, ToolCall
from mlxdist.serve.refusal import Refusal

GUIDE = Path(__file__).parents[2] / "docs" / "serve.md"
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
CALLED = ToolCall(name="look", arguments='{"at": 1}')
# What Codex CLI sends: instructions, developer messages and the environment, a call with its output, and no storage.
CODEX = {
    "model": "default_model",
    "instructions": "You are an agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Ask before you write."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment/>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look there."}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "I look."}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Yes.", "annotations": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "look", "arguments": '{"at": 1}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "a ring"},
    ],
    "tools": [LOOK | {"description": "Looks."}, {"type": "web_search", "external_web_access": False}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "a conversation",
    "text": {"verbosity": "low"},
}


@functools.cache
def types_of_events():
    """The `openai` package's class of each event, by its type."""
    import openai.types.responses as reference

    kinds = [getattr(reference, name) for name in dir(reference) if name.endswith("Event")]
    with_fields = [kind for kind in kinds if hasattr(kind, "model_fields")]
    return {get_args(kind.model_fields["type"].annotation)[0]: kind for kind in with_fields}


def response_of(found, strict=False):
    """The `openai` package's response."""
    from openai.types.responses import Response

    return Response.model_validate(found, strict=strict)


def request(**fields):
    return parse(json.dumps({"input": "What is a ring?"} | fields).encode(), ResponsesRequest)


def call(store=None, **fields) -> Generate:
    (made,) = request(**fields).turn(store or ResponseStore()).calls()
    return made


def message(*parts, **fields):
    return {"input": [{"role": "user", "content": list(parts)} | fields]}


def test_every_field_of_openais_requests_is_known():
    from openai.types.responses import response_create_params

    assert (
        response_create_params.ResponseCreateParamsBase.__annotations__.keys() <= ResponsesRequest.model_fields.keys()
    )


def test_docs_have_every_field():
    section = GUIDE.read_text().partition("## The Responses API\n")[2].partition("\n## ")[0]
    assert set(ResponsesRequest.model_fields) <= set(re.findall(r"`(\w+)`", section))


def test_a_request_of_codex_is_a_chat():
    made = call(**CODEX)
    function = {"name": "look", "arguments": '{"at": 1}'}
    assert made.prompt.messages == [
        {"role": "system", "content": "You are an agent."},
        {"role": "developer", "content": "Ask before you write."},
        {"role": "user", "content": "<environment/>"},
        {"role": "user", "content": "Look there."},
        {
            "role": "assistant",
            "content": "Yes.",
            "reasoning": "I look.",
            "reasoning_content": "I look.",
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "a ring", "tool_call_id": "call_1"},
    ]
    described = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    assert made.prompt.tools == [{"type": "function", "function": described}]
    assert made.prompt.template_arguments == {"reasoning_effort": "medium"}
    assert (made.tool_choice, made.parallel_tool_calls, made.max_tokens) == ("auto", False, None)


def test_fields_of_sampling_and_structured_output():
    schema = {"type": "object"}
    made = call(
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=7,
        tools=[LOOK],
        tool_choice={"type": "function", "name": "look"},
        text={"format": {"type": "json_schema", "name": "it", "schema": schema}},
    )
    assert (made.sampling.temperature, made.sampling.top_p, made.max_tokens) == (0.5, 0.9, 7)
    assert made.tool_choice == "look" and made.grammar is not None and made.grammar.value == schema


@pytest.mark.parametrize(
    "fields, words, param",
    [
        ({"input": None}, "is missing", "input"),
        ({"input": 5}, "must be a string or a list of items", "input"),
        ({"input": []}, "must not be empty", "input"),
        ({"input": [5]}, "must be an object of the type message, function_call, ", "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "must be an object of the type message", "input[0]"),
        ({"input": [{"role": "user"}]}, "is missing", "input[0].content"),
        ({"input": [{"role": "tool", "content": "x"}]}, "must be 'user', 'assistant'", "input[0].role"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": ""}]}, "must not be empty", "input[0].name"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "is missing", "input[0].call_id"),
        ({"input": [{"role": "user", "content": ""}] * (MAX_ITEMS + 1)}, "at most 16384 items", "input"),
        ({"input": [{"role": "user", "content": ""}] * 4097}, "at most 4096 messages", "input"),
        (message({"type": "input_image"}), "images and files are not served here", "input[0].content[0]"),
        (message({"type": "input_text", "text": 5}), "must be a string", "input[0].content[0].text"),
        (message(*[{"type": "input_text", "text": ""}] * 4097), "at most 4096 items", "input[0].content"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}] * 257},
            "a turn of the model with 257 calls; at most 256",
            "input",
        ),
        ({"tools": [{"type": "code_interpreter"}]}, "the server runs no tools", "tools[0]"),
        ({"tools": [{"type": "function"}]}, "is missing", "tools[0].name"),
        ({"tools": [LOOK] * 257}, "must have at most 256 items", "tools"),
        ({"tool_choice": "required"}, "there are no tools", "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "name": "see"}}, "none of tools", "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "there are no tools", "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "must have schema", "text.format"),
        ({"metadata": {"a": 1}}, "must be an object of strings", "metadata"),
        ({"max_output_tokens": 0}, "must be an integer from 1", "max_output_tokens"),
        ({"reasoning": {"effort": "huge"}}, "must be 'none', ", "reasoning.effort"),
        ({"conversation": "c"}, "previous_response_id replaces it", "conversation"),
        ({"background": True}, "is not served but as false", "background"),
        ({"max_output_token": 5}, "did you mean max_output_tokens?", "max_output_token"),
    ],
)
def test_requests_that_are_refused(fields, words, param):
    with pytest.raises(Refusal) as caught:
        call(**fields)
    assert words in str(caught.value) and (caught.value.status, caught.value.param) == (400, param)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab", max_size=3),
    lambda one: st.lists(one, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "role", "name"]), one),
    max_leaves=6,
)
ITEM = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning", "computer_call"]),
        "role": st.sampled_from(["user", "assistant", "system", "developer"]) | JSON,
        "content": st.lists(st.fixed_dictionaries({"type": st.just("input_text"), "text": JSON})) | JSON,
        **dict.fromkeys(("call_id", "name", "arguments", "output", "summary"), JSON),
    },
)


@settings(deadline=None, max_examples=300)
@given(st.lists(ITEM | JSON, max_size=4) | JSON, JSON, JSON, JSON)
def test_any_json_is_a_chat_or_a_400(items, tools, choice, text):
    try:
        fields = {"input": items, "tools": tools, "tool_choice": choice, "text": text}
        (made,) = check(fields, ResponsesRequest).turn(ResponseStore()).calls()
    except Refusal as refusal:
        assert refusal.status == 400 and str(refusal)
        return
    assert made.prompt.messages and all(isinstance(each["content"], str | None) for each in made.prompt.messages)
    roles = [message["role"] for message in made.prompt.messages]
    assert ("assistant", "assistant") not in zip(roles, roles[1:])


PIECES = st.text("ab é\n\U0001f600", max_size=4)
OUTPUTS = st.builds(Output, content=PIECES, reasoning=PIECES, tool_calls=st.lists(st.just(CALLED), max_size=2))
ENDS = st.builds(
    Finished, finish_reason=st.sampled_from(["stop", "length", "tool_calls"]), completion_tokens=st.integers(1, 99)
)


def checked(events):
    """The last response of a stream, whose events are valid, counted, and say what it has."""
    texts, items, last = {}, {}, events[-1]["response"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        types_of_events()[event["type"]].model_validate(event, strict=True)
        kind, index = event["type"].removeprefix("response."), event.get("output_index")
        if kind == "output_item.added":
            assert index == len(items)
            items[index], texts[index] = event["item"], ""
        elif kind.endswith(".delta"):
            assert (index, event["item_id"]) == (len(items) - 1, items[index]["id"])
            texts[index] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == texts[index]
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == texts[index]
        elif kind == "output_item.done":
            items[index] = event["item"]
    assert list(items.values()) == last["output"] or last["status"] == "failed"  # with an item that has no end
    assert texts == {number: text_of(item) for number, item in enumerate(last["output"])}
    return last


def text_of(item):
    return item["arguments"] if item["type"] == "function_call" else "".join(each["text"] for each in item["content"])


@settings(deadline=None, max_examples=150)
@given(st.lists(OUTPUTS, max_size=6), ENDS)
def test_the_events_of_a_stream_join_to_the_whole_response(outputs, end):
    store = ResponseStore()
    builder = request(tools=[LOOK]).turn(store).answer("7", 1_700_000_000)
    events = []
    for event in (Admitted(model="qwen", prompt_tokens=9, cached_tokens=4), *outputs, end):
        events += builder.add(0, event)
    events = json.loads(json.dumps(events + builder.last()))
    whole = json.loads(json.dumps(builder.whole()))
    assert checked(events) == whole
    response = response_of(whole, strict=True)
    assert response.output_text == "".join(each.content for each in outputs)
    thoughts = [text_of(item) for item in whole["output"] if item["type"] == "reasoning"]
    assert "".join(thoughts) == "".join(each.reasoning for each in outputs)
    called = [item for item in response.output if item.type == "function_call"]
    assert [(item.name, item.arguments) for item in called] == [("look", '{"at": 1}')] * sum(
        len(each.tool_calls) for each in outputs
    )
    assert (response.usage.input_tokens, response.usage.input_tokens_details.cached_tokens) == (9, 4)
    assert response.usage.total_tokens == 9 + end.completion_tokens
    is_cut = end.finish_reason == "length"
    assert response.status == ("incomplete" if is_cut else "completed")
    assert (response.incomplete_details is not None) == is_cut
    # The conversation that it leaves is that of a client which sends the items back.
    items = [{"role": "user", "content": "What is a ring?"}, *whole["output"]]
    assert store.get(whole["id"]) == check({"input": items}, ResponsesRequest).messages()


def test_the_store_has_a_bound():
    conversation = [{"role": "user", "content": "x" * 1000}]
    size = len(json.dumps(conversation))
    store = ResponseStore(3 * size)
    for name in "abc":
        store.put(name, conversation)
    store.get("a")  # now b has not been used for the longest
    store.put("d", conversation)
    assert [store.get(name) for name in "acd"] == [conversation] * 3
    for name in ("b", "never", "x" * 1000):
        with pytest.raises(Refusal, match="send the conversation as input") as caught:
            store.get(name)
        assert (caught.value.status, caught.value.code) == (404, "previous_response_not_found")
    ResponseStore(size - 1).put("a", conversation)  # is not kept, and evicts nothing
    whole = ResponseStore()
    whole.put("long", [{"role": "user", "content": "x" * MAX_BODY}])
    with pytest.raises(Refusal):
        whole.get("long")


def test_a_conversation_of_too_many_messages_is_refused():
    store = ResponseStore()
    store.put("resp_1", [{"role": "user", "content": ""}] * 4096)
    with pytest.raises(Refusal, match="at most 4096 messages"):
        call(store, previous_response_id="resp_1")


def ask(*events, **fields):
    return {"input": json.dumps([list(events)])} | fields


def there(client):
    import openai

    return openai.OpenAI(base_url=f"{client.server.address}/v1", api_key="none", max_retries=0)


def test_openais_client_has_a_response_and_a_stream(client, rank_0):
    events = said(ADMITTED, PROGRESS, Output(reasoning="Hm"), Output(content="Hello"), Output(content=" you"))
    events += said(Output(tool_calls=[CALLED]), Finished(finish_reason="tool_calls", completion_tokens=7))
    with there(client) as openai_client:
        whole = openai_client.responses.create(model="tiny", tools=[LOOK], **ask(*events))
        with openai_client.responses.stream(model="tiny", tools=[LOOK], **ask(*events)) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            streamed = stream.get_final_response()
    assert (whole.output_text, text, streamed.output_text) == ("Hello you",) * 3
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert (whole.status, streamed.status, whole.usage.output_tokens) == ("completed", "completed", 7)
    assert streamed.output[2].arguments == whole.output[2].arguments == '{"at": 1}'


def test_the_order_of_the_events(client, rank_0):
    events = said(ADMITTED, PROGRESS, Output(reasoning="Hm", content="Hi"), Output(tool_calls=[CALLED]))
    events += said(Finished(finish_reason="length", completion_tokens=3))
    _, text, headers = client.request("POST", "/v1/responses", ask(*events, stream=True))
    found = named_events_of(text)
    part = lambda kind: [
        "output_item.added",
        "content_part.added",
        f"{kind}.delta",
        f"{kind}.done",
        "content_part.done",
        "output_item.done",
    ]
    called = ["function_call_arguments.delta", "function_call_arguments.done"]
    assert [event["type"].removeprefix("response.") for event in found] == [
        *("created", "in_progress"),
        *part("reasoning_text"),
        *part("output_text"),
        *("output_item.added", *called, "output_item.done"),
        "incomplete",
    ]
    assert checked(found)["incomplete_details"] == {"reason": "max_output_tokens"}
    assert text.startswith(": keepalive 1/3\n\nevent: response.created\n") and "[DONE]" not in text
    assert headers["Content-Type"] == "text/event-stream; charset=utf-8"


def test_errors_have_openais_form(client, rank_0):
    import openai

    refused = Failed(message="it is so", status=429, retry_after=7)
    for streams in (False, True):
        status, body, headers = client.request("POST", "/v1/responses", ask(*said(refused), stream=streams))
        assert (status, headers["Retry-After"], body["error"]["type"]) == (429, "7", "rate_limit_error")
    for body, status in ((b"{", 400), ({"input": 5}, 400), ({"input": "x", "previous_response_id": "resp_1"}, 404)):
        assert client.request("POST", "/v1/responses", body)[0] == status
    with there(client) as openai_client, pytest.raises(openai.NotFoundError) as caught:
        openai_client.responses.create(model="tiny", input="x", previous_response_id="resp_1")
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


@pytest.mark.parametrize("outputs", [[], [Output(content="He")]])
def test_an_error_in_a_stream_is_a_response_that_has_failed(client, rank_0, outputs):
    failed = Failed(message="the grammar of the request has failed", status=500)
    _, text, _ = client.request("POST", "/v1/responses", ask(*said(ADMITTED, *outputs, failed), stream=True))
    found = named_events_of(text)
    assert found[0]["type"] == "response.created" and found[-1]["type"] == "response.failed"
    response = response_of(checked(found), strict=True)
    assert (response.status, response.error.message) == ("failed", failed.message)
    assert response.output_text == "".join(each.content for each in outputs)


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_leaves_cancels_its_request(client, rank_0, streams):
    body = ask(*said(ADMITTED, Output(content="He")), "wait", stream=streams)
    require_cancelled(client, rank_0, "/v1/responses", body)


@pytest.mark.parametrize("streams", [False, True])
def test_a_response_is_continued_unless_it_is_not_stored(streams):
    with launcher_server() as client, started(client) as rank_0:

        def respond(**fields):
            body = ask(*answer("Hi"), stream=streams) | fields
            status, found, _ = client.request("POST", "/v1/responses", body, X_Request_Id="guessed")
            assert status == 200, found
            return named_events_of(found)[-1]["response"] if streams else found

        first = respond(instructions="Be brief.", metadata={"a": "b"})
        assert "guessed" not in first["id"] and first["metadata"] == {"a": "b"}
        second = respond(previous_response_id=first["id"])
        assert second["previous_response_id"] == first["id"]
        question = {"role": "user", "content": json.dumps([answer("Hi")])}
        turn = [question, {"role": "assistant", "content": "Hi"}]
        asked = [each["prompt"]["messages"] for each in rank_0.calls]
        assert asked == [[{"role": "system", "content": "Be brief."}, question], [*turn, question]]
        third = respond(previous_response_id=second["id"], store=False)
        assert rank_0.calls[-1]["prompt"]["messages"] == [*turn, *turn, question]
        status, found, _ = client.request("POST", "/v1/responses", {"input": "x", "previous_response_id": third["id"]})
        assert (status, found["error"]["code"]) == (404, "previous_response_not_found")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with ServerProcess(save_model_folder(tmp_path_factory.mktemp("model") / "tiny")) as server:
        yield server


def test_the_text_is_that_of_a_chat(server):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a ring?"}]
    expected = server.ask({"messages": chat, "max_tokens": 20}, "/v1/chat/completions")
    body = {"instructions": "Be brief.", "input": "What is a ring?", "max_output_tokens": 20}
    found = server.ask(body, "/v1/responses")
    text = response_of(found).output_text
    assert text == expected["choices"][0]["message"]["content"] and text
    usage = expected["usage"]["prompt_tokens"], expected["usage"]["completion_tokens"]
    assert (found["usage"]["input_tokens"], found["usage"]["output_tokens"]) == usage
    streamed = checked(named_events_of(server.stream_text(body, "/v1/responses")))
    assert (response_of(streamed).output_text, streamed["status"]) == (text, found["status"])


ONE = {"type": "object", "properties": {"at": {"enum": [1]}}, "required": ["at"], "additionalProperties": False}


@pytest.mark.parametrize("choice", [{"type": "function", "name": "look"}, None])
def test_output_that_the_request_demands(server, choice):
    body = {"input": "What is a ring?", "max_output_tokens": 100}
    if choice:
        body |= {"tools": [LOOK | {"parameters": ONE}], "tool_choice": choice}
    else:
        body["text"] = {"format": {"type": "json_schema", "name": "it", "schema": ONE}}
    found = server.ask(body, "/v1/responses")
    (item,) = found["output"]
    assert json.loads(text_of(item)) == {"at": 1} and found["status"] == "completed"
    assert item["type"] == ("function_call" if choice else "message")
    streamed = checked(named_events_of(server.stream_text(body, "/v1/responses")))
    assert [text_of(each) for each in streamed["output"]] == [text_of(item)]


NEW = 4  # tokens of a turn: the beginnings of two messages, and two words between them


@pytest.mark.parametrize("continues", [True, pytest.param(False, marks=pytest.mark.long)])
def test_ten_turns_with_tools_compute_only_their_new_tokens(tmp_path, continues):
    """With the history that a client sends, or with that which the server has kept."""
    import openai

    with ServerProcess(save_model_that_calls_a_tool(tmp_path / "caller")) as server:
        fields, length = {"model": "caller", "max_output_tokens": 20, "tools": [LOOK]}, 0
        items = [{"role": "user", "content": "w5"}]
        with openai.OpenAI(base_url=server.address + "/v1", api_key="none", max_retries=0) as client:
            for turn in range(10):
                made = client.responses.create(input=items, **fields)
                (called,) = made.output
                assert (called.type, called.name, json.loads(called.arguments)) == ("function_call", "look", {"at": 1})
                cached = made.usage.input_tokens_details.cached_tokens
                if turn:  # the last prompt and its answer are cached
                    assert cached == length + len(CALL)
                    assert made.usage.input_tokens - cached == NEW
                length = made.usage.input_tokens
                result = {"type": "function_call_output", "call_id": called.call_id, "output": f"w{turn} w9"}
                items = [result] if continues else [*items, called.model_dump(exclude_none=True), result]
                fields |= {"previous_response_id": made.id} if continues else {}
        metrics = server.metrics()
        assert metrics["prompt_tokens_total"] - metrics["cached_prompt_tokens_total"] == 3 + 9 * NEW
