"""Requests of OpenAI's API: which fields are served, which are refused, and what rank 0 is asked for."""

import inspect
import json
import re
import subprocess
import sys

import field_table
import mlx_lm.server
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase

from mlxdist.serve import decisions
from mlxdist.serve.api import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, check, parse
from mlxdist.serve.api.chat import NOT_OF_TEMPLATES
from mlxdist.serve.api.fields import Only
from mlxdist.serve.api.generation import MAX_BIASES
from mlxdist.serve.protocol import CALL
from mlxdist.serve.refusal import Refusal

QUESTION = {"role": "user", "content": "What is a ring?"}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
LEAST = {
    ChatRequest: {"messages": [QUESTION]},
    CompletionRequest: {"prompt": "Once upon a time"},
    TokenizeRequest: {"prompt": "Once upon a time"},
    DetokenizeRequest: {"tokens": [1, 2]},
}
BOTH = pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])


def request(kind=ChatRequest, **fields):
    return parse(json.dumps(LEAST[kind] | fields).encode(), kind)


def calls(kind=ChatRequest, **fields):
    return request(kind, **fields).calls()


def refusal(kind=ChatRequest, **fields):
    """The text of the 400, and the field that it names."""
    with pytest.raises(Refusal) as caught:
        calls(kind, **fields)
    assert caught.value.status == 400
    return str(caught.value), caught.value.param


def test_the_package_needs_neither_mlx_nor_mlx_lm_nor_transformers():
    code = "import sys, mlxdist.serve.api; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "pydantic" in loaded and not loaded & {"mlx", "mlx_lm", "transformers", "numpy"}


def test_every_field_of_openais_requests_is_known():
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_create_params

    for params, kind in ((chat_create_params, ChatRequest), (completion_create_params, CompletionRequest)):
        known = params.CompletionCreateParamsBase.__annotations__.keys() | {"stream"}
        assert known <= kind.model_fields.keys()


def test_every_field_that_mlx_lms_handler_reads_is_known():
    read = set(re.findall(r'body(?:\.get\(|\[)\s*"(\w+)"', inspect.getsource(mlx_lm.server.APIHandler)))
    assert {"messages", "xtc_threshold"} <= read
    assert read <= ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys()


def test_the_forbidden_template_arguments_are_those_of_transformers():
    assert inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys() <= NOT_OF_TEMPLATES


def test_the_limit_of_logit_bias_is_that_of_the_ranks():
    assert MAX_BIASES == decisions.MAX_BIASES


def test_docs_have_the_table_of_fields():
    """Written by `python tests/support/field_table.py`."""
    assert field_table.FILE.read_text() == field_table.write()


@BOTH
def test_null_is_as_if_a_field_were_absent(kind):
    optional = {name: None for name, field in kind.model_fields.items() if not field.is_required()}
    assert calls(kind, **optional) == calls(kind)


@BOTH
@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1},
        {"best_of": 1},
        {"max_tokens": -1},
        {"n_predict": -1},
        {"seed": -1},
        {"top_logprobs": -1},
        {"min_tokens": -1},
        {"store": False},
        {"service_tier": "auto"},
        {"user": "someone"},
        {"metadata": {"run": "7"}},
        {"safety_identifier": "x"},
        {"prediction": {"type": "content", "content": "text"}},
        {"stop": []},
        {"stop": ""},
        {"response_format": {"type": "text"}},
        {"skip_special_tokens": True},
        {"length_penalty": 1.0},
        {"use_beam_search": False},
        {"cache_prompt": True, "id_slot": -1},
        {"mirostat": 0, "mirostat_tau": 5.0},
        {"repeat_penalty": 1.0, "repeat_last_n": 64},
        {"grammar": ""},
        {"draft_model": "default_model", "num_draft_tokens": 3},
        {"stream": True, "stream_options": {"include_usage": True}},
    ],
)
def test_values_that_change_nothing_are_accepted(kind, fields):
    assert calls(kind, **fields) == calls(kind)


@BOTH
def test_a_field_that_is_not_served_is_refused_by_its_name(kind):
    names = {name for name, field in kind.model_fields.items() if any(isinstance(m, Only) for m in field.metadata)}
    assert {"best_of", "mirostat", "cache_salt"} <= names
    for name in names:
        text, param = refusal(kind, **{name: "something"})
        assert param == name and text.startswith(f"{name} is not served")


