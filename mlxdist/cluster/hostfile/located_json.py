"""JSON with the line of each value, for messages."""

import json
import json.decoder
import json.scanner
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from mlxdist.base.validation import reject_constant

__all__ = ["Located", "parse"]


@dataclass(frozen=True)
class Located:
    """A value of JSON: what it is, with the values in it located as well, and the line it begins in, from 1."""

    value: Any
    line: int

    def plain(self) -> Any:
        """The value as `json.loads` returns it."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value


class _Decoder(json.JSONDecoder):
    """The standard library's decoder in Python: it parses each value at a known position."""

    def __init__(self, text: str) -> None:
        super().__init__(object_pairs_hook=_once, parse_constant=reject_constant)
        self._line_ends = [at for at, letter in enumerate(text) if letter == "\n"]
        # Without declared types: the parts of the decoder that are in Python.
        parse_object, parse_array = json.decoder.JSONObject, json.decoder.JSONArray  # type: ignore[attr-defined]
        self.parse_object = lambda begin, strict, scan, *hooks: parse_object(begin, strict, self._located, *hooks)
        self.parse_array = lambda begin, scan: parse_array(begin, self._located)
        self._scan = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]
        self.scan_once = self._located

    def _located(self, text: str, at: int) -> tuple[Located, int]:
        value, end = self._scan(text, at)
        return Located(value, bisect_left(self._line_ends, at) + 1), end


def _once(pairs: list[tuple[str, Located]]) -> dict[str, Located]:
    """An object's members. Of two with one name, JSON leaves open which counts."""
    members: dict[str, Located] = {}
    for name, value in pairs:
        if name in members:
            raise ValueError(f"line {value.line}: {name!r:.80} is there twice, first in line {members[name].line}")
        members[name] = value
    return members


def parse(text: str) -> Located:
    """Raises ValueError with "line N: ..." for what is not JSON."""
    try:
        return _Decoder(text).decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise ValueError("line 1: it is nested too deeply") from None
