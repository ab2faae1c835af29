"""Structured output: whatever a random model samples, what ends by itself is of its schema or regular expression."""

import json
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import mlx.core as mx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from mlx_lm import load, stream_generate
from mlx_lm.server import _make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper
from serving import PLAIN, TEMPLATE, VOCABULARY, ServerProcess, save_model_folder
from transformers import PreTrainedTokenizerFast

from mlxdist.serve.grammar import (
    GrammarProcessor,
    after_thinking,
    calls_grammar,
    grammar_of,
    grammar_tokenizer,
    or_calls,
)
from mlxdist.serve.protocol import Grammar
from mlxdist.serve.refusal import Refusal

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
END = 256


def record(**properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }  # fmt: skip


WORD, DIGIT = {"type": "string", "maxLength": 8}, {"type": "integer", "minimum": 0, "maximum": 9}
SCHEMAS = {
    "record": record(name=WORD, age={"type": "integer", "minimum": 18, "maximum": 120}),
    "nested": record(at=record(x=DIGIT, y=DIGIT), tags={"type": "array", "items": WORD, "maxItems": 3}),
    "array": {"type": "array", "items": DIGIT, "minItems": 2, "maxItems": 4},
    "enum": record(color={"enum": ["red", "green", "blue"]}, kind={"const": "paint"}),
    "pattern": record(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    "any of": record(either={"anyOf": [DIGIT, record(word=WORD), {"type": "null"}]}, flag={"type": "boolean"}),
    "number": {"type": "number", "minimum": -1, "maximum": 1},
    "reference": {"$defs": {"digit": DIGIT}, **record(a={"$ref": "#/$defs/digit"})},
}
REGEXES = ["(yes|no)", r"[0-9]{3}-[0-9]{4}", r"[a-f]{1,9}(, [a-f]{1,9}){0,2}\.", "ß[äöü]{2}€"]


def fits(schema, value, definitions=None):
    """Whether JSON Schema allows a value; of its keywords, those of SCHEMAS."""
    definitions = definitions or schema.get("$defs", {})
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "number": int | float, "boolean": bool}
    again = lambda part, inner: fits(part, inner, definitions)
    if "$ref" in schema:
        return again(definitions[schema["$ref"].removeprefix("#/$defs/")], value)
    if "anyOf" in schema:
        return any(again(part, value) for part in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    if schema["type"] == "null":
        return value is None
    if not isinstance(value, kinds[schema["type"]]) or (isinstance(value, bool) and schema["type"] != "boolean"):
        return False
    if isinstance(value, dict):
        names = schema.get("properties", {})
        return set(names) == set(value) and all(again(names[name], inner) for name, inner in value.items())
    if isinstance(value, list):
        return schema.get("minItems", 0) <= len(value) <= schema["maxItems"] and all(
            again(schema["items"], inner) for inner in value
        )
    if isinstance(value, str):
        return len(value) <= schema.get("maxLength", 8) and bool(re.search(schema.get("pattern", ""), value))
    return isinstance(value, bool) or schema["minimum"] <= value <= schema["maximum"]


def regex(expression):
    return grammar_of(Grammar(kind="regex", value=expression))


def wanted(body):
    """The grammar that a body asks for."""
    if "response_format" in body:
        return Grammar(kind="json", value=body["response_format"]["json_schema"]["schema"])
    return Grammar(kind="regex", value=body["structured_outputs"]["regex"])


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load(str(folder))[1]


@pytest.fixture(
    scope="module", params=["2", *(pytest.param(name, marks=pytest.mark.long) for name in ("1", "3", "2 stages"))]
)
def server(request, folder):
    ranks, *stages = request.param.split()
    with ServerProcess(folder, int(ranks), *(["--pipeline"] if stages else [])) as server:
        yield server
        assert server.stop() == 0, "".join(server.lines)


SAMPLED = {"max_tokens": 400, "temperature": 1.0, "seed": 7}


@pytest.fixture(scope="module")
def expected(folder):
    """A function: what mlx-lm answers on one process to a request of /v1/completions, with the processor."""
    model, tokenizer = load(str(folder))

    def text(body):
        prompt = tokenizer.encode(body["prompt"])
        grammar = GrammarProcessor(grammar_of(wanted(body)), grammar_tokenizer(tokenizer), len(prompt))
        mx.random.seed(body["seed"])
        request = replace(PLAIN, sampling=replace(PLAIN.sampling, temperature=body["temperature"]))
        made = stream_generate(
            model,
            tokenizer,
            prompt,
            max_tokens=body["max_tokens"],
            sampler=_make_sampler(request, tokenizer),
            logits_processors=[grammar],
        )
        return "".join(response.text for response in made)

    return text


@pytest.mark.long
def test_what_a_random_model_samples_is_of_its_schema_or_expression(server, expected):
    """All at once, with requests that are free; these have the tokens that they have alone."""
    bodies = [{"prompt": name, "response_format": schema_format(schema)} for name, schema in SCHEMAS.items()]
    bodies += [{"prompt": "expression", "structured_outputs": {"regex": regex}} for regex in REGEXES]
    bodies = [SAMPLED | body for body in bodies]
    free = [SAMPLED | {"prompt": f"free {number}", "max_tokens": 60} for number in range(3)]
    alone = [server.text(**body) for body in free]
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(server.ask, bodies + free))
    texts = [answer["choices"][0]["text"] for answer in answers]
    assert texts[len(bodies) :] == alone
    for schema, text in zip(SCHEMAS.values(), texts):
        assert fits(schema, json.loads(text)), (schema, text)
    for regex, text in zip(REGEXES, texts[len(SCHEMAS) :]):
        assert re.fullmatch(regex, text), (regex, text)
    assert {answer["choices"][0]["finish_reason"] for answer in answers[: len(bodies)]} == {"stop"}
    assert texts[: len(bodies)] == list(map(expected, bodies))


