"""Anthropic's API: /v1/messages and /v1/messages/count_tokens, with the `anthropic` package as client and reference."""

import contextlib
import json
import re
from pathlib import Path

import pytest
from calling_model import CALL, TOOL, save_model_that_calls_a_tool
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_zero import ADMITTED, PROGRESS, answer, launcher_server, named_events_of, require_cancelled, said, started
from serving import ServerProcess, save_model_folder
from waiting import wait_for

from mlxdist.serve.api import CountTokensRequest, MessagesRequest, check, parse
from mlxdist.serve.api.anthropic import MAX_BLOCKS
from mlxdist.serve.protocol import Admitted, Failed, Finished, Generate, Output, ToolCall
from mlxdist.serve.refusal import Refusal

GUIDE = Path(__file__).parents[2] / "docs" / "serve.md"
LOOK = {"name": "look", "input_schema": {"type": "object"}}
CALLED = ToolCall(name="look", arguments='{"at": 1}')
QUESTION = [{"role": "user", "content": "What is a ring?"}]
# What Claude Code sends: a system prompt of blocks with marks of a cache, reminders before the question, a call with
# its result, and an identity of the client.
CLAUDE_CODE = {
    "model": "default_model",
    "max_tokens": 32000,
    "temperature": 1,
    "stream": True,
    "metadata": {"user_id": "user_0_account__session_0"},
    "system": [
        {"type": "text", "text": "You are an agent. ", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "tools": [{**LOOK, "description": "Looks.", "cache_control": {"type": "ephemeral"}, "defer_loading": False}],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>Today is a day.</system-reminder>\n"},
                {"type": "text", "text": "Look there.", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I look.", "signature": ""},
                {"type": "text", "text": "Yes."},
                {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": 1}},
                {"type": "tool_use", "id": "toolu_2", "name": "look", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "a ring"}]},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no such file", "is_error": True},
                {"type": "text", "text": "And now?"},
            ],
        },
    ],
}


def request(**fields):
    return parse(json.dumps({"max_tokens": 9, "messages": QUESTION} | fields).encode(), MessagesRequest)


def call(**fields) -> Generate:
    (made,) = request(**fields).calls()
    return made


def user(*blocks):
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def test_every_field_of_anthropics_requests_is_known():
    from anthropic.types import message_count_tokens_params, message_create_params
    from anthropic.types.beta import message_create_params as beta_create_params

    for params, kind in (
        (message_create_params.MessageCreateParamsBase, MessagesRequest),
        (beta_create_params.MessageCreateParamsBase, MessagesRequest),
        (message_count_tokens_params.MessageCountTokensParams, CountTokensRequest),
    ):
        assert params.__annotations__.keys() <= kind.model_fields.keys()


def test_docs_have_every_field():
    section = GUIDE.read_text().partition("## Anthropic's API\n")[2].partition("\n## ")[0]
    assert set(MessagesRequest.model_fields) <= set(re.findall(r"`(\w+)`", section))