@pytest.mark.parametrize("name, instead", [("functions", "tools"), ("function_call", "tool_choice")])
def test_old_names_of_tools_are_refused_with_the_new_ones(name, instead):
    assert refusal(**{name: [{"name": "f"}]})[0] == f"{name} is not served{' but as []' * (name == 'functions')}; " + (
        f"{instead} replaces it; leave it out"
    )


@BOTH
def test_an_unknown_field_is_refused_with_the_closest_name(kind):
    text = "the request has no field 'temprature'; did you mean temperature?"
    assert refusal(kind, temprature=0.5) == (text, "temprature")
    assert refusal(kind, qwertz=1) == ("the request has no field 'qwertz'; leave it out", "qwertz")
    text = "stream_options has no field 'include_usag'; did you mean include_usage?"
    assert refusal(kind, stream_options={"include_usag": True}) == (text, "stream_options")


@BOTH
def test_unknown_fields_can_be_ignored_but_refused_ones_cannot(kind):
    body = LEAST[kind] | {"qwertz": 1, "stream_options": {"include_usage": True, "later": 1}}
    assert parse(json.dumps(body).encode(), kind, ignore_unknown=True).calls() == calls(kind)
    with pytest.raises(Refusal, match="best_of is not served but as 1"):
        parse(json.dumps(body | {"best_of": 2}).encode(), kind, ignore_unknown=True)


@BOTH
def test_numbers_are_taken_with_and_without_a_point(kind):
    (call,) = calls(kind, temperature=1, max_tokens=16.0, top_k=40.0, seed=7.0)
    assert (call.sampling.temperature, call.max_tokens, call.sampling.top_k, call.seed) == (1.0, 16, 40, 7)
    assert all(type(value) is int for value in (call.max_tokens, call.sampling.top_k, call.seed))


@BOTH
@pytest.mark.parametrize(
    "name, value, text",
    [
        ("temperature", True, "temperature must be a number"),
        ("temperature", "1", "temperature must be a number"),
        ("temperature", 10**400, "temperature must be a number from 0 to 100"),
        ("temperature", 1e-5, "temperature must be 0 or at least 0.0001"),
        ("max_tokens", 1.5, "max_tokens must be an integer"),
        ("n_predict", 0, "n_predict must be an integer from 1 to 2**31 - 1"),
        ("stream", 1, "stream must be true or false"),
        ("stream", "true", "stream must be true or false"),
        ("model", 7, "model must be a string"),
        ("stream_options", True, "stream_options must be an object"),
        ("stop", ["a", 1], "stop must be a string or up to 16 of them, of 1 to 256 characters"),
        ("stop", [""], "stop must be a string or up to 16 of them, of 1 to 256 characters"),
        ("stop", ["x"] * 17, "stop must be a string or up to 16 of them, of 1 to 256 characters"),
        ("stop_token_ids", [1] * 65, "stop_token_ids must have at most 64 tokens"),
        ("logit_bias", {str(token): 1 for token in range(301)}, "logit_bias must have at most 300 entries"),
    ],
)
def test_a_wrong_value_is_one_sentence(kind, name, value, text):
    assert refusal(kind, **{name: value}) == (text, name)


@pytest.mark.parametrize("bias", [{"x": 1}, {"-1": 1}, {"5": 101}, {"5": True}, {"²": 1}, {"9" * 5000: 1}, [1]])
def test_a_wrong_logit_bias_is_one_sentence(bias):
    text, param = refusal(logit_bias=bias)
    assert param == "logit_bias" and len(text) < 200


@pytest.mark.parametrize(
    "name, low, high",
    [
        ("temperature", 0, 100),
        ("top_p", 0, 1),
        ("min_p", 0, 1),
        ("xtc_probability", 0, 1),
        ("xtc_threshold", 0, 0.5),
        ("repetition_penalty", 0, 100),
        ("presence_penalty", -100, 100),
        ("frequency_penalty", -100, 100),
        ("repetition_context_size", 0, 1 << 20),
        ("presence_context_size", 0, 1 << 20),
        ("frequency_context_size", 0, 1 << 20),
        ("top_k", 0, (1 << 31) - 1),
    ],
)
def test_sampling_has_the_ranges_that_samplers_take(name, low, high):
    """Outside of these, samplers give NaN, or raise in the batch of all requests."""
    for value in (low, high):
        assert getattr(calls(**{name: value})[0].sampling, name) == value
    for value in (low - 2, high + 1):
        assert refusal(**{name: value})[1] == name


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b'{"a": NaN}', b'{"a": 1e999}', b"[" * 100_000, b"{}"])
def test_a_body_that_is_no_request_is_refused(body):
    with pytest.raises(Refusal):
        parse(body, ChatRequest)