def test_logprobs_of_tokens_that_a_grammar_does_not_allow_are_left_out(server):
    """JSON has no minus infinity."""
    body = {"prompt": "a digit: ", "structured_outputs": {"regex": "[0-9]"}, "logprobs": 11}
    request = urllib.request.Request(server.address + TEXT, json.dumps(body | {"max_tokens": 3}).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.loads(response.read(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    tops = answer["choices"][0]["logprobs"]["top_logprobs"][0]
    assert len(tops) == 10 and all(token.isdigit() for token in tops)


def test_the_openai_package_asks_for_objects(server):
    """Chats, whole and streamed: of a schema, of any object, and text."""
    import openai

    client = openai.OpenAI(base_url=server.address + "/v1", api_key="none", max_retries=0)
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]} | SAMPLED
    with client:
        for form, schema in ((schema_format(SCHEMAS["record"]), SCHEMAS["record"]), ({"type": "json_object"}, None)):
            answer = client.chat.completions.create(**asked, response_format=form).choices[0]
            with client.chat.completions.create(**asked, response_format=form, stream=True) as stream:
                parts = [part.choices[0].delta.content or "" for part in stream]
            assert "".join(parts) == answer.message.content
            if schema is not None:
                assert fits(schema, json.loads(answer.message.content))
            elif answer.finish_reason == "stop":
                assert isinstance(json.loads(answer.message.content), dict)
        short = asked | {"max_tokens": 20}
        texts = [client.chat.completions.create(**short, response_format={"type": "text"}), server.ask(short, CHAT)]
        assert texts[0].choices[0].message.content == texts[1]["choices"][0]["message"]["content"]


# It compiles; then, within "b", there are more properties than llguidance follows at a time.
FAILS = record(a={"const": 1}, b={"type": "object", "properties": {f"p{i}": DIGIT for i in range(700)}})


def test_a_grammar_that_fails_ends_its_request_alone(server):
    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(server.text, "other", 200, logit_bias={str(END): -100})
        status, answer, _ = server.request(SAMPLED | {"prompt": "x", "response_format": schema_format(FAILS)})
        assert (status, answer["error"]["type"]) == (500, "server_error")
        assert answer["error"]["message"].startswith("the grammar of the request has failed: Parser Error: Current row")
        event = server.stream(SAMPLED | {"prompt": "x", "response_format": schema_format(FAILS)})[-1]
        assert json.loads(event) == answer
        assert len(other.result()) > 100
    assert server.metrics()['requests_total{outcome="error"}'] == 2


PATTERNS = [{"type": "string", "pattern": f"(a|b)*c{{{i}}}"} for i in range(60)]
COMPILES = "the grammar cannot be compiled: "
BAD = {
    "no object": ({"response_format": 5}, "response_format must have the type text, json_object or json_schema"),
    "text": ({"response_format": "text"}, "response_format must have the type text"),
    "type": ({"response_format": {"type": "xml"}}, "response_format must have the type text"),
    "type: list": ({"response_format": {"type": ["text"]}}, "response_format must have the type text"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format must have json_schema, an object"),
    "schema: list": ({"response_format": schema_format([])}, "response_format must have json_schema, an object"),
    "no JSON type": ({"response_format": schema_format({"type": "word"})}, COMPILES + "Invalid type: word"),
    "file": ({"response_format": schema_format({"$ref": "file:///etc/passwd"})}, COMPILES + "Resource 'file:///etc"),
    "not": ({"response_format": schema_format({"not": {}})}, COMPILES + 'Unimplemented keys: ["not"]'),
    "large": ({"response_format": schema_format({"const": "x" * (1 << 16)})}, "and at most 65536 are served"),
    "endless": ({"response_format": schema_format({"allOf": PATTERNS})}, COMPILES + "it takes too"),
    "infinity": ({"response_format": schema_format({"const": float("inf")})}, "Infinity is not a number of JSON"),
    "surrogate": ({"response_format": schema_format({"const": "\ud800"})}, "const has half of a surrogate pair"),
    "regex: none": ({"structured_outputs": {"choice": []}}, "structured_outputs is wrong: choice"),
    "regex: number": ({"structured_outputs": {"regex": 5}}, "structured_outputs is wrong: regex must be"),
    "regex: open": ({"structured_outputs": {"regex": "("}}, "error: unclosed group"),
    "regex: look-ahead": ({"structured_outputs": {"regex": "(?=a)b"}}, "look-ahead and look-behind, is not supported"),
    "regex: nothing": ({"structured_outputs": {"regex": r"a[^\s\S]b"}}, COMPILES + "NoExtension"),
    "regex: deep": ({"structured_outputs": {"regex": "(" * 9999 + "a" + ")" * 9999}}, COMPILES),
    "regex: surrogate": ({"structured_outputs": {"regex": "\udfff"}}, "regex has half of a surrogate pair"),
    "both": (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "response_format and structured_outputs exclude each other",
    ),
    "tools": (
        {"response_format": {"type": "json_object"}, "tools": [{"type": "function"}]},
        "the request has no field 'tools'",
    ),
}  # fmt: skip


def test_grammars_that_are_refused_change_nothing(server):
    before = server.metrics()
    for name, (body, words) in BAD.items():
        status, answer, _ = server.request({"prompt": "x", "max_tokens": 2} | body)
        assert (status, words in answer["error"]["message"]) == (400, True), (name, status, answer)
        assert len(answer["error"]["message"]) < 600 and "\n" not in answer["error"]["message"], name
    deep = {"type": "array"}
    for _ in range(40):
        deep = {"type": "array", "items": deep}
    assert server.request({"prompt": "x", "response_format": schema_format(deep)})[0] == 400
    assert server.metrics()["prompt_tokens_total"] == before["prompt_tokens_total"]


def accepts(grammar, text, tokenizer):
    """Whether an answer with this text ends in a state that the grammar allows."""
    matcher = LLMatcher(grammar_tokenizer(tokenizer), grammar, log_level=0)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    read = matcher.try_consume_tokens(tokens)
    assert not matcher.is_error(), matcher.get_error()
    return read == len(tokens) and matcher.is_accepting()


@pytest.mark.long
@settings(deadline=None, max_examples=25)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), min_size=1, max_size=4))
@example(["a", "ab", "", "-#&~ .*\\/<>\n", '"quoted"', "(", "[^a]"])
def test_an_answer_is_one_of_the_choices(tokenizer, choices):
    grammar = grammar_of(Grammar(kind="choice", value=choices))
    assert all(accepts(grammar, choice, tokenizer) for choice in choices)
    assert not any(accepts(grammar, choice + "!", tokenizer) for choice in choices if choice + "!" not in choices)