def test_a_request_of_claude_code_is_a_chat():
    made = call(**CLAUDE_CODE)
    assert made.prompt.messages == [
        {"role": "system", "content": "You are an agent. Be brief."},
        {"role": "user", "content": "<system-reminder>Today is a day.</system-reminder>\nLook there."},
        {
            "role": "assistant",
            "content": "Yes.",
            "reasoning": "I look.",
            "reasoning_content": "I look.",
            "tool_calls": [
                {"id": "toolu_1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}},
                {"id": "toolu_2", "type": "function", "function": {"name": "look", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "content": "a ring", "tool_call_id": "toolu_1"},
        {"role": "tool", "content": "Error: no such file", "tool_call_id": "toolu_2"},
        {"role": "user", "content": "And now?"},
    ]
    function = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    assert made.prompt.tools == [{"type": "function", "function": function}]
    assert made.prompt.template_arguments == {"reasoning_effort": "high", "enable_thinking": True}
    assert (made.tool_choice, made.parallel_tool_calls, made.max_tokens) == ("auto", True, 32000)


@pytest.mark.parametrize(
    "choice, expected",
    [
        ({"type": "auto"}, ("auto", True)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", False)),
        ({"type": "tool", "name": "look"}, ("look", True)),
        ({"type": "none"}, ("none", True)),
    ],
)
def test_choices_of_tools(choice, expected):
    made = call(tools=[LOOK], tool_choice=choice)
    assert (made.tool_choice, made.parallel_tool_calls) == expected


def test_fields_of_sampling_and_thinking():
    made = call(temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["END"], thinking={"type": "disabled"})
    assert (made.sampling.temperature, made.sampling.top_p, made.sampling.top_k) == (0.5, 0.9, 7)
    assert made.stop == ["END"] and made.prompt.template_arguments == {"enable_thinking": False}
    schema = {"type": "object"}
    found = call(output_config={"format": {"type": "json_schema", "schema": schema}}).grammar
    assert found is not None and (found.kind, found.value) == ("json", schema)


def test_an_assistants_last_message_is_continued():
    made = call(messages=[*QUESTION, {"role": "assistant", "content": "It is"}])
    assert made.prompt.continue_final_message and not made.prompt.add_generation_prompt


@pytest.mark.parametrize(
    "fields, words, param",
    [
        ({"max_tokens": None}, "is missing", "max_tokens"),
        ({"max_tokens": 0}, "must be an integer from 1", "max_tokens"),
        ({"messages": []}, "must not be empty", "messages"),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "must be 'user', 'assistant' or 'system'",
            "messages[0].role",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, "must be a string or a list of blocks", "messages[0].content"),
        (user(), "has no content", "messages[0]"),
        (user(5), "must be an object of the type text, ", "messages[0].content[0]"),
        (user({"type": "image"}), "images and documents are not served here", "messages[0].content[0]"),
        (user({"type": "text"}), "is missing", "messages[0].content[0].text"),
        (user({"type": "tool_result"}), "is missing", "messages[0].content[0].tool_use_id"),
        (
            user({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}),
            "must be an object of the type text; images",
            "messages[0].content[0].content[0]",
        ),
        (
            user({"type": "tool_use", "id": "a", "name": "f", "input": {}}),
            "has the role user and a block, 0, of the type tool_use, which is one of the role assistant",
            "messages[0]",
        ),
        (
            user(*[{"type": "text", "text": ""}] * (MAX_BLOCKS + 1)),
            "must have at most 4096 items",
            "messages[0].content",
        ),
        ({"tools": [{"name": "f"}]}, "is missing", "tools[0].input_schema"),
        ({"tools": [LOOK | {"type": "web_search_20250305"}]}, "the server runs no tools", "tools[0].type"),
        ({"tools": [LOOK | {"name": "auto"}]}, "must not be auto", "tools[0].name"),
        ({"tools": [LOOK] * 257}, "must have at most 256 items", "tools"),
        ({"tool_choice": {"type": "any"}}, "there are no tools", "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool"}}, "must have name", "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "see"}}, "which is none of tools", "tool_choice"),
        ({"thinking": {"type": "on"}}, "must be 'enabled', 'adaptive' or 'disabled'", "thinking.type"),
        ({"stop_sequences": ["x" * 257]}, "of 1 to 256 characters", "stop_sequences"),
        ({"output_config": {"format": {"type": "xml"}}}, "must have the type json_schema", "output_config.format"),
        ({"container": "c"}, "is not served", "container"),
        ({"max_token": 5}, "did you mean max_tokens?", "max_token"),
    ],
)
def test_requests_that_are_refused(fields, words, param):
    with pytest.raises(Refusal, match="^(the request|" + param.replace("[", r"\[") + ")") as caught:
        request(**fields)
    assert words in str(caught.value) and (caught.value.status, caught.value.param) == (400, param)


def test_too_many_calls_in_a_turn_are_refused():
    used = [{"type": "tool_use", "id": "a", "name": "f", "input": {}}] * 257
    with pytest.raises(Refusal, match="messages has a turn of the model with 257 calls; at most 256") as caught:
        call(messages=[*QUESTION, {"role": "assistant", "content": used}])
    assert (caught.value.status, caught.value.param) == (400, "messages")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab", max_size=3),
    lambda one: st.lists(one, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "id", "name"]), one),
    max_leaves=6,
)
BLOCK = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image"])},
    optional=dict.fromkeys(("text", "thinking", "id", "name", "input", "tool_use_id", "content", "is_error"), JSON),
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system"]) | JSON,
        "content": st.lists(BLOCK | JSON, max_size=3) | JSON,
    }
)