def test_a_body_nests_32_deep():
    def nested(levels):
        schema: object = {}
        for _ in range(levels):
            schema = [schema]
        return {"metadata": schema}

    assert calls(**nested(30))
    assert refusal(**nested(31))[0] == "the body has more than 32 lists and objects in each other"


def test_the_last_of_two_equal_names_counts():
    assert parse(b'{"prompt": "a", "prompt": "b"}', CompletionRequest).calls()[0].prompt.text == "b"


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"messages": [QUESTION, {"role": "user", "content": "\udc00"}]}, "messages[1].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud83d"}]}]},
            "messages[0].content[0].text",
        ),
        ({"stop": "\ud83d"}, "stop"),
        ({"tools": [{"function": {"name": "f", "description": "a\udfff"}}]}, "tools[0].function.description"),
        ({"metadata": {"\ud83d": 1}}, "metadata"),
    ],
)
def test_half_of_a_surrogate_pair_is_refused_where_it_is(fields, param):
    text, found = refusal(**fields)
    assert found == param and re.match(rf"{re.escape(param)} has (a name with )?half of a surrogate pair", text)


@pytest.mark.parametrize(
    "escaped, text",
    [
        (rb"\ud83d\ude00\ud83d\ude00", "\U0001f600\U0001f600"),
        (rb"\uD83D\uDE00", "\U0001f600"),
        (rb"\\ud83d", "\\ud83d"),  # a text about an escape
        (rb"\\ud83d\ud83d\ude00", "\\ud83d\U0001f600"),
    ],
)
def test_a_whole_surrogate_pair_is_a_character(escaped, text):
    assert parse(b'{"prompt": "%s"}' % escaped, CompletionRequest).calls()[0].prompt.text == text


@pytest.mark.parametrize(
    "escaped",
    [
        rb"\ud83d",
        rb"\ude00",
        rb"\ude00\ud83d",
        rb"\ud83d\ud83d\ude00",
        rb"\ud83d\ude00\uDE00",
        rb"\\ud83d\ude00",  # a text about the first half, before the second one
    ],
)
def test_half_of_a_pair_beside_others_is_refused(escaped):
    with pytest.raises(Refusal, match="prompt has half of a surrogate pair"):
        parse(b'{"prompt": "%s"}' % escaped, CompletionRequest)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{}] * 300_000},
        {"messages": [{"role": "assistant", "tool_calls": [{}] * 300_000}]},
        {"tools": [{}] * 300_000},
        {"stream_options": {str(number): 1 for number in range(300_000)}},
        {str(number): 1 for number in range(300_000)},
    ],
)
def test_many_errors_are_few(fields):
    """pydantic keeps all that it finds, with a kilobyte each."""
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate(LEAST[ChatRequest] | fields)
    assert caught.value.error_count() < 5


@pytest.mark.parametrize(
    "messages, text, param",
    [
        (None, "messages is missing", "messages"),
        ([], "messages must not be empty", "messages"),
        ("Hello", "messages must be a list", "messages"),
        ([QUESTION] * 4097, "messages must have at most 4096 items", "messages"),
        ([QUESTION, "Hello"], "messages[1] must be an object", "messages[1]"),
        ([{}], "messages[0].role is missing", "messages[0].role"),
        ([{"role": "user"}], "messages[0] has no content, a string", "messages[0]"),
        (
            [{"role": "user", "content": 7}],
            'messages[0].content must be a string, or a list of {"type": "text", "text": "..."}',
            "messages[0].content",
        ),
        (
            [{"role": "narrator", "content": "x"}],
            "messages[0].role must be 'system', 'developer', 'user', 'assistant' or 'tool'",
            "messages[0].role",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://example.org/a.png"}}]}],
            "messages[0].content has a part, 0, of the type 'image_url': images, audio and files are not served here",
            "messages[0].content",
        ),
        (
            [QUESTION | {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
            "messages[0] has the role user and tool_calls, which only an assistant's message has",
            "messages[0]",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}],
            "messages[0].tool_calls[0].function.name is missing",
            "messages[0].tool_calls[0].function.name",
        ),
    ],
)
def test_a_wrong_message_is_named_with_its_field(messages, text, param):
    assert refusal(messages=messages) == (text, param)