def test_a_grammar_in_lark(tokenizer):
    sums = grammar_of(Grammar(kind="lark", value='start: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]+/'))
    assert accepts(sums, "12+3+4", tokenizer) and not accepts(sums, "12+", tokenizer)


HOST = {"$ref": "http://127.0.0.1:9/schema.json"}
REFUSED = {
    "json: list": (Grammar(kind="json", value=[]), "the JSON schema of the answer must be an object"),
    "json: text": (Grammar(kind="json", value="{}"), "the JSON schema of the answer must be an object"),
    "json: network": (Grammar(kind="json", value=HOST), "Default retriever does not fetch"),
    "json: not": (Grammar(kind="json", value={"not": {}}), "cannot be compiled: Unimplemented keys"),
    "json: large": (Grammar(kind="json", value={"const": "x" * (1 << 16)}), "at most 65536 are served"),
    "json: surrogate": (Grammar(kind="json", value={"const": "\ud800"}), "the grammar has half a surrogate pair"),
    "regex: number": (Grammar(kind="regex", value=5), "the regex of the answer must be a string"),
    "regex: open": (Grammar(kind="regex", value="("), "unclosed group"),
    "regex: deep": (Grammar(kind="regex", value="(" * 9999 + "a" + ")" * 9999), "cannot be compiled"),
    "choice: none": (Grammar(kind="choice", value=[]), "must be a list of strings, and not empty"),
    "choice: number": (Grammar(kind="choice", value=["a", 5]), "must be a list of strings, and not empty"),
    "choice: text": (Grammar(kind="choice", value="ab"), "must be a list of strings, and not empty"),
    "lark: number": (Grammar(kind="lark", value=5), "the lark of the answer must be a string"),
    "lark: open": (Grammar(kind="lark", value="start: ("), "cannot be compiled"),
    "lark: no start": (Grammar(kind="lark", value='begin: "a"'), "cannot be compiled"),
    "lark: network": (Grammar(kind="lark", value=f"start: %json {json.dumps(HOST)}"), "does not fetch"),
}


