"""Structured output: whatever a random model samples, what ends by itself is of its schema or regular expression."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import openai
import pytest
from mlx_lm import load
from mlx_lm.tokenizer_utils import TokenizerWrapper
from serving import PLAIN, VOCABULARY, ServerProcess, save_model_folder
from transformers import PreTrainedTokenizerFast

from mlxdist.serve.grammar import GrammarProcessor, after_thinking, grammar_of, grammar_tokenizer
from mlxdist.serve.limits import Refusal

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


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load(str(folder))[1]


@pytest.fixture(
    scope="module",
    params=["2", *(pytest.param(name, marks=pytest.mark.long) for name in ("1", "3", "2 stages"))],
)
def server(request, folder):
    ranks, *stages = request.param.split()
    with ServerProcess(folder, int(ranks), *(["--pipeline"] if stages else [])) as server:
        yield server
        assert server.stop() == 0, "".join(server.lines)


def test_what_a_random_model_samples_is_of_its_schema_or_expression(server):
    """All at once, with requests that are free; these have the tokens that they have alone."""
    sampled = {"max_tokens": 400, "temperature": 1.0, "seed": 7}
    bodies = [{"prompt": name, "response_format": schema_format(schema)} for name, schema in SCHEMAS.items()]
    bodies += [{"prompt": "expression", "structured_outputs": {"regex": regex}} for regex in REGEXES]
    free = [{"prompt": f"free {number}", "max_tokens": 60} for number in range(3)]
    alone = [server.text(**sampled | body) for body in free]
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda body: server.ask(sampled | body), bodies + free))
    texts = [answer["choices"][0]["text"] for answer in answers]
    assert texts[len(bodies) :] == alone
    for schema, text in zip(SCHEMAS.values(), texts):
        assert fits(schema, json.loads(text)), (schema, text)
    for regex, text in zip(REGEXES, texts[len(SCHEMAS) :]):
        assert re.fullmatch(regex, text), (regex, text)
    assert {answer["choices"][0]["finish_reason"] for answer in answers[: len(bodies)]} == {"stop"}