@pytest.mark.parametrize(
    "tool, text, param",
    [
        ("f", "tools[0] must be an object", "tools[0]"),
        ({"type": "function"}, "tools[0].function is missing", "tools[0].function"),
        ({"type": "function", "function": {}}, "tools[0].function.name is missing", "tools[0].function.name"),
        ({"type": "custom", "function": {}}, "tools[0].type must be 'function'", "tools[0].type"),
        (
            {"type": "function", "function": {"name": "auto"}},
            "tools[0].function.name must not be auto, which is a value of tool_choice",
            "tools[0].function.name",
        ),
        (
            {"type": "function", "function": {"name": "f", "parameters": "{}"}},
            "tools[0].function.parameters must be an object",
            "tools[0].function.parameters",
        ),
    ],
)
def test_a_wrong_tool_is_named_with_its_field(tool, text, param):
    assert refusal(tools=[tool]) == (text, param)


def test_a_conversation_with_tools_comes_as_templates_read_it():
    answered = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "function_call": None,
        "reasoning": "Look it up.",
    }
    called = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Par'}}
    result = {
        "role": "tool",
        "tool_call_id": "call_1",
        "content": [{"type": "text", "text": "5"}, {"type": "text", "text": " C"}],
    }
    (call,) = calls(messages=[QUESTION, answered | {"tool_calls": [called]}, result], tools=[WEATHER])
    assert call.prompt.messages == [
        QUESTION,
        {
            "role": "assistant",
            "content": None,
            "reasoning": "Look it up.",
            "reasoning_content": "Look it up.",
            "tool_calls": [called],  # with the arguments of a model that was cut off
        },
        {"role": "tool", "content": "5 C", "tool_call_id": "call_1"},
    ]


@pytest.mark.parametrize("arguments", [{"city": "Orléans"}, '{"city": "Orléans"}'])
def test_arguments_of_earlier_calls_are_text_once_encoded(arguments):
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "get_weather", "arguments": arguments}}]}
    (call,) = calls(messages=[QUESTION, message])
    function = call.prompt.messages[1]["tool_calls"][0]["function"]
    assert function == {"name": "get_weather", "arguments": '{"city": "Orléans"}'}


def test_tools_keep_the_order_of_their_fields():
    """Templates write them into the prompt."""
    tool = {"function": {"strict": None, "parameters": {"b": 1, "a": 2}, "name": "f"}, "type": "function"}
    (call,) = calls(tools=[tool])
    assert json.dumps(call.prompt.tools) == json.dumps([tool])


@pytest.mark.parametrize(
    "choice, found",
    [
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "function": {"name": "get_weather"}}, "get_weather"),
    ],
)
def test_tool_choice(choice, found):
    assert calls(tools=[WEATHER], tool_choice=choice)[0].tool_choice == found


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"tool_choice": "required"}, "tool_choice is 'required', and there are no tools"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "get_wether"}}},
            "tool_choice names 'get_wether', which is none of tools",
        ),
        (
            {"tools": [WEATHER], "tool_choice": "get_weather"},
            'tool_choice must be none, auto, required or {"type": "function", "function": {"name": "..."}}',
        ),
    ],
)
def test_a_tool_choice_without_its_tool_is_refused(fields, text):
    assert refusal(**fields) == (text, "tool_choice")


@BOTH
@pytest.mark.parametrize(
    "fields, kind_of_grammar, value",
    [
        ({"response_format": {"type": "json_object"}}, "json", {"type": "object"}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array"}}}},
            "json",
            {"type": "array"},
        ),
        ({"guided_json": {"type": "array"}}, "json", {"type": "array"}),
        ({"guided_json": '{"type": "array"}'}, "json", {"type": "array"}),
        ({"json_schema": {"type": "array"}}, "json", {"type": "array"}),
        ({"guided_regex": "[0-9]+"}, "regex", "[0-9]+"),
        ({"guided_choice": ["yes", "no"]}, "choice", ["yes", "no"]),
        ({"structured_outputs": {"json": {"type": "array"}, "regex": None}}, "json", {"type": "array"}),
        ({"structured_outputs": {"regex": "[0-9]+"}}, "regex", "[0-9]+"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "choice", ["yes", "no"]),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "lark", 'start: "a"'),
    ],
)
def test_structured_output(kind, fields, kind_of_grammar, value):
    (call,) = calls(kind, **fields)
    assert (call.grammar.kind, call.grammar.value) == (kind_of_grammar, value)


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"backend": "a"}}, "structured_outputs"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ],
)
def test_structured_output_that_is_wrong_or_twice_is_refused(fields, param):
    assert refusal(**fields)[1] == param