@pytest.mark.parametrize(("grammar", "words"), REFUSED.values(), ids=REFUSED)
def test_grammars_that_are_refused(grammar, words):
    with pytest.raises(Refusal) as caught:
        grammar_of(grammar)
    assert words in str(caught.value) and caught.value.status == 400
    assert len(str(caught.value)) < 600 and "\n" not in str(caught.value)


def test_a_grammar_that_takes_too_long_to_compile_is_refused():
    """Its process ends after a second of CPU time."""
    with pytest.raises(Refusal, match="the grammar cannot be compiled: it takes too"):
        grammar_of(Grammar(kind="json", value={"allOf": PATTERNS}))


OTHER_DIGIT = {"$defs": {"digit": {"const": "x"}}, **record(a={"$ref": "#/$defs/digit"})}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": SCHEMAS["reference"]}},
    {"type": "function", "function": {"name": 'say "hi"', "parameters": OTHER_DIGIT}},
    {"type": "function", "function": {"name": "stop"}},
]  # fmt: skip
LOOKS = '{"name": "look", "parameters": {"a":1}}'
SAYS = '{"name": "say \\"hi\\"", "parameters": {"a":"x"}}'
STOPS = '{"name": "stop", "parameters": {}}'


def test_the_calls_that_tool_choice_requires(tokenizer):
    """Each with the schema of its function, whose references begin at its own root."""
    grammar = calls_grammar(TOOLS, "list", "", parallel=True)
    for text in (f"[{LOOKS}]", f"[{SAYS}]", f"[{STOPS}]", f"[{LOOKS}, {STOPS}, {SAYS}]"):
        json.loads(text)
        assert accepts(grammar, text, tokenizer), text
    for text in ("[]", LOOKS, f"[{LOOKS}", f"[{LOOKS.replace('1', '12')}]", f"[{LOOKS.replace('look', 'see')}]"):
        assert not accepts(grammar, text, tokenizer), text
    one = calls_grammar(TOOLS, "list", "", parallel=False)
    assert accepts(one, f"[{LOOKS}]", tokenizer) and not accepts(one, f"[{LOOKS}, {STOPS}]", tokenizer)


