"""Checks of JSON from a file or from another host, which any program may have written.

The checked values have only known types, numbers within bounds, and text that cannot steer a terminal. A check takes
the name and the value, and returns it or raises ValueError.
"""

import functools
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, field, fields
from typing import Any, TypeVar

__all__ = [
    "Check",
    "as_text",
    "build",
    "checked",
    "checks_of",
    "fields_of",
    "finite",
    "flag",
    "hex_bytes",
    "list_of",
    "map_of",
    "nearest",
    "number",
    "object_of",
    "one_of",
    "or_null",
    "plain_text",
    "positive",
    "printable",
    "read_bounded",
    "row_of",
    "seconds",
    "share",
    "suggestion",
    "text",
]

Check = Callable[[str, Any], Any]

_MAX_SECONDS = 1e12  # in 30000 years


def read_bounded(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """The content of a file. Raises ValueError: the file cannot be read, or has more than ``max_bytes``."""
    try:
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        raise ValueError(error.strerror if isinstance(error, OSError) else "no file has such a name") from None
    if len(data) > max_bytes:
        raise ValueError(f"it has more than {max_bytes} bytes")
    return data


def _value(fits: Callable[[Any], bool], wanted: str, convert: Callable[[Any], Any] | None = None) -> Check:
    def check(name: str, value: Any) -> Any:
        if not fits(value):
            raise ValueError(f"{name} is {value!r:.50}, not {wanted}")
        return convert(value) if convert else value

    return check


def number(low: int, high: int) -> Check:
    # Not isinstance, which accepts True as an integer.
    return _value(lambda value: type(value) is int and low <= value <= high, f"a whole number from {low} to {high}")


def positive(most: float) -> Check:
    wanted = f"a number above 0 and at most {most:g}"
    return _value(lambda value: type(value) in (int, float) and 0 < value <= most, wanted, float)


def _real(low: float, high: float, wanted: str, convert: Callable[[Any], Any] | None = float) -> Check:
    """A check for a number from ``low`` to ``high``, which NaN never is."""
    # Not math.isfinite, which raises OverflowError for an integer that is too large for a float.
    return _value(lambda value: type(value) in (int, float) and low <= value <= high, wanted, convert)


flag = _value(lambda value: type(value) is bool, "true or false")
finite = _real(-sys.float_info.max, sys.float_info.max, "a finite number", None)
seconds = _real(0, _MAX_SECONDS, "a number of seconds")  # a time or a duration
share = _real(0, 1, "a number from 0 to 1")


def text(most: int = 256) -> Check:
    return _value(lambda value: type(value) is str, "a text", lambda value: printable(value[:most]))


def plain_text(most: int, steering: str = "\n\t") -> Check:
    """A check for text that `text` would not change. ``steering``: the control characters that it may have."""

    def check(name: str, value: Any) -> str:
        if type(value) is not str or len(value) > most or not all(c.isprintable() or c in steering for c in value):
            raise ValueError(f"{name} must be a text of at most {most} characters that can be printed")
        return value

    return check


def hex_bytes(low: int, high: int) -> Check:
    """A check for bytes written as hexadecimal digits: at least ``low``, at most ``high``."""
    digits = re.compile(f"([0-9a-f]{{2}}){{{low},{high}}}")
    return _value(
        lambda value: type(value) is str and digits.fullmatch(value) is not None,
        f"{low} to {high} bytes as hexadecimal digits",
        bytes.fromhex,
    )


def one_of(choices: Collection[str]) -> Check:
    return _value(lambda value: type(value) is str and value in choices, f"one of {', '.join(choices)}")


def as_text(name: str, value: Any) -> str:
    """Any value as text, complete and unchanged: it may still have characters that steer a terminal."""
    return str(value)


def printable(value: str) -> str:
    """The text with "?" in place of each character that cannot be printed, such as those that steer a terminal."""
    return "".join(c if c.isprintable() else "?" for c in value)


def or_null(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def list_of(check: Check, most: int) -> Check:
    def check_list(name: str, value: Any) -> tuple:
        if type(value) is not list or len(value) > most:
            raise ValueError(f"{name} is no list of at most {most}")
        return tuple(check(name, element) for element in value)

    return check_list


def row_of(*checks: Check) -> Check:
    """A check for a list of fixed length, with a check for each element."""

    def check_row(name: str, value: Any) -> tuple:
        if type(value) is not list or len(value) != len(checks):
            raise ValueError(f"{name} is no list of {len(checks)}")
        return tuple(check(name, element) for check, element in zip(checks, value))

    return check_row


def map_of(check: Check, most: int) -> Check:
    def check_map(name: str, value: Any) -> dict[str, Any]:
        if type(value) is not dict or len(value) > most:
            raise ValueError(f"{name} is no object of at most {most}")
        return {text()(name, key): check(name, element) for key, element in value.items()}

    return check_map


def fields_of(checks: Mapping[str, Check], value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise ValueError("what should be an object is none")
    if missing := checks.keys() - value.keys():
        raise ValueError(f"{min(missing)} is missing")
    return {name: check(name, value[name]) for name, check in checks.items()}


def object_of(checks: Mapping[str, Check] | type) -> Check:
    """A check for an object with these fields, or those of a dataclass, which it becomes; other fields are dropped."""
    return lambda name, value: build(checks, value) if isinstance(checks, type) else fields_of(checks, value)


def checked(check: Check, default: Any = MISSING) -> Any:
    """A field of a dataclass that `build` checks with ``check``. Each object has its own copy of a default dict."""
    metadata = {"check": check}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


_T = TypeVar("_T")


def build(kind: Callable[..., _T], value: Any) -> _T:
    """Builds a dataclass from JSON whose keys are its fields. Raises ValueError: the JSON does not fit the fields."""
    return kind(**fields_of(checks_of(kind), value))


@functools.cache
def checks_of(kind: Any) -> dict[str, Check]:
    """The checks of a dataclass, by the names of the fields that are `checked`."""
    return {one.name: one.metadata["check"] for one in fields(kind) if "check" in one.metadata}


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most similar to ``name``, which the user probably meant; None if none is similar."""
    import difflib  # seldom needed, and commands start fast

    return next(iter(difflib.get_close_matches(name, known, n=1)), None)


def suggestion(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Advice for an unknown ``name``, in words: the nearest known name, or all of them."""
    found = nearest(name, known)
    return f"did you mean {prefix}{found}?" if found else f"there are {', '.join(known)}"
