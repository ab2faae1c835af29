"""Bodies of requests: JSON within limits, and the rules of their fields.

A rule is the metadata of a field: it checks the value, and says in the table of the docs what the value may be.
"""

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from mlxdist.base.json_reader import NestedTooDeeply, parse_json

from ..refusal import Refusal

__all__ = [
    "Checked", "Fields", "Integer", "Number", "OneOf", "Only", "Rule", "Unused", "check", "list_or_text", "parse",
    "tokens_of",
]  # fmt: skip

_MAX_DEPTH = 32  # of lists and objects in each other
_MAX_TOKEN = (1 << 31) - 1  # of decisions to the ranks, with 4 bytes each
_WITH_TEXT = (str, list, dict)
_HALF = re.compile("[\ud800-\udfff]")
_ESCAPED = re.compile(rb"\\u[dD][89a-fA-F]")  # a half, that of a pair, or a text about one
_PROBLEMS = {  # pydantic's names of errors
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "missing": "is missing",
    "model_type": "must be an object",
    "other_type": "{problem}",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must not be empty",
    "string_type": "must be a string",
    "too_long": "must have at most {max_length} items",
    "too_short": "must not be empty",
    "value_error": "{error}",
}

Body = TypeVar("Body", bound="Fields")


class Fields(BaseModel):
    """An object of a request. A field of null counts as one that is not given."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            return value
        given = {name: item for name, item in value.items() if item is not None}
        if cls.model_config.get("extra") == "allow":
            return given
        if info.context:  # the operator ignores unknown fields
            return {name: item for name, item in given.items() if name in cls.model_fields}
        if problem := cls.unknown(given):  # pydantic would make an error of each of a million
            raise ValueError(problem[1])
        return given

    @classmethod
    def unknown(cls, given: Mapping[str, Any]) -> tuple[str, str] | None:
        """The name of the first field that is not known, and a sentence about it; None if there is none."""
        name = next((name for name, value in given.items() if name not in cls.model_fields and value is not None), None)
        if name is None:
            return None
        name = name[:64]
        near = difflib.get_close_matches(name, cls.model_fields, 1)
        return name, f"has no field {name!a}{f'; did you mean {near[0]}?' if near else '; leave it out'}"


class Rule:
    """The rule of a field."""

    def check(self, value: Any) -> Any:
        """The value as the server takes it. Raises ValueError: it is none; the text follows the field's name."""
        raise NotImplementedError

    @property
    def words(self) -> str:
        """The allowed values, for the table in the docs."""
        raise NotImplementedError

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)


@dataclass(frozen=True)
class Number(Rule):
    """A number from ``low`` to ``high``.

    Attributes:
        least: the least number above 0.
        off: values that mean "off", inside of the range or not, with what the server takes them for.
    """

    low: float
    high: float
    least: float = 0.0
    off: Mapping[float, Any] = field(default_factory=dict)

    def check(self, value: Any) -> Any:
        if type(value) not in (int, float):
            raise ValueError(f"must be {self._kind}")
        if value in self.off:
            return self.off[value]
        if not self.low <= value <= self.high:
            raise ValueError(f"must be {self._kind} {self._range}")
        if 0 < value < self.least:
            raise ValueError(f"must be 0 or at least {self.least}")
        return self._converted(value)

    @property
    def words(self) -> str:
        least = f", 0 or at least {self.least}" if self.least else ""
        off = "".join(f"; {value}: off" for value in self.off)
        return f"{self._range}{least}{off}"

    @property
    def _kind(self) -> str:
        return "a number"

    @property
    def _range(self) -> str:
        return f"from {self.low} to {self.high}"

    def _converted(self, value: Any) -> Any:
        return float(value)


@dataclass(frozen=True)
class Integer(Number):
    """An integer; also as 2.0, which some languages write for 2."""

    @property
    def _kind(self) -> str:
        return "an integer"

    @property
    def _range(self) -> str:
        return f"from {_power(self.low)} to {_power(self.high)}"

    def _converted(self, value: Any) -> Any:
        if value != int(value):
            raise ValueError("must be an integer")
        return int(value)


@dataclass(frozen=True, eq=False)  # typing takes equal metadata for the same, and 1 equals True
class Only(Rule):
    """A field that is not served, but for values with which it changes nothing. ``hint``: what to do instead."""

    allowed: tuple[Any, ...] = ()
    hint: str = ""

    def check(self, value: Any) -> Any:
        if any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in self.allowed):
            return None
        but = " but as " + " or ".join(map(json.dumps, self.allowed)) if self.allowed else ""
        raise ValueError(f"is not served{but}{self.hint and '; '}{self.hint}; leave it out")

    @property
    def words(self) -> str:
        return ", ".join(f"`{json.dumps(each)}`" for each in self.allowed)


class Unused(Rule):
    """A field of any value: none changes an answer."""

    def check(self, value: Any) -> Any:
        return None

    @property
    def words(self) -> str:
        return "any"


@dataclass(frozen=True)
class Checked(Rule):
    """A field that a function checks. It raises ValueError, with a text that follows the field's name."""

    function: Callable[[Any], Any]
    words: str = ""

    def check(self, value: Any) -> Any:
        return self.function(value)