@settings(deadline=None, max_examples=300)
@given(st.lists(MESSAGE, max_size=3) | JSON, JSON, JSON, JSON)
def test_any_json_is_a_chat_or_a_400(messages, system, tools, choice):
    fields = {"max_tokens": 5, "messages": messages, "system": system, "tools": tools, "tool_choice": choice}
    try:
        (made,) = check(fields, MessagesRequest).calls()
    except Refusal as refusal:
        assert refusal.status == 400 and str(refusal)
        return
    texts = json.dumps(made.prompt.messages)
    assert made.prompt.messages and all(isinstance(each["content"], str | None) for each in made.prompt.messages)
    for message in messages:
        for block in message["content"] if isinstance(message["content"], list) else ():
            if block["type"] == "text":
                assert block["text"] in texts


PIECES = st.text("ab é\n\U0001f600", max_size=4)
OUTPUTS = st.builds(Output, content=PIECES, reasoning=PIECES, tool_calls=st.lists(st.just(CALLED), max_size=2))
ENDS = st.builds(
    Finished, finish_reason=st.sampled_from(["length", "tool_calls"]), completion_tokens=st.integers(1, 99)
) | st.builds(
    Finished,
    finish_reason=st.just("stop"),
    completion_tokens=st.integers(1, 99),
    stop_reason=st.sampled_from([None, "END", 5]),
)


def joined(events):
    """The message that a client makes of the events of a stream."""
    message = dict(events[0]["message"])
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"] = [*message["content"], dict(event["content_block"])]
            written = ""
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], message["content"][event["index"]]
            (name,) = delta.keys() - {"type"}
            assert event["index"] == len(message["content"]) - 1
            if name == "partial_json":
                written += delta[name]
                block["input"] = json.loads(written)
            else:
                block[name] += delta[name]
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    return message


@settings(deadline=None, max_examples=150)
@given(st.lists(OUTPUTS, max_size=6), ENDS)
def test_the_events_of_a_stream_join_to_the_whole_message(outputs, end):
    builder = request().answer("7", 1_700_000_000)
    events = []
    for event in (Admitted(model="qwen", prompt_tokens=9, cached_tokens=4), *outputs, end):
        events += builder.add(0, event)
    events += builder.last()
    events = json.loads(json.dumps(events))
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "ping"] and kinds[-2:] == ["message_delta", "message_stop"]
    whole = json.loads(json.dumps(builder.whole()))
    assert joined(events) == whole
    from anthropic.types import Message

    message = Message.model_validate(whole, strict=True)
    text = "".join(block.text for block in message.content if block.type == "text")
    thoughts = "".join(block.thinking for block in message.content if block.type == "thinking")
    assert text == "".join(each.content for each in outputs) and thoughts == "".join(each.reasoning for each in outputs)
    used = [block.input for block in message.content if block.type == "tool_use"]
    assert used == [{"at": 1}] * sum(len(each.tool_calls) for each in outputs)
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (5, 4)
    assert message.usage.output_tokens == end.completion_tokens
    word = "END" if end.stop_reason == "END" and not used else None
    other = "tool_use" if used else "stop_sequence" if word else "end_turn"
    assert message.stop_reason == ("max_tokens" if end.finish_reason == "length" else other)
    assert message.stop_sequence == word


@contextlib.contextmanager
def there(client, **options):
    import anthropic

    given = {"api_key": "none", "max_retries": 0} | options
    with anthropic.Anthropic(base_url=client.server.address, **given) as made:
        yield made


def ask(*events, **fields):
    return {
        "model": "tiny",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": json.dumps([list(events)])}],
    } | fields


