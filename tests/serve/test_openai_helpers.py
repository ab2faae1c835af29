"""The helpers of the `openai` package before a rank 0 that does what a test says: what they read and send."""

import json

import pytest
from pydantic import BaseModel
from rank_zero import ADMITTED, FINISHED, answer, launcher_server, said, started

from mlxdist.serve.protocol import Failed, Output, ToolCall


class City(BaseModel):
    name: str


@pytest.fixture
def there():
    import openai

    with launcher_server() as client, started(client) as rank_0:
        with openai.OpenAI(base_url=f"{client.server.address}/v1", api_key="none", max_retries=0) as there:
            there.rank_0 = rank_0
            yield there


def question(*events):
    return {"role": "user", "content": json.dumps([list(events)])}


def test_a_parsed_message_goes_into_the_history(there):
    """With what the helper has added to it, twice what the model has written: templates do not get that."""
    import openai

    chats = there.chat.completions
    tool = openai.pydantic_function_tool(City)
    call = ToolCall(name="City", arguments='{"name": "Oslo"}')
    first = question(
        *said(ADMITTED, Output(tool_calls=[call]), FINISHED.model_copy(update={"finish_reason": "tool_calls"}))
    )
    called = chats.parse(model="tiny", messages=[first], tools=[tool]).choices[0].message
    assert called.tool_calls[0].function.parsed_arguments == City(name="Oslo")
    asked = question(*answer('{"name": "Rome"}'))
    said_so = chats.parse(model="tiny", messages=[asked], response_format=City).choices[0].message
    assert said_so.parsed == City(name="Rome")
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "cold"}
    history = [first, called, result, asked, said_so, question(*answer("done"))]
    assert chats.create(model="tiny", messages=history).choices[0].message.content == "done"
    _, got_call, _, _, got_text, _ = there.rank_0.calls[-1]["prompt"]["messages"]
    assert got_call["tool_calls"][0]["function"] == {"name": "City", "arguments": '{"name": "Oslo"}'}
    assert got_text == {"role": "assistant", "content": '{"name": "Rome"}'}


def test_a_full_queue_is_the_clients_own_class_with_its_type_and_code(there):
    """Before a stream has begun; a request that waits and another error have theirs."""
    import openai

    full = Failed(message="256 requests wait already; try again later", status=429, retry_after=7)
    for streams in (False, True):
        with pytest.raises(openai.RateLimitError) as raised:
            there.chat.completions.create(model="tiny", messages=[question(*said(full))], stream=streams)
        assert (raised.value.type, raised.value.code) == ("rate_limit_error", "rate_limit_exceeded")
        assert raised.value.response.headers["retry-after"] == "7"
    with pytest.raises(openai.NotFoundError) as other:
        there.chat.completions.create(model="tiny", messages=[question(*said(Failed(message="x", status=404)))])
    assert other.value.type == "invalid_request_error"
    with pytest.raises(openai.InternalServerError) as other:
        there.chat.completions.create(model="tiny", messages=[question(*said(Failed(message="x", status=503)))])
    assert other.value.type == "server_error"


def test_usage_in_each_chunk(there):
    """That of its choice so far, as in vLLM; the last one has that of all. Without include_usage there is none."""
    events = said(
        *(ADMITTED.model_copy(update={"choice": choice}) for choice in (0, 1)),
        Output(choice=1, content="b", completion_tokens=2),
        Output(choice=0, content="a", completion_tokens=5),
        *(FINISHED.model_copy(update={"choice": choice, "completion_tokens": 6}) for choice in (0, 1)),
    )
    asked = {"model": "tiny", "messages": [question(*events)], "n": 2, "stream": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(there.chat.completions.create(**asked, stream_options=options))
    assert [(chunk.usage.prompt_tokens, chunk.usage.completion_tokens) for chunk in chunks] == [
        (3, 2),
        (3, 5),
        (3, 6),
        (3, 6),
        (3, 12),
    ]
    assert all(chunk.usage.total_tokens == 3 + chunk.usage.completion_tokens for chunk in chunks)
    for less in ({"continuous_usage_stats": True}, {"include_usage": True}):
        chunks = list(there.chat.completions.create(**asked, stream_options=less))
        assert [chunk.usage for chunk in chunks[:4]] == [None] * 4


def test_refused_continuous_usage(there):
    import openai

    with pytest.raises(openai.BadRequestError, match="stream_options.continuous_usage_stats must be true or false"):
        there.chat.completions.create(
            model="tiny", messages=[question()], stream=True, stream_options={"continuous_usage_stats": 1}
        )