def test_the_arguments_of_the_function_that_tool_choice_names(tokenizer):
    grammars = {name: calls_grammar(TOOLS, "arguments", name, parallel=True) for name in ("look", 'say "hi"', "stop")}
    texts = {"look": '{"a":1}', 'say "hi"': '{"a":"x"}', "stop": "{}"}
    for name, grammar in grammars.items():
        assert [other for other, text in texts.items() if accepts(grammar, text, tokenizer)] == [name]


def test_schemas_of_parameters_that_are_refused():
    tool = lambda parameters: [{"type": "function", "function": {"name": "look", "parameters": parameters}}]
    for how in ("list", "arguments"):
        for parameters, words in ((5, "the parameters of the function 'look' must be"), ({"not": {}}, "Unimplemented")):
            with pytest.raises(Refusal, match=words):
                calls_grammar(tool(parameters), how, "look", parallel=True)


@pytest.fixture(scope="module")
def caller(folder):
    """A tokenizer of a model that calls tools between two tokens, and thinks between two others."""
    inner = PreTrainedTokenizerFast.from_pretrained(folder)
    inner.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    return TokenizerWrapper(inner, tool_call_start="<tool_call>", tool_call_end="</tool_call>", tool_parser=json.loads)


def test_tools_with_a_format_of_the_answer(caller):
    """Calls, in whatever format the model writes them, or text of the format; both after its thoughts."""
    call, both = "<tool_call>any text {</tool_call>", "<tool_call>a</tool_call>\n<tool_call>b</tool_call>"
    grammar = after_thinking(or_calls(regex("x+y"), caller, parallel=True), caller, "normal")
    for text in ("xxy", call, both, "<think>hm</think>xy", f"<think>hm</think>{call}"):
        assert accepts(grammar, text, caller), text
    for text in ("z", call + "xy", "xy" + call, "<tool_call>open", "<think>xy"):
        assert not accepts(grammar, text, caller), text
    one = or_calls(regex("x+y"), caller, parallel=False)
    assert accepts(one, call, caller) and not accepts(one, both, caller)


def test_calls_up_to_the_end_of_the_answer_with_a_format(folder):
    """Mistral's models write them so."""
    inner = PreTrainedTokenizerFast.from_pretrained(folder)
    inner.add_tokens(["[TOOL_CALLS]"])
    calls = TokenizerWrapper(inner, tool_call_start="[TOOL_CALLS]", tool_call_end="", tool_parser=json.loads)
    grammar = or_calls(regex("x+y"), calls, parallel=True)
    assert [accepts(grammar, text, calls) for text in ("xy", "[TOOL_CALLS]look[ARGS]{}", "look")] == [True, True, False]


def test_calls_that_begin_with_ordinary_text_are_refused_with_a_format(tokenizer):
    calls = TokenizerWrapper(tokenizer._tokenizer, tool_call_start="<function", tool_call_end="</function>")
    with pytest.raises(Refusal, match="response_format with tools is not served with this model"):
        or_calls(regex("x+y"), calls, parallel=True)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_mask_is_that_of_the_context_whatever_was_asked_before(tokenizer, data):
    """Contexts that grow, shrink, change, and have tokens that the grammar refuses, as drafts do."""
    grammar = regex(r"(ab|ac)*d")
    mask = lambda processor, context: processor(mx.array([1, 2, *context]), mx.zeros((1, VOCABULARY))).tolist()
    new = lambda: GrammarProcessor(grammar, grammar_tokenizer(tokenizer), 2)
    processor, context = new(), []
    letters = tokenizer.encode("abcd") + [END]
    for _ in range(data.draw(st.integers(1, 8))):
        kept = data.draw(st.integers(0, len(context)))
        context = context[:kept] + data.draw(st.lists(st.sampled_from(letters), max_size=4))
        assert mask(processor, context) == mask(new(), context)