def test_templates_get_their_arguments():
    (call,) = calls(reasoning_effort="none", chat_template_kwargs={"style": "brief"}, add_generation_prompt=False)
    prompt = call.prompt
    assert prompt.template_arguments == {"reasoning_effort": "none", "enable_thinking": False, "style": "brief"}
    assert not prompt.add_generation_prompt
    assert refusal(chat_template_kwargs={"tokenize": True, "tools": []}) == (
        "chat_template_kwargs must not have tokenize, tools",
        "chat_template_kwargs",
    )


def test_an_answer_may_continue_the_last_message():
    begun = {"role": "assistant", "content": "A ring is"}
    (call,) = calls(messages=[QUESTION, begun], continue_final_message=True)
    assert call.prompt.continue_final_message and not call.prompt.add_generation_prompt
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert refusal(messages=[QUESTION, begun], **both)[1] == "continue_final_message"
    assert refusal(messages=[QUESTION, {"role": "assistant"}], continue_final_message=True)[1] == "messages[1].content"


@BOTH
def test_what_ends_an_answer(kind):
    (call,) = calls(
        kind,
        max_tokens=9,
        max_completion_tokens=7,
        min_tokens=3,
        ignore_eos=True,
        stop="END",
        stop_token_ids=[5],
        include_stop_str_in_output=True,
        priority=-3,
    )
    assert (call.max_tokens, call.min_tokens, call.ignore_eos, call.priority) == (7, 3, True, -3)
    assert (call.stop, call.stop_token_ids, call.include_stop) == (["END"], [5], True)
    assert refusal(kind, max_tokens=3, min_tokens=4) == ("min_tokens, 4, is more than max_tokens, 3", "min_tokens")


@BOTH
def test_the_choices_of_a_prompt_are_one_call(kind):
    """Rank 0 counts their seeds up from the first one's."""
    assert [(call.n, call.seed) for call in calls(kind, n=3, seed=5)] == [(3, 5)]
    assert [(call.n, call.seed) for call in calls(kind)] == [(1, None)]
    assert calls(kind, n=3, seed=-2)[0].seed == 2**64 - 2  # of 64 bits, as OpenAI's
    assert refusal(kind, seed=-(2**63) - 1)[0] == "seed must be an integer from -2**63 to 2**64 - 1"
    assert refusal(kind, n=17)[1] == "n"


@pytest.mark.parametrize(
    "prompt, found",
    [
        ("a", [("a", None)]),
        (["a", "b"], [("a", None), ("b", None)]),
        ([1, 2], [(None, [1, 2])]),
        ([[1, 2], [3]], [(None, [1, 2]), (None, [3])]),
    ],
)
def test_prompts_of_completions(prompt, found):
    made = calls(CompletionRequest, prompt=prompt, n=2)
    assert [(call.prompt.text, call.prompt.tokens) for call in made] == found
    assert [call.n for call in made] == [2] * len(found)


@pytest.mark.parametrize(
    "prompt", [None, [], 7, {}, ["a", [1]], [[1], "a"], [[]], [-1], [1.5], [True], ["a"] * 65, [1 << 31]]
)
def test_a_prompt_that_is_none_is_refused(prompt):
    assert refusal(CompletionRequest, prompt=prompt)[1] == "prompt"


def test_a_request_has_at_most_64_choices():
    assert len(calls(CompletionRequest, prompt=["a"] * 16, n=4)) == 16
    assert len(calls(CompletionRequest, prompt=["a"] * 64)) == 64  # LangChain sends 20 at a time
    assert refusal(CompletionRequest, prompt=["a"] * 16, n=5) == ("n times the prompts must be at most 64", "n")