def test_anthropics_client_has_a_message_and_a_stream(client, rank_0):
    end = Finished(finish_reason="tool_calls", completion_tokens=7)
    events = said(ADMITTED, PROGRESS, Output(reasoning="Hm"), Output(content="Hello"), Output(content=" you"))
    events += said(Output(tool_calls=[CALLED]), end)
    with there(client) as anthropic_client:
        whole = anthropic_client.messages.create(**ask(*events, tools=[LOOK]))
        beta = anthropic_client.beta.messages.create(
            **ask(*events, tools=[LOOK]), betas=["context-management-2025-06-27"]
        )
        with anthropic_client.messages.stream(**ask(*events, tools=[LOOK])) as stream:
            text = "".join(stream.text_stream)
            streamed = stream.get_final_message()
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    assert (whole.content[1].text, whole.content[2].input, text) == ("Hello you", {"at": 1}, "Hello you")
    assert (whole.stop_reason, whole.usage.output_tokens, whole.usage.cache_read_input_tokens) == ("tool_use", 7, 1)
    content = lambda message: [block.model_dump(exclude={"id"}) for block in message.content]
    assert [block.type for block in beta.content] == [block.type for block in whole.content]
    assert content(streamed) == content(whole) and streamed.stop_reason == "tool_use"
    assert streamed.usage.output_tokens == 7


def test_the_order_of_the_events(client, rank_0):
    events = said(ADMITTED, PROGRESS, Output(reasoning="Hm", content="Hi"), Output(tool_calls=[CALLED]))
    events += said(Finished(finish_reason="tool_calls", completion_tokens=3))
    _, text, headers = client.request("POST", "/v1/messages", ask(*events, stream=True))
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    kinds = [event["type"] for event in named_events_of(text)]
    assert kinds == ["message_start", "ping", *block * 3, "message_delta", "message_stop"]
    assert text.startswith(": keepalive 1/3\n\nevent: message_start\n") and "[DONE]" not in text
    assert headers["Content-Type"] == "text/event-stream; charset=utf-8"


@pytest.mark.parametrize(
    "failed, status, kind, error",
    [
        (400, 400, "invalid_request_error", "BadRequestError"),
        (404, 404, "not_found_error", "NotFoundError"),
        (429, 429, "rate_limit_error", "RateLimitError"),
        (500, 500, "api_error", "InternalServerError"),
        (503, 529, "overloaded_error", "InternalServerError"),
        (504, 504, "timeout_error", "InternalServerError"),
    ],
)
def test_errors_of_rank_0_have_anthropics_form(client, rank_0, failed, status, kind, error):
    import anthropic

    refused = Failed(message="it is so", status=failed, retry_after=7)
    for streams in (False, True):
        found, body, headers = client.request("POST", "/v1/messages", ask(*said(refused), stream=streams))
        assert (found, headers["Retry-After"]) == (status, "7")
        assert body == {"type": "error", "error": {"type": kind, "message": "it is so"}}
    with there(client) as anthropic_client, pytest.raises(getattr(anthropic, error)) as caught:
        anthropic_client.messages.create(**ask(*said(refused)))
    assert caught.value.status_code == status


def test_an_error_in_a_stream_is_its_last_event(client, rank_0):
    failed = Failed(message="the grammar of the request has failed", status=500)
    _, text, _ = client.request("POST", "/v1/messages", ask(*said(ADMITTED, Output(content="He"), failed), stream=True))
    *_, delta, last = named_events_of(text)
    assert delta["delta"]["text"] == "He"
    assert last == {"type": "error", "error": {"type": "api_error", "message": failed.message}}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_errors_before_rank_0_have_anthropics_form(client, rank_0, path):
    for method, body, status in (("POST", b"{", 400), ("POST", {"messages": 5}, 400), ("GET", None, 405)):
        found, answered, _ = client.request(method, path, body)
        assert (found, answered["type"], answered["error"]["type"]) == (status, "error", "invalid_request_error")
    found, answered, _ = client.request("POST", "/v1/messages", b" " * ((8 << 20) + 1))
    assert (found, answered["error"]["type"]) == (413, "request_too_large")