def test_a_matcher_that_has_failed_serves_other_contexts(tokenizer):
    grammar = grammar_of(Grammar(kind="json", value=FAILS))
    allowed = lambda text: [
        token
        for token, value in enumerate(
            processor(mx.array([5, *tokenizer.encode(text)]), mx.zeros((1, VOCABULARY)))[0].tolist()
        )
        if value == 0
    ]
    processor = GrammarProcessor(grammar, grammar_tokenizer(tokenizer), 1)
    failing = '{"a":1,"b":{'
    assert allowed(failing) == [END]
    assert allowed('{"a":') == sorted(tokenizer.encode("1\n "))
    assert processor.failure([5, *tokenizer.encode(failing), END]).startswith("Parser Error: Current row")
    assert allowed('{"a":1') == sorted(tokenizer.encode(",\n "))


def test_logits_beyond_the_tokenizer_are_never_allowed(tokenizer):
    processor = GrammarProcessor(regex("a*"), grammar_tokenizer(tokenizer), 1)
    for dtype in (mx.float32, mx.bfloat16):
        masked = processor(mx.array([5]), mx.ones((1, VOCABULARY + 70), dtype=dtype))
        assert masked.dtype == dtype
        assert [i for i, value in enumerate(masked[0].tolist()) if value == 1] == [*tokenizer.encode("a"), END]


@pytest.mark.parametrize("state", ["normal", "reasoning"])
def test_the_answer_of_a_model_that_thinks_comes_after_its_thoughts(folder, state):
    """In the state "reasoning" it has begun them; else it may, or may not."""
    inner = PreTrainedTokenizerFast.from_pretrained(folder)
    inner.add_tokens(["<think>", "</think>"])
    thinks = TokenizerWrapper(inner)
    grammar = after_thinking(regex("x+y"), thinks, state)
    processor = GrammarProcessor(grammar, grammar_tokenizer(thinks), 0)

    def allowed(text):
        masked = processor(mx.array(thinks.encode(text), dtype=mx.uint32), mx.zeros((1, len(thinks))))
        found = [token for token, value in enumerate(masked[0].tolist()) if value == 0]
        return set(thinks.convert_ids_to_tokens(found))

    begin = "<think>" if state == "normal" else ""
    assert allowed("") == {"x", "<think>"} if state == "normal" else {"x", "y", "</think>"} <= allowed("")
    assert {"x", "y", "z", "</think>"} <= allowed(begin + "thoughts\n") and END not in allowed(begin + "thoughts")
    assert allowed(begin + "thoughts</think>") == {"x"}
    assert allowed(begin + "thoughts</think>x") == {"x", "y"}
    assert allowed(begin + "thoughts</think>xy") == {"<|end|>"}


@pytest.mark.long
@pytest.mark.parametrize("begun", [False, True])
def test_chats_with_a_model_that_thinks(tmp_path, begun):
    """With a template that begins the thoughts, and one that does not: they are no part of the content."""
    folder = save_model_folder(tmp_path / "thinks", vocab_size=VOCABULARY + 2)
    inner = PreTrainedTokenizerFast.from_pretrained(folder)
    inner.add_tokens(["<think>", "</think>"])
    inner.chat_template = TEMPLATE + "<think>" * begun
    inner.save_pretrained(folder)
    thinks = {"logit_bias": {str(VOCABULARY): 50, str(VOCABULARY + 1): 3}}
    with ServerProcess(folder, 2) as server:
        for form, is_one in (
            ({"structured_outputs": {"regex": REGEXES[2]}}, lambda text: re.fullmatch(REGEXES[2], text)),
            (
                {"response_format": schema_format(SCHEMAS["record"])},
                lambda text: fits(SCHEMAS["record"], json.loads(text)),
            ),
        ):
            body = {"messages": [{"role": "user", "content": "hello"}]} | SAMPLED | thinks | form
            (choice,) = server.ask(body, CHAT)["choices"]
            assert choice["finish_reason"] == "stop" and is_one(choice["message"]["content"])
            assert choice["message"]["reasoning"]


def test_models_whose_answers_have_parts_are_refused(tokenizer):
    with pytest.raises(Refusal, match="not served for chats with this model"):
        after_thinking(regex("x"), tokenizer, "header")