@dataclass(frozen=True)
class OneOf(Rule):
    """An object of one of the classes of a union, by its field `type`.

    Attributes:
        default: the type of an object that has none.
        hint: what follows the sentence about an object of another type.
    """

    default: str = ""
    hint: str = ""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        classes = get_args(source) or (source,)  # a union, or one class
        kinds = {name: kind for kind in classes for name in get_args(kind.model_fields["type"].annotation)}

        def tag(value: Any) -> str:
            return f"<{value.get('type') or self.default if isinstance(value, dict) else ''}>"

        *names, last = kinds
        types = f"{', '.join(names)} or {last}" if names else last
        return core_schema.tagged_union_schema(
            {f"<{name}>": handler.generate_schema(kind) for name, kind in kinds.items()},
            tag,
            custom_error_type="other_type",
            custom_error_message="another type",
            custom_error_context={"problem": f"must be an object of the type {types}{self.hint}"},
        )


def list_or_text(what: str, of_text: Callable[[str], dict[str, Any]]) -> BeforeValidator:
    """Takes a text in place of a list of ``what``: as the one that ``of_text`` makes of it."""

    def as_list(value: Any) -> Any:
        if isinstance(value, str):
            return [of_text(value)]
        if not isinstance(value, list):
            raise ValueError(f"must be a string or a list of {what}")
        return value

    return BeforeValidator(as_list)


def parse(body: bytes, kind: type[Body], *, ignore_unknown: bool = False) -> Body:
    """The request in a body.

    Raises:
        Refusal: the body is not UTF-8 or no JSON object, or is nested too deep; a field is unknown, or has a value that
            is not served. ``param`` is the field.
    """
    try:
        parsed = parse_json(body.decode(), repeated=True)
    except UnicodeDecodeError as error:
        raise Refusal(f"byte {error.start} of the body is not of UTF-8") from None
    except NestedTooDeeply:
        raise Refusal(f"the body has more than {_MAX_DEPTH} lists and objects in each other") from None
    except ValueError as error:
        raise Refusal(f"Invalid JSON in request body: {error}") from None
    if not isinstance(parsed, dict):
        raise Refusal("the body is not a JSON object")
    _check_depth(parsed)
    if _ESCAPED.search(body) and (problem := _half(parsed)):
        raise Refusal(f"{problem[0] or 'the body'} has {problem[1]}", param=problem[0] or None)
    return check(parsed, kind, ignore_unknown=ignore_unknown)


def check(fields: dict[str, Any], kind: type[Body], *, ignore_unknown: bool = False) -> Body:
    """The request with these fields. Raises Refusal: see :func:`parse`."""
    if not ignore_unknown and (unknown := kind.unknown(fields)):
        raise Refusal(f"the request {unknown[1]}", param=unknown[0])
    try:
        return kind.model_validate(fields, context=ignore_unknown)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    path = ""
    for part in first["loc"]:
        if isinstance(part, str) and part.startswith("<"):  # of OneOf: no part of the request
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part[:64]!a}" if not part.isidentifier() else f".{part}"
    path = path.removeprefix(".")
    problem = _PROBLEMS.get(first["type"], f"is wrong: {first['msg']}").format_map(first.get("ctx", {}))
    raise Refusal(f"{path} {problem}", param=path)


def tokens_of(value: Any) -> list[int]:
    """A list of the ids of tokens. Raises ValueError: it is none."""
    if not (isinstance(value, list) and value):
        raise ValueError("must be a list of tokens, which are integers")
    if set(map(type, value)) != {int} or min(value) < 0 or max(value) > _MAX_TOKEN:  # fast: there may be a million
        raise ValueError(f"must have tokens only, which are integers from 0 to {_MAX_TOKEN}")
    return value


def _check_depth(parsed: dict[str, Any]) -> None:
    level: list[Any] = [parsed]
    for _ in range(_MAX_DEPTH):
        level = [
            item
            for each in level
            for item in (each.values() if isinstance(each, dict) else each)
            if type(item) is dict or type(item) is list
        ]
        if not level:
            return
    raise Refusal(f"the body has more than {_MAX_DEPTH} lists and objects in each other")


def _half(value: Any) -> tuple[str, str] | None:
    """The path of a text that has half of a surrogate pair, and what it has; None if there is none.

    JSON can write that, and no tokenizer can read it. There may be millions of values: the path is made last.
    """
    if isinstance(value, str):
        half = _HALF.search(value)
        text = half and f"\\u{ord(half[0]):04x} at character {half.start()}"
        return ("", f"half of a surrogate pair, {text}: no text has that") if half else None
    items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else enumerate(value)
    for name, item in items:
        if isinstance(name, str) and _HALF.search(name):
            return "", "a name with half of a surrogate pair"
        if isinstance(item, _WITH_TEXT) and (found := _half(item)):
            path, problem = found
            own = name[:64] if isinstance(name, str) else f"[{name}]"
            return f"{own}{'.' if path and path[0] != '[' else ''}{path}", problem
    return None


def _power(number: float) -> str:
    exponent = int(number).bit_length()
    if exponent > 16 and number == (1 << exponent) - 1:
        return f"2**{exponent} - 1"
    return f"-2**{exponent - 1}" if exponent > 16 and number == -(1 << (exponent - 1)) else str(number)