def test_either_header_has_the_key():
    with launcher_server(api_key="a-long-key") as client, started(client):
        body = ask(*answer("Hello"))
        for headers, status in (
            ({"x_api_key": "a-long-key", "anthropic_version": "2023-06-01"}, 200),
            ({"Authorization": "Bearer a-long-key"}, 200),
            ({"Authorization": "Bearer a-long-key", "x_api_key": "another"}, 200),
            ({"Authorization": "Bearer another", "x_api_key": "a-long-key"}, 401),
            ({"x_api_key": "another"}, 401),
            ({}, 401),
        ):
            found, answered, _ = client.request("POST", "/v1/messages", body, **headers)
            assert found == status, headers
            if status == 401:
                assert answered["error"]["type"] == "authentication_error"
        for options in ({"api_key": "a-long-key"}, {"api_key": None, "auth_token": "a-long-key"}):
            with there(client, **options) as anthropic_client:
                assert anthropic_client.messages.create(**body).content[0].text == "Hello"


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_leaves_cancels_its_request(client, rank_0, streams):
    body = ask(*said(ADMITTED, Output(content="He")), "wait", stream=streams)
    require_cancelled(client, rank_0, "/v1/messages", body)


HEAD = "x-anthropic-billing-header: cc_version=2.1.0; cch={};"
BODY = "You are an agent. <total_tokens>{} tokens left</total_tokens>\nToday is a day."


def headed(number):
    """Two system prompts that say the same: of blocks, and of one text."""
    head, body = HEAD.format(number), BODY.format(number)
    return [{"type": "text", "text": head}, {"type": "text", "text": body}], f"{head}\n{body}"


def test_heads_that_a_client_changes_are_left_out():
    made = [request(system=system).with_stable_head() for number in ("0a1b", "9999") for system in headed(number)]
    systems = [each.calls()[0].prompt.messages[0]["content"] for each, _ in made]
    assert systems == ["You are an agent. Today is a day."] * 4 and {client for _, client in made} == {"claude-code"}
    only_a_head, _ = request(system=HEAD).with_stable_head()
    assert [each["role"] for each in only_a_head.calls()[0].prompt.messages] == ["user"]


@pytest.mark.parametrize(
    "text", ["Say x-anthropic-billing-header: 1", "<total_tokens>\n</total_tokens>", "Today is 5.", ""]
)
def test_other_system_prompts_stay_as_they_are(text):
    plain = request(system=text)
    assert plain.with_stable_head() == (plain, "")


@pytest.mark.parametrize("normalizes", [True, False])
def test_the_log_shows_what_was_left_out(capfd, normalizes):
    with launcher_server(normalize_heads=normalizes) as client, started(client) as rank_0:
        for number in range(2):
            body = ask(*answer("Hi"), system=headed(number)[0])
            assert client.request("POST", "/v1/messages", body)[0] == 200
        first, second = (call["prompt"]["messages"][0]["content"] for call in rank_0.calls)
        assert (first == second) == normalizes
        lines = []

        def are_there():
            lines.extend(line for line in capfd.readouterr().err.splitlines() if "/v1/messages" in line)
            return len(lines) == 2

        assert wait_for(are_there)
        assert all((", head of claude-code normalized, " in line) == normalizes for line in lines)
        assert (first == HEAD.format(0) + BODY.format(0)) != normalizes


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with ServerProcess(save_model_folder(tmp_path_factory.mktemp("model") / "tiny")) as server:
        yield server


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    with ServerProcess(save_model_that_calls_a_tool(tmp_path_factory.mktemp("model") / "caller")) as server:
        yield server


CONVERSATION = [
    {"role": "user", "content": "What is a ring?"},
    {"role": "assistant", "content": "A loop."},
    {"role": "user", "content": "Of what?"},
]


def test_the_text_is_that_of_a_chat(server):
    for sampling in ({}, {"temperature": 0}, {"top_k": 1, "temperature": 1.0}):
        fields = {"max_tokens": 20} | sampling
        body = {"system": "Be brief.", "messages": CONVERSATION} | fields
        found = server.ask(body, "/v1/messages")
        chat = [{"role": "system", "content": "Be brief."}, *CONVERSATION]
        expected = server.ask({"messages": chat} | fields, "/v1/chat/completions")
        text = "".join(block["text"] for block in found["content"])
        assert text == expected["choices"][0]["message"]["content"] and text
        usage = found["usage"]
        counted = usage["input_tokens"] + usage["cache_read_input_tokens"], usage["output_tokens"]
        assert counted == (expected["usage"]["prompt_tokens"], expected["usage"]["completion_tokens"])
        streamed = joined(
            named_events_of(
                server.stream_text({"messages": CONVERSATION, "system": "Be brief."} | fields, "/v1/messages")
            )
        )
        assert streamed["content"] == found["content"] and streamed["stop_reason"] == found["stop_reason"]
        tokens = server.ask({"system": "Be brief.", "messages": CONVERSATION}, "/v1/messages/count_tokens")
        assert tokens == {"input_tokens": counted[0]}