@pytest.mark.parametrize(
    "kind, fields, found",
    [
        (ChatRequest, {}, None),
        (ChatRequest, {"logprobs": False}, None),
        (ChatRequest, {"logprobs": True}, 0),
        (ChatRequest, {"logprobs": True, "top_logprobs": 20}, 20),
        (ChatRequest, {"top_logprobs": 2}, 2),
        (CompletionRequest, {"logprobs": 0}, 0),
        (CompletionRequest, {"logprobs": 5}, 5),
        (CompletionRequest, {"logprobs": -1}, None),
        (CompletionRequest, {"logprobs": False}, None),
        (CompletionRequest, {"logprobs": True}, 0),
        (CompletionRequest, {"logprobs": True, "top_logprobs": 3}, 3),
    ],
)
def test_logprobs(kind, fields, found):
    assert calls(kind, **fields)[0].top_logprobs == found


@pytest.mark.parametrize("kind, name, value", [(ChatRequest, "logprobs", 5), (CompletionRequest, "logprobs", 21)])
def test_logprobs_beyond_the_api_are_refused(kind, name, value):
    assert refusal(kind, **{name: value})[1] == name
    assert refusal(kind, top_logprobs=21)[1] == "top_logprobs"


@pytest.mark.parametrize("logprobs, tops", [(None, None), (-1, None), (0, 0), (5, 5), (True, 0)])
def test_echo_asks_for_the_prompt_and_with_logprobs_for_those_of_its_tokens(logprobs, tops):
    call = calls(CompletionRequest, echo=True, logprobs=logprobs)[0]
    assert call.wants_prompt and call.prompt_logprobs == call.top_logprobs == tops
    assert calls(CompletionRequest, logprobs=logprobs)[0].prompt_logprobs is None


def test_no_tokens_are_for_an_echo_alone():
    assert calls(CompletionRequest, echo=True, max_tokens=0)[0].max_tokens == 0
    for kind, fields in ((CompletionRequest, {}), (ChatRequest, {}), (CompletionRequest, {"echo": False})):
        text, param = refusal(kind, max_tokens=0, **fields)
        assert text.startswith("max_tokens must be an integer from 1") and param == "max_tokens"


def test_tokenize_takes_a_text_or_a_chat():
    text = request(TokenizeRequest, add_special_tokens=False).call()
    assert (text.prompt.text, text.prompt.add_special_tokens) == ("Once upon a time", False)
    chat = request(TokenizeRequest, prompt=None, messages=[QUESTION], tools=[WEATHER]).call()
    assert (chat.prompt.messages, chat.prompt.tools) == ([QUESTION], [WEATHER])
    for wrong in ({"prompt": None}, {"messages": [QUESTION]}):
        with pytest.raises(Refusal, match="must have prompt, a string, or messages"):
            request(TokenizeRequest, **wrong)
    answer = request(TokenizeRequest).answer({"model": "qwen", "tokens": [4, 5], "max_model_len": 512})
    assert answer == {"count": 2, "max_model_len": 512, "tokens": [4, 5], "token_strs": None}


def test_detokenize_takes_tokens():
    asked = request(DetokenizeRequest)
    assert asked.call().tokens == [1, 2] and asked.answer({"prompt": "On"}) == {"prompt": "On"}
    with pytest.raises(Refusal, match="tokens must have tokens only"):
        request(DetokenizeRequest, tokens=["a"])


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.sampled_from(["auto", "user", "assistant", "text", "function", "json_schema", 10**400, -1, 1.0, "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "function", "name", "arguments", "5", "json", "schema"])
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=300)
@given(st.data(), st.sampled_from([ChatRequest, CompletionRequest]))
def test_any_body_is_a_request_that_rank_0_can_read_or_a_sentence(data, kind):
    names = st.sampled_from(sorted(kind.model_fields))
    body = LEAST[kind] | data.draw(st.dictionaries(names, VALUES, max_size=2))
    try:
        made = parse(json.dumps(body).encode(), kind).calls()
    except Refusal as refusal:
        assert refusal.status == 400 and "\n" not in str(refusal).replace("\\n", "") and refusal.param
        return
    for call in made:
        assert CALL.validate_json(call.model_dump_json()) == call


def test_a_request_can_be_made_of_fields_without_json():
    """The prompt is that of `mlxdist chat`."""
    assert check({"prompt": "x", "temperature": 0.7}, CompletionRequest).calls()[0].sampling.temperature == 0.7
    with pytest.raises(Refusal, match="top_p must be a number from 0 to 1"):
        check({"prompt": "x", "top_p": float("nan")}, CompletionRequest)
