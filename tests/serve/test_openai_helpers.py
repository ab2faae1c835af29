"""The helpers of the `openai` package before a rank 0 that does what a test says: what they read and send."""

import json

import pytest
from pydantic import BaseModel
from rank_zero import ADMITTED, FINISHED, answer, launcher_server, said, started

from mlxdist.serve.protocol import Output, ToolCall


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