def test_stop_sequences_and_the_length(server):
    body = {"messages": CONVERSATION, "max_tokens": 20}
    found = server.ask(body, "/v1/messages")
    text = found["content"][0]["text"]
    word = next(letter for letter in text if letter.isascii())
    ended = server.ask(body | {"stop_sequences": [word]}, "/v1/messages")
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", word)
    assert "".join(block["text"] for block in ended["content"]) == text[: text.index(word)]
    assert server.ask(body | {"max_tokens": 1}, "/v1/messages")["stop_reason"] == "max_tokens"


ONE = {"type": "object", "properties": {"at": {"enum": [1]}}, "required": ["at"], "additionalProperties": False}


@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "look"}]
)
def test_a_call_that_the_request_demands(server, choice):
    """With OpenAI's API the second one ends with "stop": a message says what it has."""
    body = {"messages": CONVERSATION, "max_tokens": 200, "tools": [LOOK | {"input_schema": ONE}], "tool_choice": choice}
    found = server.ask(body, "/v1/messages")
    assert found["content"][0] | {"id": ""} == {"type": "tool_use", "id": "", "name": "look", "input": {"at": 1}}
    assert found["stop_reason"] == "tool_use"
    streamed = joined(named_events_of(server.stream_text(body, "/v1/messages")))
    assert streamed["stop_reason"] == "tool_use"
    without_ids = lambda message: [block | {"id": ""} for block in message["content"]]
    assert without_ids(streamed) == without_ids(found)


def test_the_prefix_cache_has_a_prompt_whose_head_has_changed(server):
    usages = [
        server.ask({"messages": CONVERSATION, "max_tokens": 1, "system": headed(number)[0]}, "/v1/messages")["usage"]
        for number in (1, 2, 2)
    ]
    assert usages[0]["cache_read_input_tokens"] < usages[1]["cache_read_input_tokens"]
    assert usages[1] == usages[2] and usages[1]["input_tokens"] == 1


def test_a_model_that_is_not_served_is_a_404(server):
    status, found, _ = server.request({"messages": QUESTION, "max_tokens": 5, "model": "claude"}, "/v1/messages")
    assert (status, found["error"]["type"]) == (404, "not_found_error")


NEW = 4  # tokens of a turn: the beginnings of two messages, and two words between them


def test_ten_turns_with_tools_compute_only_their_new_tokens(caller):
    import anthropic

    messages, before, length = [], caller.metrics(), 0
    fields = {"max_tokens": 20, "tools": [LOOK]}
    with anthropic.Anthropic(base_url=caller.address, api_key="none", max_retries=0) as client:
        messages.append({"role": "user", "content": "w5"})
        for turn in range(10):
            made = client.messages.create(model="caller", messages=messages, **fields)
            (used,) = made.content
            assert (made.stop_reason, used.name, used.input) == ("tool_use", "look", {"at": 1})
            prompt = made.usage.input_tokens + made.usage.cache_read_input_tokens
            assert made.usage.output_tokens == len(CALL)
            if turn:  # the last prompt and its answer are cached
                assert made.usage.cache_read_input_tokens == length + len(CALL)
                assert made.usage.input_tokens == NEW
            length = prompt
            result = {"type": "tool_result", "tool_use_id": used.id, "content": f"w{turn} w9"}
            messages += [{"role": "assistant", "content": made.content}, {"role": "user", "content": [result]}]
    after = caller.metrics()
    computed = lambda metrics: metrics["prompt_tokens_total"] - metrics["cached_prompt_tokens_total"]
    assert computed(after) - computed(before) == 3 + 9 * NEW  # the first prompt has the beginnings of two messages
    chat = caller.ask(
        {"messages": [{"role": "user", "content": "w5"}], "tools": [TOOL], "max_tokens": 20}, "/v1/chat/completions"
    )
    function = chat["choices"][0]["message"]["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("look", {"at": 1})
