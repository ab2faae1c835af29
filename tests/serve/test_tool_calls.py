"""Calls of tools, as models write them: right ones are calls, all else is none, and nothing raises."""

import importlib
import json
import pkgutil

import mlx_lm.tool_parsers
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlxdist.serve.protocol import ToolCall
from mlxdist.serve.refusal import Refusal
from mlxdist.serve.tool_calls import call_format, parse_calls

# Of Python's compiler, through which mlx-lm's parsers read values.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::SyntaxWarning")
PARSERS = {
    module.name: importlib.import_module(f"mlx_lm.tool_parsers.{module.name}").parse_tool_call
    for module in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)
}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
LOOK = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
TOOLS = [LOOK, {"type": "function", "function": {"name": "stop"}}]

WRITTEN = {
    "function_gemma": "call:look{city:<escape>Zürich<escape>,days:2}",
    "gemma4": 'call:look{city:<|"|>Zürich<|"|>,days:2}',
    "glm47": "look\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>"
    "<arg_key>days</arg_key><arg_value>2</arg_value>",
    "json_tools": '{"name": "look", "arguments": {"city": "Zürich", "days": 2}}',
    "kimi_k2": '<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"city": "Zürich", "days": 2}'
    "<|tool_call_end|>",
    "kimi_k3": '<|open|>call tool="look" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Zürich'
    '<|close|>argument<|sep|><|open|>argument key="days" type="integer"<|sep|>2<|close|>argument<|sep|>'
    "<|close|>call<|sep|>",
    "laguna": "look<arg_key>city</arg_key><arg_value>Zürich</arg_value><arg_key>days</arg_key><arg_value>2</arg_value>",
    "longcat": "look<longcat_arg_key>city</longcat_arg_key><longcat_arg_value>Zürich</longcat_arg_value>"
    "<longcat_arg_key>days</longcat_arg_key><longcat_arg_value>2</longcat_arg_value>",
    "minicpm5": '"look"><param name="city">Zürich</param><param name="days">2</param>',
    "minimax_m2": '<invoke name="look"><parameter name="city">Zürich</parameter><parameter name="days">2</parameter>'
    "</invoke>",
    "mistral": 'look[ARGS]{"city": "Zürich", "days": 2}',
    "muse_spark": '<atem:invoke name="look"><atem:parameter name="city">Zürich</atem:parameter>'
    '<atem:parameter name="days">2</atem:parameter></atem:invoke>',
    "pythonic": '[look(city="Zürich", days=2)]',
    "qwen3_coder": "<function=look>\n<parameter=city>\nZürich\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>",
}
# What calls of all formats are made of, rightly put together or not.
FRAGMENTS = sorted(
    {part for text in WRITTEN.values() for part in (text, text[: len(text) // 2], text[len(text) // 2 :])}
    | {
        '{"name": ',
        '"look"',
        '"arguments": ',
        "null",
        "[",
        "]",
        "{",
        "}",
        "(",
        ")",
        "=",
        ":",
        ",",
        '"',
        "'",
        "\\",
        "\n",
    }
    | {
        "NaN",
        "1e999",
        "-Infinity",
        "9" * 5000,
        "b'x'",
        "{1, 2}",
        "{(1,): 2}",
        "\\ud800",
        "\ud800",
        "\0",
        "1j",
        "...",
        "<",
    }
    | {"functions.:0", "<arg_key>", "</arg_value>", "<invoke name=", "<parameter=", "[ARGS]", "call:", '"days": "two"'}
)


def calls(name, text, tools=TOOLS):
    return parse_calls(text, "text", "", tools, PARSERS[name])


def test_there_is_an_example_for_each_parser_of_mlx_lm():
    assert set(WRITTEN) == set(PARSERS)


@pytest.mark.parametrize("name", PARSERS)
def test_a_call_in_the_format_of_each_parser(name):
    (call,) = calls(name, WRITTEN[name])
    assert (call.name, json.loads(call.arguments)) == ("look", {"city": "Zürich", "days": 2})
    assert "Zürich" in call.arguments


@pytest.mark.parametrize("name", PARSERS)
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_what_a_model_writes_badly_raises_nothing(name, data):
    """Calls or none; the arguments of calls are objects of JSON."""
    own = WRITTEN[name]
    text = data.draw(
        st.one_of(
            st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join),
            st.integers(0, len(own)).map(lambda end: own[:end]),
            st.tuples(st.integers(0, len(own)), st.sampled_from(FRAGMENTS)).map(
                lambda at: own[: at[0]] + at[1] + own[at[0] :]
            ),
            st.text(max_size=60),
        )
    )
    tools = data.draw(
        st.sampled_from([TOOLS, [], [{"type": "function", "function": {"name": "look", "parameters": None}}]])
    )
    found = calls(name, text, tools)
    assert found is None or found
    for call in found or []:
        arguments = json.loads(call.arguments, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
        assert isinstance(arguments, dict) and call.name
        assert ToolCall.model_validate_json(call.model_dump_json()) == call


@pytest.mark.parametrize("name", PARSERS)
def test_nested_brackets_raise_nothing(name):
    for text in ("[" * 5000, '{"name": "look", "arguments": ' + '{"a": ' * 5000, "[look(a=" + "(" * 5000):
        calls(name, text)


BAD = {
    "cut off": '{"name": "look", "arguments": {"city": "Zür',
    "text": "I cannot look.",
    "number": "5",
    "string": '"look"',
    "no name": '{"arguments": {}}',
    "name: number": '{"name": 5, "arguments": {}}',
    "name: empty": '{"name": "", "arguments": {}}',
    "name: line": '{"name": "a\\nb", "arguments": {}}',
    "name: surrogate": '{"name": "\\ud800", "arguments": {}}',
    "arguments: list": '{"name": "look", "arguments": [1]}',
    "arguments: number": '{"name": "look", "arguments": 1}',
    "arguments: text": '{"name": "look", "arguments": "Zürich"}',
    "arguments: twice in strings": json.dumps({"name": "look", "arguments": json.dumps(json.dumps({}))}),
    "arguments: NaN": '{"name": "look", "arguments": {"days": NaN}}',
    "arguments: surrogate": '{"name": "look", "arguments": {"city": "\\ud800"}}',
    "nothing": "[]",
    "a bad one": '[{"name": "look", "arguments": {}}, {"name": 5, "arguments": {}}]',
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_a_call_that_is_written_badly_is_none(text):
    assert calls("json_tools", text) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "look", "arguments": "{\\"city\\": \\"Zürich\\"}"}', [("look", '{"city": "Zürich"}')]),
        ('{"name": "look", "parameters": {"days": 2}}', [("look", '{"days": 2}')]),
        ('{"name": "stop"}', [("stop", "{}")]),
        ('{"name": "stop", "arguments": null}', [("stop", "{}")]),
        ('{"name": "stop", "arguments": ""}', [("stop", "{}")]),
        ('{"name": "unknown", "arguments": {}}', [("unknown", "{}")]),
        ('[{"name": "look", "arguments": {}}, {"name": "stop", "arguments": {}}]', [("look", "{}"), ("stop", "{}")]),
    ],
    ids=["encoded twice", "parameters", "no arguments", "null", "empty", "a name of no tool", "several"],
)
def test_other_ways_to_write_a_call(text, expected):
    assert [(call.name, call.arguments) for call in calls("json_tools", text)] == expected


def test_text_that_the_parser_of_glm_cannot_read_is_no_call():
    """It returns {"raw": text}, with the first word as a name."""
    assert [calls("glm47", text) for text in ("I cannot look.", "", "look at the sky")] == [None] * 3
    raw = {"type": "function", "function": {"name": "echo", "parameters": {"properties": {"raw": {"type": "string"}}}}}
    assert calls("glm47", "echo at the sky", [raw]) == [ToolCall(name="echo", arguments='{"raw": "at the sky"}')]


def test_a_model_without_a_parser_calls_nothing():
    assert parse_calls(WRITTEN["json_tools"], "text", "", TOOLS, None) is None


def test_the_arguments_of_the_function_that_tool_choice_names():
    found = lambda text: parse_calls(text, "arguments", "look", TOOLS, None)
    assert found('{"city": "Zürich"}') == [ToolCall(name="look", arguments='{"city": "Zürich"}')]
    assert [found(text) for text in ('{"city": "Zür', "[]", "", "null")] == [None] * 4


def test_the_list_of_calls_that_tool_choice_requires():
    found = lambda text: parse_calls(text, "list", "", TOOLS, None)
    two = '[{"name": "look", "parameters": {"days": 2}}, {"name": "stop", "parameters": {}}]'
    assert [(call.name, call.arguments) for call in found(two)] == [("look", '{"days": 2}'), ("stop", "{}")]
    assert [found(text) for text in (two[:-3], "[]", "{}", "5", '[{"name": "look"}]')] == [None] * 5


def test_the_format_that_tool_choice_asks_for():
    assert [call_format(choice, TOOLS) for choice in ("none", "auto", "required", "stop")] == [
        "text", "text", "list", "arguments",
    ]  # fmt: skip
    for choice, tools, words in (("required", [], "the request has no tools"), ("see", TOOLS, "the function 'see'")):
        with pytest.raises(Refusal, match=words) as caught:
            call_format(choice, tools)
        assert caught.value.param == "tool_choice"


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda one: st.lists(one) | st.dictionaries(st.text(), one),
    )
)
@example([{"name": "look", "parameters": {}, "more": 1}])
def test_any_json_in_place_of_calls_raises_nothing(value):
    text = json.dumps(value)
    for how in ("text", "arguments", "list"):
        found = parse_calls(text, how, "look", TOOLS, PARSERS["json_tools"])
        assert found is None or all(isinstance(json.loads(call.arguments), dict) for call in found)
