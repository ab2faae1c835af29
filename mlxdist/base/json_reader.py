"""The one reader of JSON: of files, of what other hosts and ranks send, and of what programs print.

The standard library accepts text that JSON does not have or does not define. This reader rejects it: NaN, Infinity, a
number such as 1e999 that is infinite as a float, and a name that occurs twice in one object.
"""

import json
import json.decoder
import json.scanner
import math
import re
import sys
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

__all__ = ["Located", "NestedTooDeeply", "parse_json", "parse_located"]

# Strings come first, so that digits inside a string are not taken for a number.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|-?Infinity|NaN|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?', re.DOTALL)


class NestedTooDeeply(ValueError):
    """A JSON text nests lists and objects more deeply than Python's recursion limit."""


class _Rejected(ValueError):
    """A value that the standard library accepts. ``number``: its spelling in the text, to locate it there; or empty."""

    def __init__(self, problem: str, number: str = "") -> None:
        super().__init__(problem)
        self.number = number


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise _Rejected(f"{number:.50} is not a finite number", number)
    return value


def _whole(number: str) -> int:
    try:
        return int(number)
    except ValueError:
        raise _Rejected(_digits()) from None


def _digits() -> str:
    return f"a number has more than {sys.get_int_max_str_digits()} digits"


def _constant(name: str) -> None:
    raise _Rejected(f"{name} is not a number of JSON", name)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, _ in pairs if sum(name == other for other, _ in pairs) > 1)
        raise _Rejected(f"{twice!r:.50} is there twice in one object")
    return found


_NUMBERS: Any = {"parse_float": _finite, "parse_constant": _constant}
_DECODER = json.JSONDecoder(object_pairs_hook=_object, **_NUMBERS)
_OF_OTHERS = json.JSONDecoder(**_NUMBERS)


def parse_json(data: bytes | bytearray | str, *, repeated: bool = False) -> Any:
    """The value of a JSON text in UTF-8, which may begin with a byte order mark.

    Args:
        repeated: accept a name that occurs twice in an object, for text that other programs print or send. The last
            value counts.

    Raises:
        ValueError: the text is not JSON, or has a rejected value; the message gives the position if it is known.
            NestedTooDeeply is a subclass.
    """
    text = ""
    try:
        # Not "utf-8-sig", which Python loads from a file when it is first used: rank 0 may be out of descriptors then.
        text = (data if isinstance(data, str) else data.decode()).removeprefix("\ufeff")
        return (_OF_OTHERS if repeated else _DECODER).decode(text)
    except UnicodeDecodeError as error:
        problem = f"byte {error.start} is not UTF-8"
    except json.JSONDecodeError as error:
        problem = f"line {error.lineno}, column {error.colno}: {error.msg}"
    except _Rejected as error:
        problem = f"{error}{_place(text, error.number)}" if error.number else str(error)
    except RecursionError:
        raise NestedTooDeeply("it is nested too deeply") from None
    except ValueError:  # of int()
        problem = _digits()
    raise ValueError(problem)


def _place(text: str, number: str) -> str:
    """The first line and column of ``number``, for a message: the decoder passes its hooks no position."""
    at = next((found.start() for found in _TOKEN.finditer(text) if found[0] == number), 0)
    return f" (line {text.count(chr(10), 0, at) + 1}, column {at - text.rfind(chr(10), 0, at)})"


@dataclass(frozen=True)
class Located:
    """A JSON value and the line in which it begins, from 1. The values inside a list or an object are Located, too."""

    value: Any
    line: int

    def plain(self) -> Any:
        """The value as `parse_json` returns it."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value


class _LocatingDecoder(json.JSONDecoder):
    """The standard library's decoder in Python: it parses each value at a known position."""

    def __init__(self, text: str) -> None:
        super().__init__(object_pairs_hook=_once, parse_int=_whole, **_NUMBERS)
        self._line_ends = [at for at, letter in enumerate(text) if letter == "\n"]
        # The scanner in C passes hooks no position. These Python parts of the decoder do; stubs do not declare them.
        parse_object, parse_array = json.decoder.JSONObject, json.decoder.JSONArray  # type: ignore[attr-defined]
        self.parse_object = lambda begin, strict, scan, *hooks: parse_object(begin, strict, self._located, *hooks)
        self.parse_array = lambda begin, scan: parse_array(begin, self._located)
        self._scan = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]
        self.scan_once = self._located

    def _located(self, text: str, at: int) -> tuple[Located, int]:
        line = bisect_left(self._line_ends, at) + 1
        try:
            value, end = self._scan(text, at)
        except _Rejected as error:
            raise ValueError(f"line {line}: {error}") from None
        return Located(value, line), end


def _once(pairs: list[tuple[str, Located]]) -> dict[str, Located]:
    """The members of an object. Raises ValueError for a repeated name: JSON does not define which value counts."""
    members: dict[str, Located] = {}
    for name, value in pairs:
        if name in members:
            raise ValueError(f"line {value.line}: {name!r:.80} is there twice, first in line {members[name].line}")
        members[name] = value
    return members


def parse_located(text: str) -> Located:
    """Parses JSON like `parse_json`, with the line of each value, for files that people write. Slow: it is in Python.

    Raises:
        ValueError: the text is not JSON, or has a rejected value; the message begins with the line, "line N".
    """
    try:
        return _LocatingDecoder(text).decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise NestedTooDeeply("line 1: it is nested too deeply") from None
