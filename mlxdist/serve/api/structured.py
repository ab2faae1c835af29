"""Structured output: the fields of OpenAI's, vLLM's and llama.cpp's APIs that say what an answer must be."""

from typing import Any

from mlxdist.base.json_reader import parse_json

from ..protocol import Grammar

__all__ = ["choice", "json_schema", "lark", "regex", "response_format", "structured_outputs"]


def response_format(value: Any) -> Grammar | None:
    """The grammar of OpenAI's `response_format`; None for text. Raises ValueError."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar(kind="json", value={"type": "object"})
    if kind != "json_schema":
        raise ValueError("must have the type text, json_object or json_schema")
    inner = value.get("json_schema")
    if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
        raise ValueError("must have json_schema, an object, with schema, an object")
    return Grammar(kind="json", value=inner["schema"])


def json_schema(value: Any) -> Grammar:
    """The grammar of a JSON schema, an object or its text. Raises ValueError."""
    if isinstance(value, str):
        try:
            value = parse_json(value, repeated=True)
        except ValueError as error:
            raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("must be a JSON schema, an object")
    return Grammar(kind="json", value=value)


def regex(value: Any) -> Grammar:
    """The grammar of a regular expression. Raises ValueError."""
    if not (isinstance(value, str) and value):
        raise ValueError("must be a regular expression, a string")
    return Grammar(kind="regex", value=value)


def choice(value: Any) -> Grammar:
    """The grammar of a list of texts. Raises ValueError."""
    if not (isinstance(value, list) and value and all(isinstance(text, str) and text for text in value)):
        raise ValueError("must be a list of strings, of which the answer is one")
    return Grammar(kind="choice", value=value)


def lark(value: Any) -> Grammar:
    """A grammar in llguidance's variant of Lark. Raises ValueError."""
    if not (isinstance(value, str) and value):
        raise ValueError("must be a grammar, a string")
    return Grammar(kind="lark", value=value)


_KINDS = {"json": json_schema, "regex": regex, "choice": choice, "grammar": lark}


def structured_outputs(value: Any) -> Grammar:
    """The grammar of vLLM's `structured_outputs`. Raises ValueError."""
    given = {} if not isinstance(value, dict) else {name: item for name, item in value.items() if item is not None}
    if len(given) != 1 or not given.keys() <= _KINDS.keys():
        raise ValueError('must be an object with one field: "json", "regex", "choice" or "grammar"')
    ((name, item),) = given.items()
    try:
        return _KINDS[name](item)
    except ValueError as error:
        raise ValueError(f"is wrong: {name} {error}") from None
